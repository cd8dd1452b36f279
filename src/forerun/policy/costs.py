"""What steps of the engine and calls of drafters cost.

Knows: seconds measured when the engine was built, and seconds of its steps since. Does not know: chances, decisions.

A pass in the running engine is slower than one measured alone: caches are colder, contexts longer, Python runs around
it. By how much is followed for the row counts that were measured, apart for plain steps and steps with drafts.

Others on the machine slow all of them where the clock of steps does not see it (`kernels/cores.py::step_clock`): by
memory that they read, or below a hypervisor. What was measured then and is not measured again, since it now seems too
dear, would stay too high: it falls with what is measured (`Pace`). So does what another process has measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

# Single measurements are up to 4 times too high where something else ran on the machine, hardly ever too low, and the
# first of a kind are slow (mini: 3.7 ms where 2 are usual). So a jump is cut, the least of the first 4 counts, and
# means fall faster than they rise (docs/log.md, seventh sitting); what was believed is wrong where a measurement is so
# much lower.
MAX_JUMP: Final = 4.0
SETTLING: Final = 4
RISE, FALL = 0.1, 0.3
# A fall that is no noise, and measurements (three a step with drafts) within which what was believed still holds.
# `benchmarks/simulate.py --machine mini --seeds 4`, over the best fixed number, new and known. After a busy time
# (--work busy): 0.964 and 0.967, without `Pace` 0.937 and 0.939. On a quiet machine (--work spec): 0.977 and 0.972 with
# and without `Pace`. RECENT hardly changes these: docs/log.md has what it prevents.
CLEAR: Final = 0.8
RECENT: Final = 96
ALIKE: Final = 4  # times as many requests whose plain steps are slower than their passes by about as much
LONG_LAG: Final = 32  # missed tokens from which a call measures reading rather than drafting: 32 cost mini-draft 1 ms


@dataclass(slots=True)
class Mean:
    """A running mean of measurements. With `num` 0 it holds what is believed until there is one."""

    value: float
    num: int = 0

    def learn(self, seen: float) -> None:
        """One more measurement; what took no time at all was not measured."""
        if seen <= 0.0:
            return
        if self.num == 0:
            self.value = seen
        elif self.num < SETTLING or seen * MAX_JUMP < self.value:
            self.value = min(self.value, seen)
        else:
            seen = min(seen, MAX_JUMP * self.value)
            self.value += (FALL if seen < self.value else RISE) * (seen - self.value)
        self.num += 1


class _Follower(NamedTuple):
    """A mean that was not measured since it had `num`; what its gauge was then, or has been since if that is less."""

    mean: Mean
    num: int
    least: float


@dataclass(slots=True)
class _Followers:
    """Of one gauge, by their ids; the gauge falls for nobody unless it is well below `most`, the highest `least`."""

    by_id: dict[int, _Follower] = field(default_factory=dict)
    most: float = 0.0


@dataclass(slots=True)
class Pace:
    """Lets costs that are not measured fall with what is measured, as if one thing had slowed both.

    Each cost remembers which step was measured next after it, its gauge, and what that step was believed to take.
    If that step turns out to be faster, the cost falls in proportion. It does not rise with it: what is taken for too
    cheap is done, and measured. Steps with drafts are gauges, and plain ones that no drafts have slowed.
    """

    _kept: dict[int, Mean] = field(default_factory=dict)  # measured by another process, until a gauge is in this one
    _fresh: dict[int, Mean] = field(default_factory=dict)  # measured since a gauge was
    _followers: dict[int, _Followers] = field(default_factory=dict)  # by the id of the gauge, which `Costs` holds
    _num: int = 0  # measurements
    _last: dict[int, int] = field(default_factory=dict)  # the number of the last one, by gauge

    def keep(self, kept: Sequence[Mean]) -> None:
        """These were measured by another process, at the same time."""
        self._kept = {id(mean): mean for mean in kept}

    def learn(self, mean: Mean, seen: float) -> None:
        """One more measurement of what is no gauge."""
        mean.learn(seen)
        self._num += 1
        self._kept.pop(id(mean), None)
        self._fresh[id(mean)] = mean

    def learn_gauge(self, gauge: Mean, seen: float) -> None:
        """One more measurement of a gauge."""
        key, believed = id(gauge), gauge.value
        # The first of a kind is slow, and what was measured long ago may have been: neither says that the machine was.
        num, holds = gauge.num, gauge.num > 1 and self._num - self._last.get(key, -RECENT) < RECENT
        gauge.learn(seen)
        self._num += 1
        self._last[key] = self._num
        self._follow(gauge, self._kept, believed)
        self._kept = {}
        if num > 0:
            self._follow(gauge, self._fresh, believed if holds else min(seen, gauge.value))
            self._fresh = {}
        self._fresh[key] = gauge
        self._fall(gauge)

    def _follow(self, gauge: Mean, means: dict[int, Mean], least: float) -> None:
        means.pop(id(gauge), None)
        if means:
            followers = self._followers.setdefault(id(gauge), _Followers())
            followers.by_id |= {key: _Follower(mean, mean.num, least) for key, mean in means.items()}
            followers.most = max(followers.most, least)

    def _fall(self, gauge: Mean) -> None:
        """A gauge was measured after its followers, or they have another `num` by now: so there are no circles."""
        followers = self._followers.get(id(gauge))
        if followers is None or not 0.0 < gauge.value < CLEAR * followers.most:
            return
        left, followers.by_id, followers.most = followers.by_id, {}, 0.0
        for key, (mean, num, least) in left.items():
            if mean.num != num:
                continue
            if gauge.value < CLEAR * least:
                mean.value *= gauge.value / least
                self._fall(mean)
                least = gauge.value
            followers.by_id[key] = _Follower(mean, num, least)
            followers.most = max(followers.most, least)


class PassCosts:
    """Seconds of one pass by its rows, measured alone at a few row counts.

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

    def nearest(self, num_rows: int) -> int:
        """The measured number of rows next to this one."""
        high = bisect_left(self._rows, num_rows)
        around = self._rows[max(high - 1, 0) : high + 1]
        return around[0] if num_rows - around[0] <= around[-1] - num_rows else around[-1]

    def __call__(self, num_rows: int) -> float:
        """Linear between measured points and beyond the last."""
        if len(self._rows) == 1:
            return self._seconds[0]
        high = min(max(bisect_left(self._rows, num_rows), 1), len(self._rows) - 1)
        x0, x1 = self._rows[high - 1], self._rows[high]
        y0, y1 = self._seconds[high - 1], self._seconds[high]
        return y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0)


