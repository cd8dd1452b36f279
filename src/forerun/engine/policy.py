"""How many tree nodes a request gets in a step: what a policy is asked and told, a fixed one, and what steps cost.

Knows: measured costs of passes, corrected by those of the running engine. Does not know: drafters, chances; the policy
that weighs them is in `policy_adaptive`. What a policy decides changes speed, never tokens under the coupled rule;
under the rejection rule it decides before anything is drawn, so the distribution stays the target's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from forerun.core import Request
from forerun.speculation.draft import Draft

_MAX_JUMP, _RISE, _FALL = 4.0, 0.1, 0.3  # how far and how fast what is known of a step follows one
_SETTLING = 4  # measurements of which the least counts


class Policy(Protocol):
    """Decides node budgets and learns from what came of them."""

    @property
    def prunes(self) -> bool:
        """Whether `admit` looks at all drafts, which therefore must have been read."""

    def begin_step(self, num_deciding: int) -> None:
        """A step begins in which about this many requests choose tokens."""

    def node_budget(self, request: Request) -> int:
        """Tree nodes, the root included."""

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Of the drafted nodes `num_tested` were looked at and `num_accepted` accepted."""

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """Prune the trees of a step in which so many requests choose tokens to the nodes worth verifying.

        Of pending drafts nothing is known but how many nodes they may have.
        """

    def learn_proposals(self, draft: Draft, tokens: Sequence[int]) -> None:
        """These tokens followed the root of a draft."""

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """A pass over this many rows took this long, and the step around it, drafting apart, this much more."""

    def plain_step_s(self, num_requests: int) -> float | None:
        """Seconds a step without drafts would take with so many requests; None where costs were not measured."""

    def explain(self, request: Request) -> str | None:
        """Why this request would have no drafts now; None if it would."""

    def end(self, request: Request) -> None:
        """A request is over; forget it."""


