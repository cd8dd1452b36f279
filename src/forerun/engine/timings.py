"""Where a step's time goes.

Knows: the names of the phases. Does not know: what happens in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from time import perf_counter

from forerun.policy.base import StepSeconds


@dataclass(slots=True)
class Timings:
    """Cumulative seconds by phase, over `steps` steps."""

    schedule_s: float = 0.0
    draft_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    learn_s: float = 0.0
    steps: int = 0
    clock: InitVar[Callable[[], float]] = perf_counter  # for `StepSeconds.own_s`; the phases are wall time
    _mark: float = 0.0
    _clock: Callable[[], float] = field(init=False)
    _began: float = 0.0  # on the clock, as the next two
    _taken: float = 0.0
    _learnt_s: float = 0.0  # since then
    _before: tuple[float, float, float] = (0.0, 0.0, 0.0)  # totals at the last `take`: drafting, verifying, everything

    def __post_init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def start(self) -> None:
        """A step begins."""
        self.steps += 1
        self._mark, self._began = perf_counter(), self._clock()

    def lap(self, phase: str) -> None:
        """Add the time since the last mark to `phase`."""
        now = perf_counter()
        setattr(self, phase, getattr(self, phase) + now - self._mark)
        self._mark = now

    def lap_pass(self, pass_s: float) -> None:
        """Add the time since the last mark to the pass, which took `pass_s`, and to choosing from it."""
        now = perf_counter()
        self.forward_s += pass_s
        self.verify_s += now - self._mark - pass_s
        self._mark = now

    def take(self) -> StepSeconds:
        """The time since the last call: one step, and the learning of the step before."""
        verify_s = self.forward_s + self.verify_s
        total_s = self.schedule_s + self.draft_s + self.build_s + verify_s + self.commit_s + self.learn_s
        draft_before, verify_before, total_before = self._before
        self._before = self.draft_s, verify_s, total_s
        self._taken = self._clock()
        own_s, self._learnt_s = self._taken - self._began + self._learnt_s, 0.0
        return StepSeconds(self.draft_s - draft_before, verify_s - verify_before, total_s - total_before, own_s)

    def end(self) -> None:
        """A step is over, and what was to be learned from it since `take`."""
        self.lap("learn_s")
        self._learnt_s = self._clock() - self._taken
