"""The embedded model behind the server: in this process, and on a real port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

import httpx
from fastapi import FastAPI
from fastapi.testclient import TestClient

from forerun import LLM
from forerun.server.app import create_app
from forerun.server.run import Server
from forerun.server.settings import ServerSettings
from tests.support import mini

Post = Callable[..., Any]


def settings(**options: Any) -> ServerSettings:
    patient = {"warm_grammars": False, "grammar_timeout_s": 60.0}
    return ServerSettings(**{"served_names": ("mini", "other-name"), **patient, **options})


@contextmanager
def client_of(llm: LLM, **options: Any) -> Iterator[TestClient]:
    """A client of a server of its own."""
    with TestClient(create_app(llm, settings(**options)), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The embedded model with an n-gram drafter that always drafts."""
    return mini.drafting("ngram", adaptive=False, ngram_min=1)


@pytest.fixture(scope="session")
def app(llm: LLM) -> FastAPI:
    return create_app(llm, settings())


@pytest.fixture(scope="session")
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def post(client: TestClient) -> Post:
    """post(path, status=200, **fields) -> the parsed answer, its status checked."""

    def send(path: str, status: int = 200, **fields: Any) -> Any:
        answer = client.post(path, json=fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    return send


@pytest.fixture
def chat(post: Post) -> Post:
    """chat("hello", status=200, **fields) -> the answer to one message."""

    def send(content: Any, status: int = 200, **fields: Any) -> Any:
        body = {"max_tokens": 12, "seed": 1, **fields, "messages": [{"role": "user", "content": content}]}
        return post("/v1/chat/completions", status, **body)

    return send


@pytest.fixture
def complete(post: Post) -> Post:
    """complete("Once", status=200, **fields)."""

    def send(prompt: Any, status: int = 200, **fields: Any) -> Any:
        return post("/v1/completions", status, **{"max_tokens": 8, "seed": 1, **fields, "prompt": prompt})

    return send


@pytest.fixture(scope="session")
def address(llm: LLM) -> Iterator[str]:
    """A server that looks for thinking and calls, whatever the template says."""
    with running(create_app(llm, settings(api_keys=("secret",), reasoning_parser="think", tool_parser="hermes"))) as at:
        yield at


@pytest.fixture(scope="session")
def thinking(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, headers={"x-api-key": "secret"}, timeout=120) as client:
        yield client


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The application on a free port of this machine -> its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = Server(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        give_up = time.monotonic() + 60
        while not server.started and time.monotonic() < give_up:
            time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether the condition became true in time."""
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)
    return condition()


def events_of(text: str) -> list[str]:
    """The data of server-sent events."""
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
