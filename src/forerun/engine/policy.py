"""How many tree nodes a request gets in a step; none but the root is always one of the choices.

Knows: measured costs of verifying and drafting, and how often a request's drafts were accepted. Does not know:
trees, drafters' insides. What it decides changes speed, never tokens under the coupled rule; under the rejection
rule it decides before anything is drawn, so the distribution stays the target's.

A chain of k drafts of which each is accepted with chance a (given the one before) emits (1 - a^(k+1)) / (1 - a)
tokens (Leviathan et al., arXiv 2211.17192, eq. 1); k maximises that over t_verify(k + 1) + k * t_draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from forerun.core import Request
from forerun.engine.explain import needed_rate, shortfall
from forerun.engine.policy_ledger import Ledger
from forerun.speculation.growth import Draft

_PRIOR_DRAFTS = 8.0  # how many drafts the engine's average counts for in a new request
_MEMORY = 0.97  # what a past draft counts for after another one
_PROBE_EVERY = 24  # plain steps after which a request that stopped drafting tries once more
_PROBE_STEPS = 2  # in the first of them a drafter may have to catch up; the second shows what drafting costs
_PROBE_DRAFTS = 2
_GUESSED_DRAFT_SHARE = 0.15  # a draft token's cost over a plain step's, until it was measured
_MAX_JUMP, _RISE, _FALL = 4.0, 0.1, 0.5  # how far and how fast a draft's cost follows one step's
_LEAST_GAIN = 1.03  # expected speed over plain decoding from which drafting is worth its uncertainty
_USUAL_OUTPUT, _OUTPUT_RISE = 128.0, 0.2  # tokens an answer is expected to have, and how fast that follows answers


class Policy(Protocol):
    """Decides node budgets and learns from what came of them."""

    def begin_step(self, num_deciding: int) -> None:
        """A step begins in which about this many requests choose tokens."""

    def node_budget(self, request: Request) -> int:
        """Tree nodes, the root included."""

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Of the drafted nodes `num_tested` were looked at and `num_accepted` accepted."""

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """Prune the trees of a step in which so many requests choose tokens to the nodes worth verifying."""

    def learn_parts(self, draft: Draft, tokens: Sequence[int]) -> None:
        """These tokens followed the root of a tree that members of a portfolio proposed."""

    def learn_draft_cost(self, seconds: float, num_drafted: int) -> None:
        """Drafting this many tokens took this long."""

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """A pass over this many rows took this long, and the step around it, drafting apart, this much more."""

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """A drafter took this long for reading this many known tokens it had missed, and for drafting after that."""

    def plain_step_s(self, num_requests: int) -> float | None:
        """Seconds a step without drafts would take with so many requests; None where costs were not measured."""

    def explain(self, request: Request) -> str | None:
        """Why this request would have no drafts now; None if it would."""

    def end(self, request: Request) -> None:
        """A request is over; forget it."""


class AsDrafted:
    """What a policy does that decides before anything is drafted: trees stay as they are."""

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """All nodes are verified."""

    def learn_parts(self, draft: Draft, tokens: Sequence[int]) -> None:
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
        """The fixed budget, or the root alone where the request asked not to speculate."""
        return self._max_nodes if request.speculate else 1

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Nothing to learn."""

    def learn_draft_cost(self, seconds: float, num_drafted: int) -> None:
        """Nothing to learn."""

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """Nothing to learn."""

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """Nothing to learn."""

    def explain(self, request: Request) -> str | None:
        """Only without a drafter."""
        return "there is no drafter" if self._max_nodes <= 1 else None

    def end(self, request: Request) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class Acceptance:
    """A fading count of tested and accepted drafts."""

    tested: float = 0.0
    accepted: float = 0.0

    def add(self, tested: int, accepted: int) -> None:
        """Count a step's drafts."""
        fade = _MEMORY**tested
        self.tested = self.tested * fade + tested
        self.accepted = self.accepted * fade + accepted

    def rate(self, prior: float) -> float:
        """Chance that the next draft is accepted, leaning on `prior` while little is known."""
        return (self.accepted + _PRIOR_DRAFTS * prior) / (self.tested + _PRIOR_DRAFTS)