Kind = TypeVar("Kind")


class _Estimate(NamedTuple):
    """A cost by the nearest mean of its kind, and by the nearest one that was measured much more often.

    A mean of `num` measurements is not believed to be higher than the nearest mean of 2^num or more. Something else may
    have run on the machine while it was measured; and what seems too dear is not chosen, so not measured again. A cost
    that really is higher is chosen a number of times that grows with the logarithm of the steps.
    """

    mean: Mean
    factor: float  # how many times as long as the mean's own kind
    other: Mean  # the one measured much more often; `mean` itself where there is none
    other_factor: float

    @classmethod
    def find(
        cls, known: Mapping[Kind, Mean], distance: Callable[[Kind], float], factor: Callable[[Kind], float]
    ) -> _Estimate:
        """What was not measured in this process (`num` 0) is believed until it is."""
        first = min(known, key=distance)
        num = known[first].num
        often = [kind for kind, mean in known.items() if num and mean.num >> num]
        other = min(often, key=distance, default=first)
        return cls(known[first], factor(first), known[other], factor(other))

    def __call__(self) -> float:
        """Seconds."""
        mean, factor, other, other_factor = self
        return min(mean.value * factor, other.value * other_factor)


def _changes_estimates(num: int) -> bool:
    """Whether a mean that was measured so often now may be estimated by another one, or another one by it."""
    return num < 32 or num & (num - 1) == 0


