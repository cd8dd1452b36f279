"""One HTTP request's way through the engine: prompts become streams, and streams become events.

Knows: several prompts at once, clients that go away, server-sent events. Does not know: chat, completions, their JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forerun.engine.outputs import RequestGroup
from forerun.server.errors import ApiError, as_api_error
from forerun.server.streams import Delta, Service, Stream

KEEP_ALIVE_S = 15.0  # silence after which a comment is sent, so that proxies do not hang up
DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")
log = logging.getLogger("forerun.server")


class Event(NamedTuple):
    """A delta of one prompt's sample."""

    prompt_index: int
    delta: Delta


class Generation:
    """The engine's requests for one HTTP request; they run inside a `with` block only."""

    def __init__(self, service: Service, groups: Sequence[RequestGroup], constrained: bool) -> None:
        self._service = service
        self._groups = groups
        self._constrained = constrained
        self._streams: list[Stream] = []

    def __enter__(self) -> None:
        """Hand all requests to the engine; raises ApiError 429 if there is no room now, 400 if there never is."""
        self._service.check_room(sum(len(group.samples) for group in self._groups))
        try:
            for group in self._groups:
                self._streams.append(self._service.submit(group, self._constrained))
        except ApiError:  # the engine has failed or stopped just now, or no replica holds so many samples
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Abort what still runs."""
        for stream in self._streams:
            self._service.abort(stream)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Deltas as they come; raises ApiError if a request fails."""
        if len(self._streams) == 1:
            async for deltas in self._streams[0].deltas():
                for delta in deltas:
                    yield Event(0, delta)
        else:
            async with aclosing(_merged(self._streams)) as merged:
                async for event in merged:
                    yield event


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[Event, None]:
    """The deltas of several streams in the order in which they come."""
    arrived: asyncio.Queue[Event | ApiError | None] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(i, stream, arrived)) for i, stream in enumerate(streams)]
    left = len(pumps)
    try:
        while left:
            item = await arrived.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(index: int, stream: Stream, arrived: asyncio.Queue[Event | ApiError | None]) -> None:
    try:
        async for deltas in stream.deltas():
            for delta in deltas:
                arrived.put_nowait(Event(index, delta))
        arrived.put_nowait(None)
    except ApiError as error:
        arrived.put_nowait(error)


async def unless_gone(request: Request, generation: Generation, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work` on `generation`; both are cancelled if the client disconnects first."""
    try:
        with generation:
            return await _unless_gone(request, work)
    finally:
        work.close()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- server-sent events -----------------------------------------------------------------------------------------


# Made once: making an encoder takes as long as using it.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(data).encode() + b"\n\n"


async def sse_body(chunks: AsyncGenerator[dict[str, Any], None], named: bool) -> AsyncGenerator[bytes, None]:
    """Events for all chunks, an error as the last event if there is one, and the end mark unless events are `named`."""
    try:
        async for chunk in chunks:
            yield (b"event: " + chunk["type"].encode() + b"\n" if named else b"") + sse(chunk)
    except Exception as error:
        yield sse(broken_off(error).body())
    if not named:
        yield DONE


def broken_off(error: Exception) -> ApiError:
    """The error event for the client of a stream. The HTTP status was sent before, so the details go to the log."""
    told = as_api_error(error)
    if told.code == "internal_error":
        log.error("an answer broke off", exc_info=error)
    return told


class EventStream(StreamingResponse):
    """A stream of events that ends at once when the client goes away, whatever it is waiting for.

    The requests of `generation`, which `chunks` reports on, run from the first byte to the last.
    """

    def __init__(
        self, generation: Generation, chunks: AsyncGenerator[dict[str, Any], None], named: bool = False
    ) -> None:
        """`named`: chunks have a `type`, which names their events; errors are chunks, too."""
        self._generation = generation
        self._body = sse_body(chunks, named)
        self._chunks = chunks
        self._num_sent = 0
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._body, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client disconnects. Raises ApiError 429 or 400 before anything is sent."""
        with self._generation:
            await self._send_until_gone(receive, send)

    async def _send_until_gone(self, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._body.aclose()
            await self._chunks.aclose()

    async def stream_response(self, send: Send) -> None:
        """The events, with comments as keep-alive while there are none."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        filler = asyncio.create_task(self._fill_silence(send))
        try:
            async for event in self._body:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            filler.cancel()
            await asyncio.gather(filler, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fill_silence(self, send: Send) -> None:
        while True:
            before = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._num_sent == before:
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
