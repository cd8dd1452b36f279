"""How long what is not worth it is left alone: thinking costs time, too.

Knows: steps, and what those took in which nobody was thought about. Does not know: chances, costs, who drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

LONGEST_REST: Final = 16  # steps for which nobody is even thought about
_FIRST_REST: Final = 4  # likewise at first; ever longer
_TRIALS_APART: Final = 64
_FINDS, _MISSES = 0.5, 0.1  # how fast the share of calls that find something follows one of a request


def _longer(rest: int) -> int:
    return min(max(2 * rest, _FIRST_REST), LONGEST_REST)


@dataclass(slots=True)
class Rest:
    """How long a member that was not worth asking is left alone: thinking about it costs time too."""

    length: int = 0  # of the current rest, in steps
    passed: int = 0  # of it
    waited: int = 0  # steps since the member was asked or tried
    found: float = 1.0  # share of the times it was asked when it found something to draft

    @property
    def is_over_next(self) -> bool:
        """The next step is one to think about it again."""
        return self.passed + 1 >= self.length

    def end(self) -> None:
        """It is worth asking again."""
        self.length = self.passed = self.waited = 0

    def goes_on(self, num_steps: int = 1) -> bool:
        """So many more steps have passed, and the rest is not over."""
        self.waited += num_steps
        self.passed += num_steps
        if self.passed < self.length:
            return True
        self.length, self.passed = _longer(self.length), 0
        return False

    def learn_found(self, found: bool) -> None:
        """Whether it found something to draft."""
        self.found += (_FINDS if found else _MISSES) * (found - self.found)


@dataclass(slots=True)
class Rests:
    """The rests of all requests and members."""

    _known: dict[tuple[str, str], Rest] = field(default_factory=dict)

    def of(self, request_id: str, member: str, found: float) -> Rest:
        """One request's from a member, who finds something in that share of his calls, usually."""
        known = self._known.get((request_id, member))
        if known is None:
            known = self._known[request_id, member] = Rest(found=found)
        return known

    def all_go_on(self, request_id: str, members: Iterable[str], stride: int) -> bool:
        """Nobody is to be thought about for the request, now that so many more steps have passed."""
        rests = [self._known.get((request_id, member)) for member in members]
        if not rests or any(rest is None or rest.is_over_next for rest in rests):
            return False
        return all(rest is not None and rest.goes_on(stride) for rest in rests)

    def forget(self, request_id: str, members: Iterable[str]) -> None:
        """A request is over."""
        for member in members:
            self._known.pop((request_id, member), None)


@dataclass(slots=True)
class Trials:
    """When a member that is not worth asking is asked all the same.

    Trials are paid from what drafting has gained (or may lose at the beginning), and the less that is the longer they
    wait: one that cost all of it would wait _TRIALS_APART steps.
    """

    _last: dict[str, int] = field(default_factory=dict)  # the step of each member's last

    def may_begin(self, member: str, step: int, price_s: float, balance_s: float) -> bool:
        """Whether a trial of such a price begins in this step."""
        waited = step - self._last.get(member, -_TRIALS_APART)
        if price_s * _TRIALS_APART > waited * balance_s:
            return False
        self._last[member] = step
        return True

    def began(self, member: str, step: int) -> bool:
        """One began in this step."""
        return self._last.get(member) == step


class Slept(NamedTuple):
    """What a pause's steps took, all together."""

    num_steps: int
    forward_s: float
    overhead_s: float


_AWAKE: Final = Slept(0, 0.0, 0.0)


@dataclass(slots=True)
class Pause:
    """How long nobody is thought about after a step in which it was worth it for none, or may not be risked.

    Its steps are as quick as those of an engine without drafts: all that is done is to add up what they took.
    """

    stride: int = 1  # steps since the last in which somebody could be thought about
    _num_thought: int = 0  # requests thought about in this step
    _num_asked: int = 0  # and those a member was asked for
    _length: int = 0
    _left: int = 0
    _slept: Slept = _AWAKE

    @property
    def goes_on(self) -> bool:
        """This step is a plain one."""
        return self._left > 0

    def begin_step(self, is_new_load: bool) -> None:
        """After a step; as many requests as before, or not."""
        if self._left > 0:
            self._left, self.stride = (0 if is_new_load else self._left - 1), self.stride + 1
            return
        if self._num_asked:
            self._length = 0
        elif self._num_thought:
            self._length = self._left = _longer(self._length)
        self._num_thought, self._num_asked, self.stride = 0, 0, 1

    def note(self, num_thought: int, num_asked: int) -> None:
        """A member was thought about for so many requests, and asked for so many."""
        self._num_thought += num_thought
        self._num_asked += num_asked

    def stay(self, num_steps: int) -> None:
        """So many steps, this one among them, are plain ones unless somebody new comes."""
        self._left = max(self._left, min(num_steps, LONGEST_REST))

    def sleep_through(self, forward_s: float, overhead_s: float) -> None:
        """A step of the pause took so long."""
        num, forward, overhead = self._slept
        self._slept = Slept(num + 1, forward + forward_s, overhead + overhead_s)

    def wake(self) -> Slept:
        """What was slept through since this was asked last."""
        slept, self._slept = self._slept, _AWAKE
        return slept

    def end(self) -> None:
        """Somebody new may come."""
        self._left = min(self._left, 1)