@dataclass(slots=True)
class CallCosts:
    """Seconds one drafter takes for a call, and for reading a token it has missed."""

    by_size: dict[tuple[int, int], Mean] = field(default_factory=dict)  # (requests, a power of 2; most drafts of one)
    by_depth: dict[int, Mean] = field(default_factory=dict)  # of calls for one request, by the levels they drew
    reading: Mean | None = None  # a token
    draws_levels: bool = False  # by a network, one level at a time
    _most_like: dict[tuple[int, int], _Estimate] = field(default_factory=dict, compare=False)

    def call_s(self, num_drafts: int, num_requests: int) -> float:
        """A call for so many drafts each; 0 until one was measured. More drafts cost in proportion.

        More requests share the reading of weights: they cost as the square root of their number.
        """
        if not self.by_size:
            return 0.0
        return (self._most_like.get((num_drafts, num_requests)) or self._find_most_like(num_drafts, num_requests))()

    def _find_most_like(self, num_drafts: int, num_requests: int) -> _Estimate:
        """What is known of the calls most like these, and how many times as long these should take."""

        def distance(known: tuple[int, int]) -> float:
            return abs(math.log(known[0] / num_requests)) + abs(math.log(known[1] / num_drafts))

        def more(known: tuple[int, int]) -> float:
            return max(1.0, num_drafts / known[1]) * max(1.0, math.sqrt(num_requests / known[0]))

        found = _Estimate.find(self.by_size, distance, more)
        self._most_like[num_drafts, num_requests] = found
        return found

    @property
    def means(self) -> list[Mean]:
        """All that is known, to be changed in place."""
        return [*self.by_size.values(), *self.by_depth.values(), *([] if self.reading is None else [self.reading])]

    def reading_s(self, num_tokens: int) -> float:
        """What the drafter needs for tokens it has missed. The few every step leaves are a part of its calls."""
        return num_tokens * self.reading.value if self.reading is not None and num_tokens >= LONG_LAG else 0.0

    @property
    def level_s(self) -> float:
        """One level more, by the calls of the fewest and the most levels."""
        if len(self.by_depth) < 2:
            return 0.0
        few, many = min(self.by_depth), max(self.by_depth)
        few_mean, many_mean = self.by_depth[few], self.by_depth[many]
        many_s = many_mean.value
        if many_mean.num and few_mean.num >> many_mean.num:  # see `_Estimate`
            many_s = min(many_s, few_mean.value * many / few)
        return max(many_s - few_mean.value, 0.0) / (many - few)

    def expect(self, num_drafts: int, depth: int, seconds: float) -> None:
        """What a call for one request took when it was tried alone; forgotten with the first in the running engine."""
        if num_drafts > 0:
            self.by_size[1, num_drafts] = Mean(seconds)
            self.by_depth[depth] = Mean(seconds)
            self._most_like.clear()

    def expect_reading(self, num_tokens: int, seconds: float) -> None:
        """What reading took when it was tried alone."""
        self.reading = Mean(max(seconds, 0.0) / num_tokens)

    def learn(self, num_requests: int, num_drafts: int, depth: int, num_read: int, seconds: float, pace: Pace) -> float:
        """See `Costs.learn_call`."""
        if num_read >= LONG_LAG * num_requests:
            return self._learn_reading(num_requests, num_drafts, num_read, seconds, pace)
        if num_drafts > 0:
            key = _power_of_2(num_requests), num_drafts
            if key not in self.by_size:
                self.by_size[key] = Mean(seconds)
                self._most_like.clear()
            pace.learn(self.by_size[key], seconds)
            if _changes_estimates(self.by_size[key].num):
                self._most_like.clear()
            if num_requests == 1:
                pace.learn(self.by_depth.setdefault(depth, Mean(seconds)), seconds)
        return 0.0

    def _learn_reading(self, num_requests: int, num_drafts: int, num_read: int, seconds: float, pace: Pace) -> float:
        reading_s = max(seconds - self.call_s(max(num_drafts, 1), num_requests), seconds / 2)
        if self.reading is None:
            self.reading = Mean(0.0)
        pace.learn(self.reading, reading_s / num_read)
        return reading_s


