"""The engine behind its thread: queues, deadlines, clients that vanish, steps that break, many requests at once."""

from __future__ import annotations

import asyncio
import json
import traceback
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM, SamplingParams, assemble
from forerun.core import RequestStats
from forerun.drafters.portfolio import Portfolio
from forerun.engine.outputs import RequestGroup
from forerun.server.errors import ApiError
from forerun.server.service import EngineService
from tests.models import factory
from tests.server.conftest import client_of, settings, wait_until
from tests.support import mini


@pytest.fixture(scope="module")
def small() -> LLM:
    """Two seats, so that queues form."""
    return mini.plain().with_drafter("ngram", adaptive=False, max_num_seqs=2)


def num_used(llm: LLM) -> int:
    return llm.engine.scheduler.pool.num_used


def body(seed: int, max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"Story {seed}: once", "max_tokens": max_tokens, "seed": seed, "temperature": 0.9, **fields}


def test_alone_and_among_others_with_and_without_speculation(client: TestClient) -> None:
    def text_of(fields: dict[str, Any]) -> str:
        answer = client.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    alone = [text_of(body(seed, speculation="off")) for seed in range(6)]
    mixed = [body(seed, speculation=("auto", "off")[seed % 2], priority=seed % 3) for seed in [*range(6), *range(6)]]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(text_of, mixed))
    assert together == alone + alone


def test_a_full_queue_answers_429_and_says_when_to_come_again(small: LLM) -> None:
    with client_of(small, max_queue=1) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: client.post("/v1/completions", json=body(seed, 60)), range(8)))
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused and {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}
        for stream in (False, True):
            never = client.post("/v1/completions", json=body(1, n=4, stream=stream))  # two seats, one place
            error = never.json()["error"]
            assert never.status_code == 400 and error["param"] == "n" and "holds 3 at a time" in error["message"]
        assert client.post("/v1/completions", json=body(1)).status_code == 200
    small.engine.scheduler.check_integrity()


def test_a_deadline_ends_a_request_and_frees_its_blocks(small: LLM) -> None:
    with client_of(small) as client:
        late = client.post("/v1/completions", json=body(1, 400, ignore_eos=True, timeout=0.05))
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        streamed = client.post("/v1/completions", json=body(1, 400, ignore_eos=True, timeout=0.3, stream=True))
        assert streamed.status_code == 200 and '"deadline_exceeded"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert wait_until(lambda: num_used(small) == 0)
    with client_of(small, timeout_s=0.05) as client:
        assert client.post("/v1/completions", json=body(1, 400, ignore_eos=True)).status_code == 504


