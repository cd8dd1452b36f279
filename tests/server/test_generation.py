"""Server-sent events: what is sent when, and what is left when the client hangs up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from forerun import LLM
from forerun.server import generation
from forerun.server.app import create_app
from forerun.server.errors import ApiError
from forerun.server.generation import DONE, EventStream, Generation
from forerun.server.service import EngineService
from tests.server.conftest import settings

SILENCE = b": waiting\n\n"


class Connection:
    """A client that reads until it has seen `hang_up_after` bodies."""

    def __init__(self, hang_up_after: int | None = None) -> None:
        self.bodies: list[bytes] = []
        self.complete = False
        self._left = asyncio.Event()
        self._hang_up_after = hang_up_after
        if hang_up_after == 0:
            self._left.set()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            assert not self.complete, "something is sent after the end"
            self.bodies.append(message["body"])
            self.complete = not message["more_body"]
        if len(self.bodies) == self._hang_up_after:
            self._left.set()
            await asyncio.sleep(0.2)  # nobody reads any more

    async def receive(self) -> dict[str, str]:
        await self._left.wait()
        return {"type": "http.disconnect"}


def run(chunks: AsyncGenerator[dict[str, Any], None], connection: Connection) -> None:
    async def answer() -> None:
        await asyncio.wait_for(stream({"type": "http"}, connection.receive, connection.send), 10)

    stream = EventStream(Generation(Idle(), (), False), chunks)  # type: ignore[arg-type]
    asyncio.run(answer())


class Idle:
    """A service with nothing to do."""

    def check_room(self, num_samples: int) -> None:
        assert num_samples == 0


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


def test_what_breaks_in_a_stream_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Clients are told that the log says why."""

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        yield {"a": 1}
        raise ZeroDivisionError("in the middle")

    logging.getLogger("forerun.server").addHandler(caplog.handler)
    try:
        connection = Connection()
        run(chunks(), connection)
    finally:
        logging.getLogger("forerun.server").removeHandler(caplog.handler)
    assert b"its log says why" in connection.bodies[1] and "in the middle" in caplog.text


def test_requests_that_cannot_all_begin_are_ended() -> None:
    """The engine failed behind the first of them."""
    aborted = []

    class Failing(Idle):
        def check_room(self, num_samples: int) -> None:
            assert num_samples == 2

        def submit(self, group: Any, constrained: bool) -> str:
            if group.name == "second":
                raise ApiError(503, "the engine has stopped working")
            return str(group.name)

        def abort(self, stream: str) -> None:
            aborted.append(stream)

    groups = [SimpleNamespace(name=name, samples=[0]) for name in ("first", "second")]
    with pytest.raises(ApiError, match="stopped"), Generation(Failing(), groups, False):  # type: ignore[arg-type]
        pytest.fail("begun")
    assert aborted == ["first"]


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


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1500}


@pytest.mark.parametrize(
    ("path", "fields", "hang_up_after"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2, "stream": True}, 1),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 1500, "n": 2, "echo": True, "stream": True}, 1),
        ("/playground/stream", CHAT, 1),
        ("/v1/chat/completions", CHAT, 0),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 1500, "stream": True}, 0),
    ],
)
def test_no_request_outlives_its_client(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], hang_up_after: int
) -> None:
    """Whoever hangs up before or during the first chunks, which come before any token does, ends all requests."""
    submitted: list[str] = []
    aborted: list[str] = []
    submit, abort = EngineService.submit, EngineService.abort

    def note_submit(service: EngineService, *given: Any) -> Any:
        stream = submit(service, *given)
        submitted.append(stream.request_id)
        return stream

    def note_abort(service: EngineService, stream: Any) -> None:
        aborted.append(stream.request_id)
        abort(service, stream)

    monkeypatch.setattr(EngineService, "submit", note_submit)
    monkeypatch.setattr(EngineService, "abort", note_abort)
    app = create_app(llm, settings())
    asyncio.run(_hang_up(app, path, fields, hang_up_after))
    assert submitted == aborted and len(submitted) == 1
    scheduler = llm.engine.scheduler
    assert not scheduler.running and not scheduler.waiting and scheduler.pool.num_used == 0


async def _hang_up(app: FastAPI, path: str, fields: dict[str, Any], after: int) -> None:
    """Ask, and hang up when `after` chunks have come; returns when the server is idle and stopped."""
    connection, body = Connection(after), [json.dumps({**fields, "ignore_eos": True} if "/v1" in path else fields)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body.pop().encode()} if body else await connection.receive()

    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1), "scheme": "http", "http_version": "1.1", "root_path": "",
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        await asyncio.wait_for(app(scope, receive, connection.send), 30)