@dataclass(slots=True)
class Costs:
    """Seconds of steps and calls in one engine."""

    passes: PassCosts
    slowness: dict[tuple[bool, int], Mean] = field(default_factory=dict)  # by (drafts, rows): step over pass alone
    calls: dict[str, CallCosts] = field(default_factory=dict)  # of every drafter
    plain: dict[int, Mean] = field(default_factory=dict)  # by rows: slowness of plain steps that no drafts have slowed
    _most_like: dict[tuple[bool, int], _Estimate] = field(default_factory=dict, compare=False)
    _plain_like: dict[int, Mean] = field(default_factory=dict, compare=False)  # by requests
    pace: Pace = field(default_factory=Pace, compare=False)

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def knows_plain(self) -> bool:
        """Some step without drafts was measured."""
        return any(not drafts for drafts, _ in self.slowness)

    def step_s(self, num_rows: int, drafts: bool = True) -> float:
        """A step around a pass over so many rows, calls of drafters apart."""
        return (self._most_like.get((drafts, num_rows)) or self._find_most_like(drafts, num_rows))()

    def plain_s(self, num_requests: int) -> float | None:
        """A step of plain decoding: without drafts, and with none just before; None until some were measured, of about
        so many requests."""
        if not self.plain or num_requests == 0:  # a step may choose no token
            return None
        like = self._plain_like.get(num_requests)
        if like is None:
            rows = min(self.plain, key=lambda rows: abs(math.log(rows / num_requests)))
            if not num_requests / ALIKE <= rows <= ALIKE * num_requests:
                return None
            like = self._plain_like[num_requests] = self.plain[rows]
        return min(self.step_s(num_requests, False), like.value * self.passes(num_requests))

    def _find_most_like(self, drafts: bool, num_rows: int) -> _Estimate:
        """At the nearest number of rows known; of plain steps where none with drafts is known, and likewise."""
        point, pass_s = self.passes.nearest(num_rows), self.passes(num_rows)
        alike = {kind: mean for kind, mean in self.slowness.items() if kind[0] == drafts} or self.slowness
        alike = alike or {(drafts, point): Mean(1.0)}
        found = _Estimate.find(alike, lambda kind: abs(math.log(kind[1] / point)), lambda _: pass_s)
        if not drafts:
            found = _Estimate(found.mean, pass_s, found.mean, pass_s)
        self._most_like[drafts, num_rows] = found
        return found

    # -- learning -----------------------------------------------------------------------------------------------

    def learn_step(self, num_rows: int, drafts: bool, seconds: float) -> None:
        """A step that read no prompt took this long, calls of drafters apart."""
        if num_rows > self.passes.max_rows:
            return
        kind = drafts, self.passes.nearest(num_rows)
        if kind not in self.slowness:
            self.slowness[kind] = Mean(seconds / self.passes(num_rows))
            self._most_like.clear()
        slowness, seen = self.slowness[kind], seconds / self.passes(num_rows)
        if not drafts:  # they are measured now and then, whatever is believed, and soon after drafts they are slower
            slowness.learn(seen)
            return
        self.pace.learn_gauge(slowness, seen)
        if _changes_estimates(slowness.num):
            self._most_like.clear()

    def learn_plain(self, num_rows: int, seconds: float) -> None:
        """A plain step took this long, and the steps before it were plain."""
        if num_rows > self.passes.max_rows:
            return
        point, slowness = self.passes.nearest(num_rows), seconds / self.passes(num_rows)
        if point not in self.plain:  # as another process saw plain steps, if it did and this one measured no step
            kept = [rows for rows, mean in self.plain.items() if mean.num == 0]
            like = min(kept, key=lambda rows: abs(math.log(rows / point)), default=None)
            self.plain[point] = Mean(slowness if like is None else self.plain[like].value)
            self._plain_like.clear()
        self.pace.learn_gauge(self.plain[point], slowness)

    def learn_call(
        self, member: str, num_requests: int, num_drafts: int, depth: int, num_read: int, seconds: float
    ) -> float:  # fmt: skip
        """A call drew at most so many drafts and levels for each request, and read so many tokens for all of them.

        -> seconds of it that went into reading.
        """
        return self.calls[member].learn(num_requests, num_drafts, depth, num_read, seconds, self.pace)


def rows_to_measure(max_nodes: int, max_rows: int) -> Sequence[int]:
    """Row counts at which a pass is measured when the engine is built."""
    wanted = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
    return [rows for rows in wanted if rows <= max(min(max_rows, max(max_nodes, 8)), 1)]


def _power_of_2(number: int) -> int:
    """The highest one that is not above the number."""
    return 1 << (number.bit_length() - 1)
