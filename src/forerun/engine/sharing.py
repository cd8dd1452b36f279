"""Finds requests that should wait a few steps because a running request is computing the prefix they begin with.

Knows: where in the prefix tree running requests will add their next blocks. Does not know: budgets,
blocks, tensors. A waiting request loses at most the steps it would have spent on the same rows itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.cache.prefix_cache import Hit, Place, PrefixCache, num_common
from forerun.core import Request, Status


class SharedPrefixes:
    """Running requests by the block they will add next, and which waiting requests wait for which of them."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._writers: dict[Place, Request] = {}
        self._awaited: dict[str, tuple[Request, int]] = {}  # waiting request -> writer, rows they have in common

    def begin_step(self, running: Sequence[Request]) -> None:
        """Take what lower tiers have read, and update the positions of the running requests."""
        self._writers.clear()
        if self._cache.lower is not None:
            if not running:
                self._cache.lower.pause()
            self._cache.lower.take_done()
        for request in running:
            self.add(request)

    def add(self, request: Request) -> None:
        """A request has begun to run."""
        place = self._cache.next_place(request)
        if place is not None:
            self._writers.setdefault(place, request)

    def is_waiting(self, request: Request) -> bool:
        """Whether the request's prefix is being read, or it was told to wait and that is still being computed."""
        awaited = self._awaited.get(request.request_id)
        if awaited is None:
            lower = self._cache.lower
            return lower is not None and lower.is_reading(request)
        writer, num_rows = awaited
        if writer.status is Status.RUNNING and writer.num_computed < num_rows:
            return True
        del self._awaited[request.request_id]
        return False

    def must_wait(self, request: Request, hit: Hit) -> bool:
        """Whether a running request is about to compute the first missing block; if so, `is_waiting` becomes true."""
        place = self._cache.place_after(hit.node, len(hit.blocks), request.token_ids)
        writer = self._writers.get(place) if place is not None else None
        if writer is None:
            return False
        num_rows = self._num_shared(writer, request)
        if num_rows <= len(hit.blocks) * self._cache.block_size:
            return False
        self._awaited[request.request_id] = (writer, num_rows)
        return True

    def _num_shared(self, writer: Request, request: Request) -> int:
        """Rows of the writer that the request can go on after: where recurrent states are needed, one will be kept."""
        num_rows = num_common(writer.token_ids, request.token_ids)
        if self._cache.states is None:
            return num_rows - num_rows % self._cache.block_size
        end = self._cache.last_end(writer)
        return end if writer.num_computed < end <= min(num_rows, len(request.token_ids) - 1) else 0

    def end(self, request: Request) -> None:
        """The request has ended: it waits no more and computes for nobody. Nothing of it is kept."""
        self._writers = {place: writer for place, writer in self._writers.items() if writer is not request}
        self._awaited.pop(request.request_id, None)
        self._awaited = {waiting: found for waiting, found in self._awaited.items() if found[0] is not request}