class VerifyCost:
    """Seconds one forward over M rows takes, from measurements at a few M.

    More rows never cost less: where a measurement says so, the one of fewer rows was disturbed.
    """

    def __init__(self, seconds_by_rows: Mapping[int, float]) -> None:
        self._rows = sorted(seconds_by_rows)
        descending = (seconds_by_rows[rows] for rows in reversed(self._rows))
        self._seconds = list(accumulate(descending, min))[::-1]

    @property
    def points(self) -> dict[int, float]:
        """Seconds by number of rows, where they were measured."""
        return dict(zip(self._rows, self._seconds, strict=True))

    @property
    def max_rows(self) -> int:
        """The most rows that were measured."""
        return self._rows[-1]

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

    Passes there are slower than measured alone: caches are colder, contexts longer. Plain ones and those with drafts
    are corrected apart, since what plain decoding takes is what all drafting is judged by.
    """

    verify_cost: VerifyCost
    overhead_s: float = 0.0  # of a step without drafts
    extra_s: float = 0.0  # what drafts add to that: more rows to lay out, more choices to make
    _slowness: dict[bool, float] = field(default_factory=dict)  # of passes with drafts, and of those without
    _num_seen: dict[bool, int] = field(default_factory=dict)  # likewise

    def slowness(self, drafts: bool) -> float:
        """Passes in the running engine over those measured at start; the other kind's as long as there was none."""
        return self._slowness.get(drafts, self._slowness.get(not drafts, 1.0))

    def pass_s(self, num_rows: int, drafts: bool = False) -> float:
        """One pass over so many rows."""
        return self.slowness(drafts) * self.verify_cost(num_rows)

    def step_s(self, num_rows: int, drafts: bool) -> float:
        """A step around such a pass, drafting apart."""
        return self.pass_s(num_rows, drafts) + self.overhead_s + (self.extra_s if drafts else 0.0)

    def learn(self, num_rows: int, drafts: bool, forward_s: float, overhead_s: float) -> None:
        """Running means of a step's overhead and of how much slower passes are than when measured alone."""
        if num_rows > self.verify_cost.max_rows:
            return
        known = self.slowness(drafts)
        ratio = min(forward_s / self.verify_cost(num_rows), _MAX_JUMP * known)
        num_seen = self._num_seen.get(drafts, 0)
        self._slowness[drafts] = known + max(_RISE, 1 / (num_seen + 1)) * (ratio - known)  # the first say it all
        self._num_seen[drafts] = num_seen + 1
        overhead_s = min(overhead_s, self.verify_cost(num_rows))
        if drafts and False in self._slowness:
            self.extra_s += _RISE * (max(overhead_s - self.overhead_s, 0.0) - self.extra_s)
        else:  # before the first plain step all overhead counts as what a plain step has, too
            self.overhead_s += _RISE * (overhead_s - self.overhead_s)


