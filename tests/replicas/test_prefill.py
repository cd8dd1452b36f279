"""Prompts that prefill replicas read: answers are those of one server, whatever becomes of the reading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient

from forerun.cache import spill
from forerun.cache.disk import DiskTier
from forerun.core import SamplingParams
from forerun.replicas import fleet as fleets
from forerun.replicas import prefill
from forerun.replicas.fleet import Fleet, RemoteFrontend
from forerun.replicas.orders import Accepted, Ordered, Refusal
from forerun.replicas.prefill import PromptReader
from forerun.replicas.replica import Replica
from tests.replicas.conftest import InProcess, fleet_client
from tests.server.conftest import client_of, settings, wait_until
from tests.server.test_service import values_of
from tests.support import mini

LONG = " ".join(mini.PROMPTS)  # more than LEAST tokens
LEAST = 48
TEXT = "/v1/completions"


class Apart(NamedTuple):
    """A replica that answers and one that reads prompts, with a folder that both have."""

    answering: InProcess
    reading: InProcess

    @contextmanager
    def client(self, wait_s: float = 30.0) -> Iterator[TestClient]:
        """One that knows of no prompt yet."""
        with fleet_client(self.answering, reader=PromptReader(self.reading, LEAST, wait_s)) as client:
            yield client


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    kept = {"kv_disk": str(tmp_path_factory.mktemp("shared")), "kv_disk_gib": 0.2}
    answering = Replica("r0", mini.drafting("ngram", adaptive=False, ngram_min=1, **kept), settings())
    reading = Replica("p0", mini.drafting("none", **kept), settings(prefill_only=True))
    yield Apart(InProcess(answering), InProcess(reading))
    answering.stop()
    reading.stop()


@pytest.fixture
def apart(both: Apart, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    monkeypatch.setattr(fleets, "RETRY_S", 0.001)
    for replicas in both:
        replicas.orders.clear()
    yield both
    for replicas in both:
        replicas.lost = lambda order, said: False


@pytest.fixture(scope="module")
def alone() -> Iterator[TestClient]:
    """One server that does everything."""
    with client_of(mini.plain()) as client:
        yield client


def choices(client: TestClient, given: dict[str, Any]) -> Any:
    answer = client.post(TEXT, json=given)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "mini", "prompt": LONG, "max_tokens": 12, "seed": 5, "temperature": 0.8, **fields}


def outcomes(client: TestClient) -> dict[str, float]:
    beginning = 'forerun_prefilled_prompts_total{outcome="'
    values = values_of(client.get("/metrics").text)
    return {name.split('"')[1]: value for name, value in values.items() if name.startswith(beginning)}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"n": 2, "stop": ["and"], "frequency_penalty": 0.5},
        {"logprobs": 2, "cache_salt": "x"},
    ],
)
def test_long_prompts_are_read_first_and_loaded(fields: dict[str, Any], apart: Apart, alone: TestClient) -> None:
    given = asked(prompt=f"{fields} {LONG}", **fields)
    with apart.client() as client:
        answer = client.post(TEXT, json=given).json()
        assert outcomes(client) == {"stored": 1}
        assert 'replica="r0"' in (text := client.get("/metrics").text) and 'replica="p0"' in text
    assert answer["choices"] == choices(alone, given)
    [read], [answered] = apart.reading.orders, apart.answering.orders
    assert read.params.max_tokens == 1 and read.prompt == answered.prompt
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 16 * 16


def test_a_draft_model_that_has_not_read_the_prompt_changes_nothing(alone: TestClient, tmp_path: Path) -> None:
    options = {"draft_model": "mini-draft", "max_draft_tokens": 3, "kv_disk": str(tmp_path), "kv_disk_gib": 0.2}
    answering = Replica("r0", mini.drafting("draft", adaptive=False, **options), settings())
    reading = Replica("p0", mini.drafting("draft", adaptive=False, **options), settings(prefill_only=True))
    try:
        with Apart(InProcess(answering), InProcess(reading)).client() as client:
            answer = client.post(TEXT, json=asked()).json()
            assert outcomes(client) == {"stored": 1}
    finally:
        answering.stop()
        reading.stop()
    assert answer["choices"] == choices(alone, asked())
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 16 * 16
    assert answer["forerun"]["num_steps"] < usage["completion_tokens"]  # drafts were accepted


def test_short_and_known_prompts_go_straight_to_the_answer(apart: Apart) -> None:
    with apart.client() as client:

        def num_read(prompt: str, **fields: Any) -> int:
            before = len(apart.reading.orders)
            answer = client.post(TEXT, json=asked(prompt=prompt, **fields)).json()
            texts.append(answer["choices"][0]["text"])
            return len(apart.reading.orders) - before

        texts = list[str]()
        assert num_read("Once upon a time") == 0
        assert num_read(LONG, prompt_logprobs=1) == 0  # every token of it is computed where it is answered
        assert num_read("A prompt. " + LONG, max_tokens=40, ignore_eos=True) == 1
        known = "A prompt. " + LONG
        assert num_read(known) == 0
        assert num_read(known + texts[2] + " and") == 0  # a turn later
        assert num_read(known, cache_salt="another") == 1
        assert num_read(known + LONG) == 1  # as much again is new


@pytest.mark.parametrize("place", [0, 1])
def test_a_prefill_replica_that_is_lost_costs_nothing_but_time(place: int, apart: Apart, alone: TestClient) -> None:
    given = asked(prompt=f"Lost at {place}. {LONG}")
    apart.reading.lost = lambda order, said: said == place
    with apart.client() as client:
        assert choices(client, given) == choices(alone, given)
        assert outcomes(client) == {"failed": 1}
    assert (len(apart.reading.orders), len(apart.answering.orders)) == (1, 1)


async def _refusing(order: Any) -> AsyncIterator[Any]:
    yield Accepted("p0")
    yield Refusal(429, "full", None, "queue_full", {})


async def _ending(order: Any) -> AsyncIterator[Any]:
    yield Accepted("p0")


async def _broken(order: Any) -> AsyncIterator[Any]:
    yield Accepted("p0")
    raise RuntimeError("a fault of ours")


async def _silent(order: Any) -> AsyncIterator[Any]:
    yield Accepted("p0")
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("run", "outcome"), [(_refusing, "failed"), (_ending, "failed"), (_broken, "failed"), (_silent, "late")]
)
def test_whatever_reading_comes_to_the_prompt_is_answered(
    run: Any, outcome: str, apart: Apart, alone: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = asked(prompt=f"{run.__name__} {LONG}")
    monkeypatch.setattr(apart.reading.replicas["p0"], "run", run)
    with apart.client(wait_s=0.1) as client:
        assert choices(client, given) == choices(alone, given)
        assert outcomes(client) == {outcome: 1}


def test_a_prompt_that_the_folder_did_not_take_is_not_stored(
    apart: Apart, alone: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, from some block on."""
    num_left, put = iter(range(2)), DiskTier.put
    monkeypatch.setattr(DiskTier, "put", lambda *given: next(num_left, None) is not None and put(*given))
    given = asked(prompt=f"No room. {LONG}")
    with apart.client() as client:
        assert choices(client, given) == choices(alone, given)
        assert outcomes(client) == {"failed": 1}
    assert len(apart.reading.orders) == 1