def test_a_broken_step_fails_its_requests_and_no_others(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(small) as client:
        before = client.post("/v1/completions", json=body(3)).json()["choices"]
        run = small.engine.runner.run
        monkeypatch.setattr(small.engine.runner, "run", lambda *_: 1 / 0, raising=False)
        broken = client.post("/v1/completions", json=body(3))
        assert broken.status_code == 500 and broken.json()["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 200  # one failure is not the end
        streamed = client.post("/v1/completions", json=body(3, stream=True))
        assert '"engine_error"' in streamed.text
        client.post("/v1/completions", json=body(3))
        health = client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        assert client.post("/v1/completions", json=body(3)).status_code == 503
        assert num_used(small) == 0
        assert "forerun_engine_errors_total 3.0" in client.get("/metrics").text
        monkeypatch.setattr(small.engine.runner, "run", run, raising=False)
    with client_of(small) as client:
        assert client.post("/v1/completions", json=body(3)).json()["choices"] == before


def test_whoever_stops_listening_frees_the_engine(small: LLM) -> None:
    async def scenario() -> None:
        service = EngineService(small, settings())
        service.start()
        params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        streams = [service.submit(small.prepare("Once", params)) for _ in range(4)]  # two run, two wait
        async for deltas in streams[0].deltas():
            assert deltas[0].text
            break
        for stream in streams:
            service.abort(stream)
        ends = await asyncio.gather(*(drain(stream) for stream in streams), return_exceptions=True)
        assert all(isinstance(end, ApiError) and end.status_code == 499 for end in ends)
        assert num_used(small) == 0 and service.load().num_running == service.load().num_waiting == 0
        service.check_room(2 + settings().max_queue)  # nothing counts as open any more
        service.stop()
        assert not service.healthy

    asyncio.run(scenario())
    small.engine.scheduler.check_integrity()


def test_answers_may_be_delivered_while_the_next_step_computes(small: LLM) -> None:
    async def answers(meanwhile: bool) -> list[list[int]]:
        service = EngineService(small, settings())
        if meanwhile:
            service.deliver_meanwhile()
        service.start()
        streams = [service.submit(small.prepare("Once", SamplingParams(max_tokens=9 + i, seed=i))) for i in range(5)]
        found = await asyncio.gather(*(tokens_of(stream) for stream in streams))
        await asyncio.to_thread(service.stop)
        return found

    async def tokens_of(stream: Any) -> list[int]:
        return [token async for deltas in stream.deltas() for delta in deltas for token in delta.token_ids]

    inside: list[bool] = []
    expected, deliver = asyncio.run(answers(meanwhile=False)), EngineService._deliver

    def noted(service: EngineService, *given: Any) -> None:
        inside.append(any(frame.name == "_decide" for frame in traceback.extract_stack()))
        deliver(service, *given)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EngineService, "_deliver", noted)
            assert asyncio.run(answers(meanwhile=True)) == expected and all(expected)
    finally:
        small.engine.meanwhile = None
    assert inside.count(True) > 5 and inside[-1] is False  # the last has no next step
    assert num_used(small) == 0


@pytest.mark.parametrize("stops", [False, True])
def test_an_answer_that_waits_for_the_next_step_comes_without_one(
    small: LLM, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else was running has left, or the server stops."""
    step = small.step

    async def scenario() -> None:
        service = EngineService(small, settings())
        service.deliver_meanwhile()
        service.start()
        params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=1) for n in (400, 1)]
        prepared = [small.prepare("Once", of_one) for of_one in params]

        def until_the_short_one_ends() -> Any:
            if prepared[1].finished:
                too_many.append("a step of nothing")
            changed = step()
            if prepared[1].finished and stops and not stopping:
                stopping.append(Thread(target=service.stop))
                stopping[0].start()
                assert wait_until(lambda: is_closing(service))
            elif prepared[1].finished:
                service.abort(long)
            return changed

        stopping: list[Thread] = []
        too_many: list[str] = []
        monkeypatch.setattr(small, "step", until_the_short_one_ends, raising=False)
        long, short = (service.submit(group) for group in prepared)
        assert [token async for deltas in short.deltas() for delta in deltas for token in delta.token_ids]
        with pytest.raises(ApiError) as caught:
            await drain(long)
        assert caught.value.status_code == (503 if stops else 499)
        await asyncio.to_thread(stopping[0].join if stops else service.stop)
        assert (stops or not too_many) and num_used(small) == 0

    try:
        asyncio.run(scenario())
    finally:
        small.engine.meanwhile = None


async def drain(stream: Any) -> None:
    async for _ in stream.deltas():
        pass


def is_closing(service: EngineService) -> bool:
    try:
        service.check_room(1)
    except ApiError as error:
        return error.status_code == 503
    return False


def test_shutting_down_tells_those_who_wait(small: LLM) -> None:
    async def scenario() -> None:
        service = EngineService(small, settings())
        service.start()
        stream = service.submit(small.prepare("Once", SamplingParams(max_tokens=400, ignore_eos=True)))
        await asyncio.to_thread(service.stop)
        with pytest.raises(ApiError) as caught:
            async for _ in stream.deltas():
                pass
        assert caught.value.status_code == 503

    asyncio.run(scenario())
    assert num_used(small) == 0


def test_metrics_add_up(small: LLM) -> None:
    with client_of(small) as client:
        answers = [client.post("/v1/completions", json=body(seed, 12)).json() for seed in range(3)]
        client.get("/nowhere/at/all")
        text = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["forerun_generation_tokens_total"]) == sum(a["usage"]["completion_tokens"] for a in answers)
    assert float(values["forerun_prompt_tokens_total"]) == sum(a["usage"]["prompt_tokens"] for a in answers)
    drafted = sum(a["forerun"]["drafted_tokens"] for a in answers)
    accepted = sum(a["forerun"]["accepted_tokens"] for a in answers)
    assert float(values.get('forerun_draft_tokens_total{drafter="ngram"}', 0)) == drafted
    assert float(values.get('forerun_wasted_nodes_total{drafter="ngram"}', 0)) == drafted - accepted
    assert values["forerun_time_to_first_token_seconds_count"] == "3.0"
    assert values['forerun_http_requests_total{path="/v1/completions",status="200"}'] == "3.0"
    assert values['forerun_http_requests_total{path="other",status="404"}'] == "1.0"
    assert float(values["forerun_steps_total"]) > 0 and float(values['forerun_step_seconds_total{phase="forward"}']) > 0
    assert (values["forerun_requests_running"], values["forerun_kv_cache_usage_ratio"]) == ("0.0", "0.0")


def test_a_drafter_that_rests_is_said_to(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small.with_drafter("ngram", adaptive=False, ngram_min=1)
    assert isinstance(made.engine.drafter, Portfolio)
    [member] = made.engine.drafter.members
    asked = body(1, prompt="The cat sat on the mat. The cat sat on the mat. The cat sat on the", temperature=0.0)
    with client_of(made) as client:
        expected = client.post("/v1/completions", json=asked).json()["choices"]
        assert client.get("/health").json()["drafters"] == {"ngram": {"errors": 0, "rest_s": 0.0}}
        with monkeypatch.context() as patch:
            patch.setattr(member.drafter, "propose", lambda drafts: 1 / 0)
            for _ in range(4):
                assert client.post("/v1/completions", json=asked).json()["choices"] == expected
        health = client.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "ok"
        assert health.json()["drafters"]["ngram"]["errors"] == 3
        assert 0 < health.json()["drafters"]["ngram"]["rest_s"] <= 60
        values = values_of(client.get("/metrics").text)
        assert values['forerun_drafter_errors_total{drafter="ngram"}'] == 3
        assert values['forerun_drafter_resting{drafter="ngram"}'] == 1
        over = SimpleNamespace(monotonic=lambda: inf)  # its rest
        monkeypatch.setattr("forerun.drafters.portfolio.time", over)
        again = client.post("/v1/completions", json=asked).json()
        assert again["choices"] == expected and again["forerun"]["drafted_tokens"] > 0
        assert values_of(client.get("/metrics").text)['forerun_drafter_resting{drafter="ngram"}'] == 0


def values_of(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def ends_in(text: str) -> dict[str, float]:
    """Samples by how they ended."""
    values = values_of(text)
    named = {name: value for name, value in values.items() if name.startswith("forerun_samples_finished_total{")}
    return {name.split('"')[1]: value for name, value in named.items()}


def test_every_sample_ends_once_in_the_metrics(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the end: by itself, by the client, by the clock, by an error; with samples of one request at different
    points."""
    groups: list[RequestGroup] = []
    start = small.start
    monkeypatch.setattr(small, "start", lambda group: (groups.append(group), start(group)), raising=False)
    no_token = {"allowed_token_ids": [300], "min_tokens": 3, "stop_token_ids": [300]}
    with client_of(small) as client:
        assert client.post("/v1/completions", json=body(1, 12, n=2)).status_code == 200
        assert client.post("/v1/completions", json=body(1, 12, n=3, **no_token)).status_code == 400
        late = body(1, 400, n=4, ignore_eos=True, timeout=0.2)
        assert client.post("/v1/completions", json=late).status_code == 504
        values, ends = values_of(client.get("/metrics").text), ends_in(client.get("/metrics").text)
    assert ends.pop("length", 0) + ends.pop("stop", 0) == 2
    assert ends == {"error": 3, "deadline": 4}
    samples = [sample.stats() for group in groups for sample in group.samples]
    assert len(samples) == 9 and any(s.num_tokens for s in samples[5:])
    assert values["forerun_generation_tokens_total"] == sum(s.num_tokens for s in samples)
    assert values["forerun_prompt_tokens_total"] == sum(s.num_prompt_tokens for s in samples)
    assert values["forerun_cached_prompt_tokens_total"] == sum(s.num_cached_tokens for s in samples)


def test_a_request_that_is_given_up_counts_each_sample_once(small: LLM) -> None:
    """Two of four have ended when the client goes."""

    async def scenario() -> None:
        service = EngineService(small, settings())
        service.start()
        stream = service.submit(small.prepare("Once", SamplingParams(max_tokens=150, ignore_eos=True, seed=1, n=4)))
        ended = 0
        async for deltas in stream.deltas():
            ended += sum(delta.finish_reason is not None for delta in deltas)
            if ended:
                break
        service.abort(stream)
        await asyncio.to_thread(service.stop)
        counts = ends_in(service.metrics.text().decode())
        assert counts["length"] >= ended and counts["length"] + counts["abort"] == 4 and counts["abort"] > 0

    asyncio.run(scenario())
    assert num_used(small) == 0


class Broken(BaseException):
    """What no `except Exception` sees, as when a library of Rust's panics."""


@pytest.mark.parametrize("part", ["start", "step", "sample_finished", "abort"])
@pytest.mark.parametrize("error", [ZeroDivisionError, Broken])
def test_whatever_breaks_around_a_step_nobody_waits_for_ever(
    small: LLM, part: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request gets its error, and the next one its answer."""
    broken: list[str] = []

    async def scenario() -> None:
        service = EngineService(small, settings())
        of: Any = service.metrics if part == "sample_finished" else small
        whole = getattr(of, part)

        def once(*given: Any) -> Any:
            if not broken:
                broken.append(part)
                raise error("broken")
            return whole(*given)

        monkeypatch.setattr(of, part, once, raising=False)
        if part == "abort":  # which is called where a step has failed
            step = small.step
            monkeypatch.setattr(small, "step", lambda: 1 / 0 if not broken else step(), raising=False)
        service.start()
        params = SamplingParams(max_tokens=5, seed=1)
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(drain(service.submit(small.prepare("Once", params))), 60)
        assert caught.value.status_code == 500 and broken
        if part != "abort":  # after which nobody knows what the engine holds
            assert service.healthy
            await asyncio.wait_for(drain(service.submit(small.prepare("Once", params))), 60)
        await asyncio.to_thread(service.stop)

    asyncio.run(scenario())
    monkeypatch.undo()
    for group_id in list(small.engine.groups):
        small.abort(group_id)
    assert num_used(small) == 0


def test_a_request_that_comes_while_the_engine_ends_is_refused(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, has_begun, may_go_on = small.step, Event(), Event()
    monkeypatch.setattr(small, "step", lambda: (has_begun.set(), may_go_on.wait(60), step())[2], raising=False)

    async def scenario() -> None:
        service = EngineService(small, settings())
        service.start()
        held = service.submit(small.prepare("Once", SamplingParams(max_tokens=400, ignore_eos=True)))
        assert await asyncio.to_thread(has_begun.wait, 60)
        stopping = asyncio.create_task(asyncio.to_thread(service.stop))
        while not is_closing(service):
            await asyncio.sleep(0.01)
        monkeypatch.setattr(service, "check_room", lambda num: None)  # as if it had looked before
        late = service.submit(small.prepare("Once", SamplingParams(max_tokens=4)))  # behind the end
        may_go_on.set()
        for stream in (held, late):
            with pytest.raises(ApiError) as caught:
                await asyncio.wait_for(drain(stream), 60)
            assert caught.value.status_code == 503
        await stopping
        with pytest.raises(ApiError, match="shutting down"):
            service.submit(small.prepare("Once", SamplingParams(max_tokens=4)))

    asyncio.run(scenario())
    assert num_used(small) == 0


def test_the_dashboard_asks_for_metrics_that_exist(small: LLM) -> None:
    import re
    from pathlib import Path

    service = EngineService(small, settings())
    service.metrics.sample_finished(RequestStats(num_tokens=2, num_steps=1), "stop")
    known = {metric.name for metric in service.metrics.registry.collect()}
    dashboard = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
    panels = json.loads(dashboard.read_text("utf-8"))["panels"]
    asked = {name for panel in panels for t in panel["targets"] for name in re.findall(r"forerun_[a-z_]+", t["expr"])}
    assert len(asked) > 12
    for name in asked:
        assert re.sub("_(total|bucket|count|sum)$", "", name) in known, name


def test_seats_are_as_many_as_there_is_memory_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model with recurrent layers keeps a state for each request that runs."""
    path = factory.make_checkpoint("lfm2", tmp_path)
    monkeypatch.setattr(assemble, "memory_of", lambda device: 1 << 30)
    monkeypatch.setattr(assemble, "bytes_per_slot", lambda specs: (1 << 30) // 13)  # three in a quarter
    with LLM(str(path), threads=1, block_size=4, prefix_caching=False) as few:
        assert EngineService(few, settings()).num_seats == 3 < few.config.max_num_seqs
    assert "recurrent states of 3 requests" in caplog.text
