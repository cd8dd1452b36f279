"""Server-sent events: what is sent when, and what is left when the client hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from forerun.server import generation
from forerun.server.errors import ApiError
from forerun.server.generation import DONE, EventStream

SILENCE = b": waiting\n\n"


class Connection:
    """A client that reads until it has seen `hang_up_after` bodies."""

    def __init__(self, hang_up_after: int | None = None) -> None:
        self.bodies: list[bytes] = []
        self.complete = False
        self._left = asyncio.Event()
        self._hang_up_after = hang_up_after

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            assert not self.complete, "something is sent after the end"
            self.bodies.append(message["body"])
            self.complete = not message["more_body"]
        if len(self.bodies) == self._hang_up_after:
            self._left.set()

    async def receive(self) -> dict[str, str]:
        await self._left.wait()
        return {"type": "http.disconnect"}


def run(chunks: AsyncGenerator[dict[str, Any], None], connection: Connection) -> None:
    async def answer() -> None:
        await asyncio.wait_for(EventStream(chunks)({"type": "http"}, connection.receive, connection.send), 10)

    asyncio.run(answer())


def test_comments_fill_silence_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.05)

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"a": "ä"}
        await asyncio.sleep(0.3)
        for number in range(20):
            yield {"b": number}

    connection = Connection()
    run(chunks(), connection)
    assert connection.bodies[0] == 'data: {"a":"ä"}\n\n'.encode() and connection.bodies[-2:] == [DONE, b""]
    assert 2 <= connection.bodies.count(SILENCE) <= 6
    assert b"".join(connection.bodies[-22:-2]) == b"".join(b'data: {"b":%d}\n\n' % i for i in range(20))


def test_an_error_is_the_last_event() -> None:
    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"a": 1}
        raise ApiError(500, "broken")

    connection = Connection()
    run(chunks(), connection)
    assert b'"broken"' in connection.bodies[1] and connection.bodies[2:] == [DONE, b""] and connection.complete


def test_a_client_that_hangs_up_ends_what_it_waits_for() -> None:
    ended = []

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        try:
            yield {"a": 1}
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    connection = Connection(hang_up_after=1)
    run(chunks(), connection)
    assert ended == [True] and not connection.complete