def test_a_step_that_fills_more_blocks_than_may_wait_stores_all(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    lower: Any = apart.reading.replicas["p0"]._llm.engine.scheduler.prefix_cache.lower  # type: ignore[union-attr]
    monkeypatch.setattr(spill, "MAX_UNWRITTEN", lower.spill.block_bytes)
    with apart.client() as client:
        client.post(TEXT, json=asked(prompt=f"More than may wait. {LONG}"))
        assert outcomes(client) == {"stored": 1}


def test_prefill_replicas_that_do_not_manage_rest(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every request would wait for them, as where their folder hangs."""
    now_s, read = 1000.0, apart.reading.replicas["p0"].run
    monkeypatch.setattr(prefill, "perf_counter", lambda: now_s)

    def num_sent(client: TestClient, name: str, **fields: Any) -> int:
        before = len(apart.reading.orders)
        client.post(TEXT, json=asked(prompt=f"{name} {LONG}", max_tokens=2, **fields))
        return len(apart.reading.orders) - before

    with apart.client(wait_s=0.1) as client:
        monkeypatch.setattr(apart.reading.replicas["p0"], "run", _silent)
        assert [num_sent(client, f"Rest {i}.", timeout=0.05) for i in range(4)] == [1] * 4  # nobody could know
        assert [num_sent(client, f"Rest {i}.") for i in range(4, 9)] == [1, 1, 1, 0, 0]
        now_s += prefill.REST_S
        assert [num_sent(client, f"Rest {i}.") for i in range(9, 11)] == [1, 0]  # tried again
    with apart.client() as client:
        for name in ("a", "b"):  # what is stored in between ends the row
            monkeypatch.setattr(apart.reading.replicas["p0"], "run", _broken)
            assert [num_sent(client, f"Row {name} {i}.") for i in range(2)] == [1, 1]
            monkeypatch.setattr(apart.reading.replicas["p0"], "run", read)
            assert num_sent(client, f"Row {name}, good.") == 1
        assert outcomes(client) == {"failed": 4, "stored": 2}


def test_a_folder_that_hangs_is_a_step_that_does_not_end(both: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the replica is found unhealthy."""
    replica, hangs, free, put = both.reading.replicas["p0"], Event(), Event(), DiskTier.put

    def hanging(*given: Any) -> bool:
        hangs.set()
        return free.wait(60) and put(*given)

    monkeypatch.setattr(DiskTier, "put", hanging)
    order = Ordered(RemoteFrontend(replica.describe()).prepare(f"Hangs. {LONG}", SamplingParams()), False).order((), "")

    async def reading() -> list[Any]:
        task = asyncio.create_task(_all(replica.run(order)))
        try:
            assert await asyncio.to_thread(hangs.wait, 30)
            await asyncio.sleep(0.5)  # more than the step needs
            with pytest.raises(RuntimeError, match="has not ended"):
                replica.check(0.4)
        finally:
            free.set()
        return await task

    assert asyncio.run(reading())[0] == Accepted("p0")
    replica.check(0.4)


async def _all(said: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in said]


def test_a_deadline_leaves_time_for_the_answer(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart.reading.replicas["p0"], "run", _silent)
    with apart.client(wait_s=60.0) as client:
        answer = client.post(TEXT, json=asked(prompt=f"In time. {LONG}", max_tokens=2, timeout=4.0))
        assert answer.status_code == 200 and outcomes(client) == {"late": 1}


def test_nobody_waits_for_prefill_replicas_that_are_not_there(apart: Apart) -> None:
    nobody = InProcess()
    with fleet_client(apart.answering, reader=PromptReader(nobody, LEAST, 60.0)) as client:
        assert client.post(TEXT, json=asked(prompt=f"Nobody. {LONG}")).status_code == 200
        assert outcomes(client) == {}
    assert nobody.orders == []


def test_a_client_that_leaves_ends_the_reading(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def waiting(order: Any) -> AsyncIterator[Any]:
        yield Accepted("p0")
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(apart.reading.replicas["p0"], "run", waiting)
    described = next(iter(apart.answering.replicas.values())).describe()
    fleet = Fleet(apart.answering, described, settings(), reader=PromptReader(apart.reading, LEAST, 60.0))

    async def leave() -> None:
        stream = fleet.submit(RemoteFrontend(described).prepare(f"Gone. {LONG}", SamplingParams(max_tokens=4)))
        while not apart.reading.orders:
            await asyncio.sleep(0.001)
        fleet.abort(stream)
        with suppress(asyncio.CancelledError):
            await stream.task
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(leave())
    assert apart.answering.orders == []
    assert wait_until(lambda: fleet.load().num_running == 0, 10)
