"""Replicas in this process, which end when a test says so."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from fastapi.testclient import TestClient

from forerun import LLM
from forerun.replicas.fleet import Fleet, RemoteFrontend
from forerun.replicas.orders import ReplicaOrder
from forerun.replicas.prefill import PromptReader
from forerun.replicas.replica import Replica, Said
from forerun.replicas.transport import ReplicaLost
from forerun.server.app import application
from forerun.server.metrics import EngineLoad
from tests.server.conftest import settings
from tests.support import mini

Lost = Callable[[int, int], bool]  # (which order this is, things said to it so far) -> whether the replica is lost now


class InProcess:
    """Takes turns among replicas; what is said travels as bytes."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = {replica._name: replica for replica in replicas}
        self.lost: Lost = lambda order, said: False
        self.orders: list[ReplicaOrder] = []
        self._turn = count()

    async def run(self, order: ReplicaOrder) -> AsyncIterator[Said]:
        number = len(self.orders)
        self.orders.append(order)
        replica = list(self.replicas.values())[next(self._turn) % len(self.replicas)]
        said = 0
        async with aclosing(replica.run(pickle.loads(pickle.dumps(order)))) as answers:  # type: ignore[type-var]
            while True:
                if self.lost(number, said):
                    raise ReplicaLost("killed")
                each = await anext(answers, None)
                if each is None:
                    return
                yield pickle.loads(pickle.dumps(each))
                said += 1

    def loads(self) -> Mapping[str, EngineLoad]:
        return {name: replica.load() for name, replica in self.replicas.items()}

    async def metrics_texts(self) -> Mapping[str, bytes]:
        await asyncio.sleep(0)
        return {name: replica.metrics_text() for name, replica in self.replicas.items()}


@contextmanager
def fleet_client(
    replicas: InProcess, failover: bool = True, reader: PromptReader | None = None, **options: Any
) -> Iterator[TestClient]:
    described = next(iter(replicas.replicas.values())).describe()
    asked = settings(**options)
    fleet = Fleet(replicas, described, asked, failover, reader)
    with TestClient(
        application(fleet, RemoteFrontend(described), asked, deployment="tests"), raise_server_exceptions=False
    ) as client:
        yield client


@pytest.fixture(scope="session")
def engines() -> list[LLM]:
    """Two engines on the same weights that draft differently."""
    return [mini.drafting("ngram", adaptive=False, ngram_min=1), mini.drafting("none")]


@pytest.fixture(scope="session")
def replicas(engines: list[LLM]) -> Iterator[InProcess]:
    made = [Replica(f"r{number}", llm, settings()) for number, llm in enumerate(engines)]
    made[1]._grammars = made[0]._grammars  # the compiler takes seconds to start
    yield InProcess(*made)
    for replica in made:
        replica.stop()


@pytest.fixture(scope="session")
def fleet(replicas: InProcess) -> Iterator[TestClient]:
    with fleet_client(replicas) as client:
        yield client
