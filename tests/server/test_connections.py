"""Clients that are slow, silent or many: each costs what it may cost, and health checks are answered."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPResponse
from typing import Any

import pytest
import uvicorn

from forerun import LLM
from forerun.server import connections
from forerun.server.app import create_app
from forerun.server.connections import SPARE, Connection
from tests.server.conftest import running, settings, wait_until

HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def was_closed(client: socket.socket) -> bool:
    """Whether the server has closed it, now."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def status(address: str, path: str, body: dict[str, Any] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_silent_connections_and_half_heads_are_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with running(create_app(llm, settings())) as address, ExitStack() as stack:
        silent, half, trickling, second = (stack.enter_context(connect(address)) for _ in range(4))
        half.sendall(HALF_A_HEAD)
        trickling.sendall(HALF_A_HEAD)
        second.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in second.recv(100)
        second.sendall(HALF_A_HEAD)  # of its second request

        def trickle() -> bool:
            try:
                trickling.send(b"x")
            except OSError:
                return True
            return was_closed(trickling)

        assert wait_until(trickle)  # a byte now and then wins no time
        assert all(wait_until(partial(was_closed, client)) for client in (silent, half, second))


def test_silent_connections_give_way_to_newcomers(llm: LLM) -> None:
    """As many as there may be, and more: every one that has waited longest goes."""
    num_most, num_more = 4 + SPARE, 6
    with running(create_app(llm, settings(max_connections=4))) as address, ExitStack() as stack:
        silent = [stack.enter_context(connect(address)) for _ in range(num_most + num_more)]
        for client in silent[::2]:
            client.sendall(HALF_A_HEAD)
        for path in ("/health", "/v1/models"):
            assert status(address, path) == 200
        assert status(address, "/v1/completions", {"prompt": "Once", "max_tokens": 2}) == 200
        assert all(wait_until(partial(was_closed, client)) for client in silent[:num_more])
        assert not any(map(was_closed, silent[-num_more:]))


def test_requests_above_the_limit_are_refused_and_health_checks_are_not(llm: LLM) -> None:
    body = b'{"prompt": "Once", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with running(create_app(llm, settings(max_connections=2))) as address, ExitStack() as stack:
        slow = [stack.enter_context(connect(address)) for _ in range(2)]
        for client in slow:
            client.sendall(head % len(body))  # and no body yet

        def refused() -> bool:
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(address + "/v1/nothing", timeout=60)
            error = json.load(caught.value)["error"]
            return caught.value.code == 503 and error["code"] == "too_many_connections"

        assert wait_until(refused) and status(address, "/health") == 200
        for client in slow:
            client.sendall(body)
            assert b"200 OK" in client.recv(100)
        assert wait_until(lambda: status(address, "/v1/models") == 200)


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.5)
    gone = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (ended := asyncio.create_task(receive())) and not gone.is_set():
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            await asyncio.sleep(0)
            if ended.done() and ended.result()["type"] == "http.disconnect":
                gone.set()
            ended.cancel()

    with plain_server(endless) as address, connect(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert gone.wait(30)


@contextmanager
def plain_server(app: Any) -> Iterator[str]:
    protocol: Any = partial(Connection, idle={}, most=8)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_a_request_may_take_longer_than_a_head(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("HEAD_S", "STALLED_S"):
        monkeypatch.setattr(connections, limit, 0.2)
    with running(create_app(llm, settings())) as address, connect(address) as client:
        for _ in range(2):  # the second on a connection that was idle
            body = b'{"prompt": "Once", "max_tokens": 2}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body)
            )
            time.sleep(0.5)
            client.sendall(body)
            answer = HTTPResponse(client)
            answer.begin()
            assert answer.status == 200 and answer.read()