class AsDrafted:
    """What a policy does that decides before anything is drafted: trees stay as they are."""

    @property
    def prunes(self) -> bool:
        """Never."""
        return False

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """All nodes are verified."""

    def learn_proposals(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Nothing to learn of members."""

    def plain_step_s(self, num_requests: int) -> float | None:
        """Not known."""
        return None


class FixedPolicy(AsDrafted):
    """Always the same number of nodes."""

    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes

    def begin_step(self, num_deciding: int) -> None:
        """Nothing depends on the load."""

    def node_budget(self, request: Request) -> int:
        """The fixed budget as far as the request allows; the root alone where it asked not to speculate."""
        return min(self._max_nodes, request.max_nodes or self._max_nodes) if request.speculate else 1

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """Nothing to learn."""

    def explain(self, request: Request) -> str | None:
        """Only without a drafter."""
        return "there is no drafter" if self._max_nodes <= 1 else None

    def end(self, request: Request) -> None:
        """Nothing to forget."""


class VerifyCost:
    """Seconds one forward over M rows takes, from measurements at a few M.

    More rows never cost less: where a measurement says so, the one of fewer rows was disturbed.
    """

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        self._rows = sorted(seconds_by_rows)
        descending = (seconds_by_rows[rows] for rows in reversed(self._rows))
        self._seconds = list(accumulate(descending, min))[::-1]
        self._nearest: dict[int, int] = {}

    @property
    def points(self) -> dict[int, float]:
        """Seconds by number of rows, where they were measured."""
        return dict(zip(self._rows, self._seconds, strict=True))

    @property
    def max_rows(self) -> int:
        """The most rows that were measured."""
        return self._rows[-1]

    def nearest(self, num_rows: int) -> int:
        """The number of rows measured that is next to this one."""
        if num_rows not in self._nearest:
            self._nearest[num_rows] = min(self._rows, key=lambda rows: (abs(rows - num_rows), rows))
        return self._nearest[num_rows]

    def __call__(self, num_rows: int) -> float:
        """Linear between measured points and beyond the last."""
        if len(self._rows) == 1:
            return self._seconds[0]
        high = min(max(bisect_left(self._rows, num_rows), 1), len(self._rows) - 1)
        x0, x1 = self._rows[high - 1], self._rows[high]
        y0, y1 = self._seconds[high - 1], self._seconds[high]
        return y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0)


@dataclass(slots=True)
class StepCosts:
    """Seconds of a whole step: passes as measured at start, corrected by those of the running engine.

    Passes there are slower than measured alone: caches are colder, contexts longer. By how much is kept for every
    number of rows measured, since few rows wait for memory and many compute; one never seen is as its neighbour.
    """

    verify_cost: VerifyCost
    overhead_s: float = 0.0  # of a step without drafts
    extra_s: float = 0.0  # what drafts add to that: more rows to lay out, more choices to make
    _slowness: dict[int, float] = field(default_factory=dict)  # by the number of rows measured next to a pass's
    _num_seen: dict[int, int] = field(default_factory=dict)  # likewise
    _num_plain: int = 0

    def slowness(self, num_rows: int) -> float:
        """Passes in the running engine over those measured at start."""
        point = self.verify_cost.nearest(num_rows)
        if point not in self._slowness and self._slowness:
            point = min(self._slowness, key=lambda known: abs(math.log(known / point)))
        return self._slowness.get(point, 1.0)

    def pass_s(self, num_rows: int) -> float:
        """One pass over so many rows."""
        return self.slowness(num_rows) * self.verify_cost(num_rows)

    def step_s(self, num_rows: int, drafts: bool) -> float:
        """A step around such a pass, drafting apart."""
        return self.pass_s(num_rows) + self.overhead_s + (self.extra_s if drafts else 0.0)

    def learn(self, num_rows: int, drafts: bool, forward_s: float | None, overhead_s: float) -> None:
        """Running means of a step's overhead and of how much slower passes are than when measured alone.

        `forward_s` None: the pass was not timed apart from other work of its device.
        """
        if num_rows > self.verify_cost.max_rows:
            return
        if forward_s is not None:
            self._learn_pass(num_rows, forward_s)
        overhead_s = min(overhead_s, self.verify_cost(num_rows))
        if drafts and self._num_plain:
            self.extra_s += _RISE * (max(overhead_s - self.overhead_s, 0.0) - self.extra_s)
        else:  # before the first plain step all overhead counts as what a plain step has, too
            self.overhead_s = _followed(self.overhead_s, overhead_s, self._num_plain)
        self._num_plain += not drafts

    def _learn_pass(self, num_rows: int, forward_s: float) -> None:
        known, point = self.slowness(num_rows), self.verify_cost.nearest(num_rows)
        ratio = min(forward_s / self.verify_cost(num_rows), _MAX_JUMP * known)
        num_seen = self._num_seen.get(point, 0)
        self._slowness[point] = _followed(known, ratio, num_seen)
        self._num_seen[point] = num_seen + 1


def _followed(known: float, seen: float, num_seen: int) -> float:
    """A running mean that begins with the least of the first few, and falls faster than it rises.

    Steps that are the first of their kind, or come behind others of another kind, are slow.
    """
    if num_seen < _SETTLING:
        return min(known, seen) if num_seen else seen
    return known + (_FALL if seen < known else _RISE) * (seen - known)


@dataclass(slots=True)
class CostMemo:
    """Costs of steps as worked out lately: working takes time, and they hardly change from step to step."""

    costs: StepCosts
    _drafted: dict[int, float] = field(default_factory=dict)  # with drafts, by rows
    _plain: dict[int, float] = field(default_factory=dict)  # without, by requests

    def drafted_s(self, num_rows: int) -> float:
        """A step with drafts over so many rows, drafting apart."""
        known = self._drafted.get(num_rows)
        if known is None:
            known = self._drafted[num_rows] = self.costs.step_s(num_rows, True)
        return known

    def plain_s(self, num_requests: int) -> float:
        """A step without drafts."""
        known = self._plain.get(num_requests)
        if known is None:
            known = self._plain[num_requests] = self.costs.step_s(num_requests, False)
        return known

    def forget(self) -> None:
        """More is known by now."""
        self._drafted.clear()
        self._plain.clear()


def rows_to_measure(max_nodes: int, max_rows: int) -> Sequence[int]:
    """Row counts at which the verify cost is measured at start."""
    wanted = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    return [rows for rows in wanted if rows <= max(min(max_rows, max(max_nodes, 8)), 1)]
