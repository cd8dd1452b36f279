"""Parses and checks request bodies without holding up other requests.

Knows: JSON, the limits on the work a body may cause, and which thread does it. Does not know: fields (see `schema`).

Parsing and checking hold the GIL. Their cost is bounded by the number of objects, lists and named values that a body
may hold, and by stopping at the first error of a list; large bodies take turns, with pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from time import perf_counter, sleep
from typing import Any, Final, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from forerun.server.errors import ApiError, validation_error

MAX_PARTS: Final = 1 << 16  # objects, lists and named values of a body; each takes some hundred bytes
MAX_VALUES: Final = 1 << 20  # entries of lists, most of them numbers
LARGE: Final = 64 << 10  # bytes; smaller ones are parsed and checked within a few milliseconds
NUM_LARGE: Final = 4  # large bodies turned into requests at the same time
MAX_PAUSE_S: Final = 0.25
_CHUNK: Final = 256 << 10  # bytes examined without releasing the GIL
Result = TypeVar("Result")


class LargeBodies:
    """The threads for large bodies: one that parses and then rests for as long, and several for the other work."""

    def __init__(self) -> None:
        self._parser = ThreadPoolExecutor(1, "forerun-parser")
        self._others = ThreadPoolExecutor(NUM_LARGE, "forerun-large-body")
        self._rested_s = 0.0  # when the parser may continue; used by its thread only

    async def parse(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which holds the GIL."""
        return await asyncio.get_running_loop().run_in_executor(self._parser, self._paced, work)

    async def prepare(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which mostly waits or computes without the GIL."""
        return await asyncio.get_running_loop().run_in_executor(self._others, copy_context().run, work)

    def _paced(self, work: Callable[[], Result]) -> Result:
        sleep(max(0.0, self._rested_s - perf_counter()))
        started = perf_counter()
        try:
            return work()
        finally:
            now = perf_counter()
            self._rested_s = now + min(now - started, MAX_PAUSE_S)

    def close(self) -> None:
        """Stop the threads without waiting for them."""
        for threads in (self._parser, self._others):
            threads.shutdown(wait=False, cancel_futures=True)


class CheckedRequest(Request):
    """A request whose body is JSON text of the kind its route takes, or an ApiError."""

    kind: type[BaseModel] | None = None

    async def json(self) -> Any:
        """The parsed body, checked by its schema and by the application's `check_body`."""
        raw = await self.body()
        return await self._large.parse(lambda: self._checked(raw)) if len(raw) > LARGE else self._checked(raw)

    def form(self, *, max_files: int | float = 1, max_fields: int | float = 8, max_part_size: int = LARGE) -> Any:
        """A form of one file and a few short fields, which are held in memory; starlette takes a thousand of each."""
        return super().form(max_files=max_files, max_fields=max_fields, max_part_size=max_part_size)

    def _checked(self, raw: bytes) -> Any:
        value = parse(raw, self.kind)
        self.app.state.check_body(value)
        return value

    async def prepare(self, work: Callable[[], Result]) -> Result:
        """The result of `work` on the body, which takes a while."""
        is_large = len(await self.body()) > LARGE
        return await (self._large.prepare(work) if is_large else asyncio.to_thread(work))

    @property
    def _large(self) -> LargeBodies:
        large: LargeBodies = self.app.state.large_bodies
        return large


class CheckedRoute(APIRoute):
    """Hands requests to endpoints as CheckedRequest."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """The handler, given checked requests."""
        handler = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation

        async def checked(request: Request) -> Response:
            made = CheckedRequest(request.scope, request.receive)
            made.kind = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
            return await handler(made)

        return checked


def parse(raw: bytes, kind: type[BaseModel] | None = None) -> Any:
    """The JSON value, or the `kind` it describes. Raises ApiError 400 naming the first thing that is wrong."""
    check_parts(raw)
    try:
        value = from_json(raw.decode("utf-8"), allow_inf_nan=False)
        return value if kind is None else kind.model_validate(value)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 text: {error.reason}", code="invalid_utf8") from error
    except ValidationError as error:
        raise validation_error(error) from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def check_parts(*texts: bytes) -> None:
    """Raise ApiError 400 for JSON texts that are too much work to parse.

    Brackets, colons and commas inside strings do not count; strings are only skipped when the quick count is too high.
    """
    for marks, most, name in ((b"{[:", MAX_PARTS, "objects, lists and named values"), (b",", MAX_VALUES, "values")):
        if sum(_num_marks(text, marks) for text in texts) > most:
            found = sum(_num_outside_strings(text, marks) for text in texts)
            if found > most:
                raise ApiError(400, f"the body holds {found} {name}; the most is {most}", code="body_too_complex")


def _num_marks(text: bytes, marks: bytes) -> int:
    return sum(map(text.count, marks))


def _num_outside_strings(text: bytes, marks: bytes) -> int:
    """The number of marks outside of strings, using memory for one chunk only."""
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # each remaining quote begins or ends a string
    found = first = 0  # `first`: index of a chunk's first piece outside of strings
    for start in range(0, len(text), _CHUNK):
        pieces = text[start : start + _CHUNK].split(b'"')
        found += _num_marks(b"".join(pieces[first::2]), marks)
        first = (first + len(pieces) - 1) % 2
    return found
