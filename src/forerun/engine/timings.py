"""Where a step's time goes.

Knows: the names of the phases. Does not know: what happens in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter


@dataclass(slots=True)
class Timings:
    """Cumulative seconds by phase, over `steps` steps."""

    schedule_s: float = 0.0
    draft_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    steps: int = 0
    _mark: float = 0.0

    def start(self) -> None:
        """A step begins."""
        self.steps += 1
        self._mark = perf_counter()

    def lap(self, phase: str) -> float:
        """Add the time since the last mark to `phase`; that time."""
        now = perf_counter()
        seconds = now - self._mark
        setattr(self, phase, getattr(self, phase) + seconds)
        self._mark = now
        return seconds
