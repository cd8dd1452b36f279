"""What an engine asks a policy before a step, and what it tells it afterwards.

Knows: a step's drafts, tokens and times. Does not know: how policies decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forerun.core import Request
from forerun.drafters.base import DraftCall
from forerun.speculation.draft import Draft, DraftPlan


class Outcome(NamedTuple):
    """What a step made of a request that chose tokens."""

    request: Request
    draft: Draft
    tokens: Sequence[int]  # that followed the root


class StepSeconds(NamedTuple):
    """What a step took."""

    draft_s: float
    verify_s: float  # the pass, and choosing from it
    step_s: float  # all of it
    own_s: float  # all of it, on the clock of the calls: on a CPU it stands still while others have the engine's core


class StepResult(NamedTuple):
    """What a step did and what it took."""

    outcomes: Sequence[Outcome]
    calls: Sequence[DraftCall]
    num_rows: int  # of the pass: roots and drafts
    num_span: int  # and known tokens
    seconds: StepSeconds


class StepPlan(DraftPlan, Protocol):
    """What a policy wants of one step. Queries only."""

    @property
    def looks_at_drafts(self) -> bool:
        """Whether `prune` looks at all drafts, which therefore must have been read."""

    def max_nodes(self, request: Request) -> int:
        """Tree nodes a request may have, the root included."""

    def prune(self, drafts: Sequence[Draft]) -> None:
        """Let only those of the drafts' nodes be verified that are worth it."""


class Policy(Protocol):
    """Plans steps and learns from what came of them."""

    def plan(self, requests: Sequence[Request]) -> StepPlan:
        """For a step in which about these requests choose tokens."""

    def learn(self, result: StepResult) -> None:
        """A step is over."""

    def plain_s(self, num_requests: int) -> float | None:
        """Seconds a step of plain decoding takes with so many requests; None where that was not measured."""

    def explain(self, request: Request) -> str | None:
        """Why this request would have no drafts now; None if it would."""
