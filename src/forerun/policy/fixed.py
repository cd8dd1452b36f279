"""The policy that always drafts the same, and that of an engine without a drafter.

Knows: a number of nodes. Does not know: costs, chances, what became of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forerun.core import Request
from forerun.policy.base import StepPlan, StepResult
from forerun.speculation.draft import Draft, Unlimited


@dataclass(frozen=True, slots=True)
class FixedPolicy(Unlimited):
    """Always the same number of nodes. Its own plan, since nothing is learned."""

    num_nodes: int

    looks_at_drafts: ClassVar[bool] = False

    def plan(self, requests: Sequence[Request]) -> StepPlan:
        """The same for every step."""
        return self

    def max_nodes(self, request: Request) -> int:
        """The fixed number as far as the request allows; the root alone where it asked not to speculate."""
        return min(self.num_nodes, request.max_nodes or self.num_nodes) if request.speculate else 1

    def prune(self, drafts: Sequence[Draft]) -> None:
        """All are."""

    def learn(self, result: StepResult) -> None:
        """Nothing."""

    def plain_s(self, num_requests: int) -> None:
        """Not known."""

    def explain(self, request: Request) -> str | None:
        """Only without a drafter."""
        return "there is no drafter" if self.num_nodes <= 1 else None