@dataclass(slots=True)
class AdaptivePolicy(AsDrafted):
    """Chooses the number of drafts by expected tokens per second."""

    max_nodes: int
    costs: StepCosts
    _num_deciding: int = 1
    _draft_s: float | None = None
    _overall: Acceptance = field(default_factory=lambda: Acceptance(_PRIOR_DRAFTS, 0.7 * _PRIOR_DRAFTS))
    _requests: dict[str, Acceptance] = field(default_factory=dict)
    _plain_steps: dict[str, int] = field(default_factory=dict)
    _catch_up_s: float = 0.0  # a drafter's time for a known token it has missed
    _read: dict[str, int] = field(default_factory=dict)  # known tokens when a request last had drafts
    _usual_output: float = _USUAL_OUTPUT
    ledger: Ledger = field(default_factory=Ledger)

    def begin_step(self, num_deciding: int) -> None:
        """Remember the load: rows of all requests share one pass."""
        self._num_deciding = max(1, num_deciding)
        self.ledger.begin_step()

    def node_budget(self, request: Request) -> int:
        """The best budget for this request's acceptance at this load; now and then a probe while it is one."""
        if not request.speculate or self.max_nodes <= 1 or not self.ledger.is_open:
            return 1
        best = max(range(self.max_nodes), key=lambda k: self._speed(request, k))
        if best > 0 and self._is_worth(request, best):
            return best + 1
        waited = (self._plain_steps.get(request.request_id, 0) + 1) % _PROBE_EVERY
        self._plain_steps[request.request_id] = waited
        if waited < _PROBE_EVERY - _PROBE_STEPS or self._catch_up(request) > self.costs.pass_s(1):
            return 1
        return min(_PROBE_DRAFTS + 1, self.max_nodes)

    def _is_worth(self, request: Request, num_drafts: int) -> bool:
        """Whether drafting gains enough, over what is left of the request, to pay for what must be read before it."""
        plain, drafting = self._speed(request, 0), self._speed(request, num_drafts)
        left = min(max(self._usual_output - request.num_output, _PROBE_EVERY), request.num_remaining)
        return drafting >= _LEAST_GAIN * plain and left * (1 / plain - 1 / drafting) >= self._catch_up(request)

    def _catch_up(self, request: Request) -> float:
        """Seconds a drafter would need for what it has missed of a request since it last drafted."""
        return self._catch_up_s * (len(request.token_ids) - self._read.get(request.request_id, 0))

    def _speed(self, request: Request, num_drafts: int) -> float:
        """Expected tokens per second of this request's share with `num_drafts` drafts."""
        a = min(self._rate(request), 0.995)
        tokens = (1.0 - a ** (num_drafts + 1)) / (1.0 - a)
        rows = self._num_deciding * (num_drafts + 1)
        return tokens / (self.costs.step_s(rows, num_drafts > 0) + num_drafts * self._draft_cost())

    def plain_step_s(self, num_requests: int) -> float | None:
        """From passes measured at start, corrected by those of the running engine."""
        return self.costs.step_s(num_requests, drafts=False)

    def explain(self, request: Request) -> str | None:
        """Its drafts are right too seldom, or reading what the drafter has missed costs too much."""
        if self.ledger.is_spent:
            return "drafts have cost more than they gained lately; they are tried again now and then"
        sizes, n, draft_s = range(1, self.max_nodes), self._num_deciding, self._draft_cost()
        step_s = {size: self.costs.step_s(n * (size + 1), True) + size * draft_s for size in sizes}
        needed = needed_rate(step_s, _LEAST_GAIN / self.costs.step_s(n, False))
        missing = shortfall("drafts", self._rate(request), needed)
        if missing is None and not self._is_worth(request, max(sizes, key=lambda k: self._speed(request, k))):
            return "reading the text the drafter has missed would cost more than drafts would gain"
        return missing

    def _rate(self, request: Request) -> float:
        overall = self._overall.accepted / self._overall.tested
        known = self._requests.get(request.request_id)
        return known.rate(overall) if known else overall

    def _draft_cost(self) -> float:
        return self._draft_s if self._draft_s is not None else _GUESSED_DRAFT_SHARE * self.costs.verify_cost(1)

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Update the request's and the engine's acceptance."""
        self.ledger.note_tokens(num_accepted + 1)
        if num_drafted:
            self._read[request.request_id] = len(request.token_ids)
            self._overall.add(num_tested, num_accepted)
            self._requests.setdefault(request.request_id, Acceptance()).add(num_tested, num_accepted)

    def learn_draft_cost(self, seconds: float, num_drafted: int) -> None:
        """A running mean that falls quickly and rises slowly.

        A drafter that first has to read a prompt, or a busy machine, makes single steps look dear; taking that at its
        word would switch drafting off, and then nothing would correct it.
        """
        self.ledger.note_drafting(seconds)
        if num_drafted:
            known = self._draft_cost()
            cost = min(seconds / num_drafted, _MAX_JUMP * known)
            self._draft_s = known + (_FALL if cost < known else _RISE) * (cost - known)

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """Leave it to the costs and the ledger."""
        drafts = num_rows > self._num_deciding
        self.costs.learn(num_rows, drafts, forward_s, overhead_s)
        self.ledger.book(forward_s + overhead_s, self.costs.step_s(self._num_deciding, False), drafts)

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """A running mean that falls quickly and rises slowly; the drafts of that step count as reading."""
        each = seconds / num_tokens
        known = self._catch_up_s
        self._catch_up_s = each if known == 0.0 else known + (_FALL if each < known else _RISE) * (each - known)

    def end(self, request: Request) -> None:
        """Learn how long answers are; drop what was learned about the request alone."""
        self._usual_output += _OUTPUT_RISE * (request.num_output - self._usual_output)
        for known in (self._requests, self._plain_steps, self._read):
            known.pop(request.request_id, None)


def rows_to_measure(max_nodes: int, max_rows: int) -> Sequence[int]:
    """Row counts at which the verify cost is measured at start."""
    wanted = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    return [rows for rows in wanted if rows <= max(min(max_rows, max(max_nodes, 8)), 1)]
