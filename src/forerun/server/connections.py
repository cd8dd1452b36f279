"""Connections of clients: their time limits, and which are closed when there are too many.

Knows: uvicorn's HTTP/1.1 protocol, one object per connection. Does not know: requests, or what is answered.

A connection without a request costs an attacker nothing, so it must not keep others from connecting: it has seconds to
send the head of a request, and the one that has waited longest is closed when a new connection needs its place.
Requests above the limit are refused by the gate; SPARE connections are reserved for that, and for health checks.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0  # for the head of a request, counted from the connection or from the head's first byte
IDLE_S: Final = 5  # between two requests
STALLED_S: Final = 60.0  # for a client to take what was written to it
SPARE: Final = 32  # connections beyond the limit on requests

Idle = dict["Connection", None]  # connections without a request, the longest idle first


class Connection(H11Protocol):
    """One connection, with a time limit on everything the server waits for."""

    def __init__(self, *, idle: Idle, most: int, **options: Any) -> None:
        """`idle` is shared by a server's connections; `most` of them may be open."""
        super().__init__(**options)
        self._idle = idle
        self._most = most
        self._in_head = False  # waits for the rest of a head
        self._limit: asyncio.TimerHandle | None = None

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it; close the one that has been idle longest, at worst this one, if that makes too many."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self._most:
            oldest = next(iter(self._idle))
            del self._idle[oldest]  # now, since connection_lost comes later, perhaps after other connections
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read; an incomplete request head has to be completed in time."""
        super().data_received(data)
        if self._is_busy:
            self._begin()
        elif not self._in_head:
            self._await_head()

    def on_response_complete(self) -> None:
        """Become idle, unless the next request is here already; the client has to read the response in time."""
        super().on_response_complete()
        if not self._is_busy:
            self._idle[self] = None
            self._end_after(STALLED_S)

    def pause_writing(self) -> None:
        """The client does not keep up with reading."""
        super().pause_writing()
        self._end_after(STALLED_S)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self._is_busy:
            self._end_after(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget this connection."""
        self._idle.pop(self, None)
        self._end_after(None)
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._in_head = True
        self._idle.setdefault(self)
        self._end_after(HEAD_S)

    def _begin(self) -> None:
        """A request has begun, or continues."""
        if self in self._idle:
            del self._idle[self]
            self._in_head = False
            self._end_after(None)

    def _end_after(self, seconds: float | None) -> None:
        """Close the connection after `seconds` unless called again before; None: no limit."""
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
