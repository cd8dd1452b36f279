"""Workers of a batch that die: which rows they take with them, and when none is started any more. No Ray is needed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.server import batch_cluster
from forerun.server.batch_cluster import MAX_COMPANY, BatchCluster
from forerun.server.batches import MAX_TRIES, UnavailableError


class RayError(Exception):
    """As Ray's."""


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    made, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    exceptions.__dict__.update(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}))
    made.__dict__.update(exceptions=exceptions, kill=lambda actor: None)
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


class Worker:
    """Dies with every row whose name begins with "bad", and takes the rows beside it along."""

    def __init__(self, rows: list[tuple[str, list[str]]]) -> None:
        self.begin = SimpleNamespace(remote=self._begin)
        self.answer = SimpleNamespace(remote=self._answer)
        self._rows = rows
        self._now: list[str] = []
        self._died = asyncio.Event()

    async def _begin(self, version: str) -> None:
        await asyncio.sleep(0)

    async def _answer(self, row: Any) -> Any:
        self._now.append(row.custom_id)
        self._rows.append((row.custom_id, list(self._now)))
        with_bad = row.custom_id.startswith("bad")
        try:
            await asyncio.wait_for(self._died.wait(), 0.005 if with_bad else 0.02)
        except TimeoutError:
            if not with_bad:
                self._now.remove(row.custom_id)
                return True, {"custom_id": row.custom_id}
            self._died.set()
        raise RayError("the worker died")


def row(name: str) -> Any:
    return SimpleNamespace(custom_id=name, answer_id=f"batch-{name}", num_samples=1)


def with_cluster(num_workers: int, work: Callable[[BatchCluster], Awaitable[Any]]) -> tuple[Any, list[Any], int]:
    """What `work` gives, the rows that workers were asked for with those beside them, and how many workers began."""
    rows: list[tuple[str, list[str]]] = []
    begun: list[Worker] = []

    def begin() -> Worker:
        begun.append(Worker(rows))
        return begun[-1]

    async def run() -> Any:
        cluster = BatchCluster(begin, num_workers)
        keeping = asyncio.create_task(cluster.keep())
        try:
            return await asyncio.wait_for(work(cluster), 20)
        finally:
            keeping.cancel()

    return asyncio.run(run()), rows, len(begun)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_row_that_workers_die_of_is_asked_alone_and_takes_no_other_along(num_workers: int) -> None:
    names = ["bad", *(f"good{number}" for number in range(12))]

    async def work(cluster: BatchCluster) -> Any:
        return await asyncio.gather(*[cluster.answer(row(name)) for name in names])

    answers, rows, _ = with_cluster(num_workers, work)
    assert [fine for fine, _ in answers] == [False, *[True] * 12]
    assert answers[0][1]["error"]["code"] == "worker_lost"
    tries = [beside for name, beside in rows if name == "bad"]
    assert len(tries) == MAX_TRIES and tries[MAX_COMPANY:] == [["bad"]] * (MAX_TRIES - MAX_COMPANY)
    bad_at = [at for at, (name, _) in enumerate(rows) if name == "bad"]
    assert all("bad" not in beside for name, beside in rows[bad_at[MAX_COMPANY] :] if name != "bad")


def test_workers_that_only_die_are_not_replaced_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_cluster, "MAX_COMPANY", MAX_TRIES)

    async def work(cluster: BatchCluster) -> Any:
        for number in range(50):
            await cluster.answer(row(f"bad{number}"))

    with pytest.raises(UnavailableError, match="workers die before they answer a row; the last one: .*died"):
        with_cluster(1, work)


def test_an_answer_in_between_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(cluster: BatchCluster) -> Any:
        answers = []
        for number in range(6):
            answers += [await cluster.answer(row(f"bad{number}")), await cluster.answer(row(f"good{number}"))]
        return answers

    answers, _, num_begun = with_cluster(1, work)
    assert [fine for fine, _ in answers] == [False, True] * 6
    assert num_begun >= 6 * MAX_TRIES
