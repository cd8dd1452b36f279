"""Requests that must end in time.

Knows: who has a deadline, and the next of them. Does not know: clocks, what ending takes.
"""

from __future__ import annotations

import math

from forerun.core import Request


class Deadlines:
    """Unfinished requests with a deadline."""

    def __init__(self) -> None:
        self._timed: dict[str, Request] = {}
        self._next_s = math.inf  # at most the earliest deadline

    @property
    def any(self) -> bool:
        """Whether some request has one."""
        return bool(self._timed)

    def add(self, request: Request) -> None:
        """The request waits from here on."""
        if request.deadline_s is not None:
            self._timed[request.request_id] = request
            self._next_s = min(self._next_s, request.deadline_s)

    def end(self, request: Request) -> None:
        """The request is over."""
        self._timed.pop(request.request_id, None)

    def passed(self, now_s: float) -> list[Request]:
        """Those whose deadline has passed."""
        if now_s < self._next_s:
            return []
        late, deadlines = [], [math.inf]
        for request in self._timed.values():
            assert request.deadline_s is not None
            if request.deadline_s <= now_s:
                late.append(request)
            else:
                deadlines.append(request.deadline_s)
        self._next_s = min(deadlines)
        return late
