"""What asking a drafter costs, and what it was asked for last.

Knows: seconds of calls, by how many requests they were for and how many drafts were wanted. Does not know: chances,
passes of the target, decisions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from forerun.speculation.draft import Draft

SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)  # numbers of drafts whose cost is kept apart
_CROWDS: Final = (1, 2, 4, 8, 16, 32, 64, 128)  # and of requests in a call
_CALLS_A_COST: Final = 8  # for which costs are taken to stay as they are
_RISE, _FALL, _MAX_JUMP = 0.15, 0.2, 4.0  # how far and how fast a cost follows one measurement
_STEPS_HELD: Final = 3  # more steps for which what was asked stays as it is
_OVERALL: Final = 0.03  # and of any
LONG_LAG: Final = 32  # tokens whose reading takes so much longer than drafting that it tells what reading costs
_USUAL_LAG: Final = 2  # tokens of a request that every call may have to read


def follow(known: float, seen: float) -> float:
    """A running mean that falls faster than it rises: single steps look dear where something else was at work."""
    seen = min(seen, _MAX_JUMP * known)
    return known + (_FALL if seen < known else _RISE) * (seen - known)


@dataclass(slots=True)
class MemberCost:
    """Seconds a member takes for a call, and for reading what it had missed."""

    by_size: dict[tuple[int, int], float] = field(default_factory=dict)  # by crowd and size
    catch_up_s: float = 0.0  # a known token
    empty_s: float = 0.0  # a call that found nothing
    by_depth: dict[int, float] = field(default_factory=dict)  # a call by the levels it drew
    draws_levels: bool = False  # by a model of its own, and stops where the next promises too little
    found: float = 1.0  # share of the calls that found something, over all requests
    _worked_out: dict[tuple[int, int], float] = field(default_factory=dict)  # lately, since working takes time
    _num_learned: int = 0

    def of_call(self, num_drafts: int, num_requests: int = 1) -> float:
        """The cost of a call for so many drafts each; some call must have been measured."""
        known = self._worked_out.get((num_requests, num_drafts))
        if known is None:
            known = self._worked_out[num_requests, num_drafts] = self._from_nearest(num_requests, num_drafts)
        return known

    def _from_nearest(self, num_requests: int, num_drafts: int) -> float:
        """More drafts cost in proportion, more requests, which share the reading of weights, as their root."""

        def distance(known: tuple[int, int]) -> float:
            return abs(math.log(known[0] / num_requests)) + abs(math.log(known[1] / num_drafts))

        crowd, size = min(self.by_size, key=distance)
        return self.by_size[crowd, size] * max(1.0, num_drafts / size) * max(1.0, math.sqrt(num_requests / crowd))

    def learn_call(self, seconds: float, asked: Sequence[Draft], usual_s: Callable[[], float]) -> float:
        """A call for these drafts took this long, without reading it would be `usual_s()` -> seconds of reading."""
        num_read, num_drafts = sum(draft.num_caught_up for draft in asked), most_drafts(asked)
        if num_read >= LONG_LAG + _USUAL_LAG * len(asked):
            reading_s = max(seconds - usual_s(), seconds / 2)
            self.learn_catch_up(reading_s, num_read)
            return reading_s
        if num_drafts > 0:
            self.learn(num_drafts, seconds, len(asked))
            self.learn_depth(seconds, max(max(draft.tree.depths) for draft in asked))
        else:
            self.learn_empty(seconds)
        return 0.0

    def learn(self, num_drafts: int, seconds: float, num_requests: int = 1) -> None:
        """A call for so many requests gave at most so many drafts each."""
        kind = _at_most(_CROWDS, num_requests), _at_most(SIZES, num_drafts)
        known = self.by_size.get(kind)
        self.by_size[kind] = seconds if known is None else follow(known, seconds)
        self._num_learned += 1
        if known is None or self._num_learned % _CALLS_A_COST == 0:
            self._worked_out.clear()

    def learn_depth(self, seconds: float, depth: int) -> None:
        """A call drew so many levels."""
        known = self.by_depth.get(depth)
        self.by_depth[depth] = seconds if known is None else follow(known, seconds)

    @property
    def level_s(self) -> float:
        """Another level of drafts, by the calls of the fewest and the most."""
        if len(self.by_depth) < 2:
            return 0.0
        few, many = min(self.by_depth), max(self.by_depth)
        return max(self.by_depth[many] - self.by_depth[few], 0.0) / (many - few)

    def learn_empty(self, seconds: float) -> None:
        """A call found nothing, which may be much cheaper than drafting."""
        self.empty_s = seconds if self.empty_s == 0.0 else follow(self.empty_s, seconds)

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """Reading so many tokens took this long."""
        each = seconds / num_tokens
        self.catch_up_s = each if self.catch_up_s == 0.0 else follow(self.catch_up_s, each)

    def learn_found(self, found: bool) -> None:
        """Whether a request was drafted anything when asked."""
        self.found += _OVERALL * (found - self.found)


def most_drafts(asked: Sequence[Draft]) -> int:
    """The most that one of them has."""
    return max(draft.num_own for draft in asked)


def _at_most(known: tuple[int, ...], number: int) -> int:
    return known[max(bisect_right(known, number), 1) - 1]


@dataclass(slots=True)
class Held:
    """What a member was asked for, for the next few steps if they are alike: planning takes time, too."""

    asked_for: list[tuple[str, int]]
    quotas: list[int]
    num_left: int

    @classmethod
    def of(cls, drafts: Sequence[Draft], quotas: list[int], num_steps: int = _STEPS_HELD) -> Held:
        """Held only where all were asked, so that no rest and no trial is due, and nobody drafted before."""
        is_steady = all(quota > 1 and len(draft.tree) == 1 for draft, quota in zip(drafts, quotas, strict=True))
        return cls(_alike(drafts), quotas, num_steps if is_steady else 0)

    def serves(self, drafts: Sequence[Draft]) -> bool:
        """The same requests with the same room, not too often."""
        self.num_left -= 1
        return self.num_left >= 0 and self.asked_for == _alike(drafts)


def _alike(drafts: Sequence[Draft]) -> list[tuple[str, int]]:
    return [(draft.request.request_id, draft.num_free) for draft in drafts]
