"""Replicas that are lost in the middle of answers: clients get what one server that was never disturbed sends."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from threading import Event
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from forerun.config import EngineConfig
from forerun.core import RequestStats, SamplingParams
from forerun.errors import ConfigError
from forerun.replicas import fleet as fleets
from forerun.replicas.fleet import Fleet, RemoteFrontend
from forerun.replicas.orders import Accepted, Refusal
from forerun.replicas.replica import Description, Replica, kind_of
from forerun.server.metrics import EngineLoad, Metrics
from forerun.server.tools import MARKS
from forerun.weights.resolve import resolve_model
from tests.replicas.conftest import InProcess, fleet_client
from tests.server.conftest import client_of, events_of, settings, wait_until
from tests.support import mini

CHAT = "/v1/chat/completions"
LONG = {"seed": 7, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
    "place": {"type": "string", "maxLength": 3}}, "required": ["place"]}}}]  # fmt: skip
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {**LONG, "temperature": 0},
    "drawn": {**LONG, "temperature": 0.8},
    "samples": {**LONG, "temperature": 0.9, "n": 2},
    "log-probabilities": {**LONG, "temperature": 0.7, "logprobs": True, "top_logprobs": 2},
    "stop strings": {**LONG, "temperature": 0.7, "stop": ["and", "zz"], "max_tokens": 30},
    "penalties": {**LONG, "temperature": 0.7, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "a schema": {"seed": 3, "max_tokens": 24, "temperature": 0.9, "return_token_ids": True, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "boolean"},
                                                                         "minItems": 3, "maxItems": 3}}}},
    "a call": {"seed": 3, "max_tokens": 40, "temperature": 0.9, "tools": TOOLS, "tool_choice": "required",
               "return_token_ids": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Iterator[TestClient]:
    """One server, undisturbed."""
    with client_of(mini.plain()) as client:
        yield client


@pytest.fixture(autouse=True)
def undisturbed(replicas: InProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fleets, "RETRY_S", 0.001)
    replicas.orders.clear()
    yield
    replicas.lost = lambda order, said: False


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Once upon a time there was"}], **fields}


def whole(client: TestClient, fields: dict[str, Any]) -> tuple[Any, Any]:
    answer = client.post(CHAT, json=body(fields))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    usage = {name: told["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return [{**choice, "message": _without_ids(choice["message"])} for choice in told["choices"]], usage


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(message), object_hook=lambda found: {k: v for k, v in found.items() if k != "id"})


def streamed(client: TestClient, fields: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What a client puts together from the pieces, by sample."""
    answer = client.post(CHAT, json=body({**fields, "stream": True}))
    found: dict[int, dict[str, Any]] = {}
    for event in events_of(answer.text):
        if event == "[DONE]":
            continue
        told = json.loads(event)
        assert "error" not in told, told
        for choice in told["choices"]:
            own = found.setdefault(choice["index"], {"content": "", "ids": [], "logprobs": [], "calls": "", "end": []})
            own["content"] += choice["delta"].get("content") or ""
            own["ids"] += choice.get("token_ids") or []
            own["logprobs"] += (choice["logprobs"] or {}).get("content") or []
            for call in choice["delta"].get("tool_calls") or ():
                own["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            own["end"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found


@pytest.mark.parametrize("kind", sorted(ASKED))
def test_an_answer_goes_on_from_wherever_its_replica_is_lost(
    kind: str, alone: TestClient, fleet: TestClient, replicas: InProcess
) -> None:
    if kind in ("a schema", "a call"):
        pytest.importorskip("xgrammar")
    fields = ASKED[kind]
    expected, pieces = whole(alone, fields), streamed(alone, fields)
    assert whole(fleet, fields) == expected and streamed(fleet, fields) == pieces
    for place in (0, 1, 2, 4, 7):
        replicas.orders.clear()
        replicas.lost = lambda order, said, place=place: order == 0 and said == place  # type: ignore[misc]
        assert whole(fleet, fields) == expected, place
        assert len(replicas.orders) == 2 or place > 1
        replicas.orders.clear()
        assert streamed(fleet, fields) == pieces, place


def test_several_replicas_are_lost_on_one_answer(alone: TestClient, fleet: TestClient, replicas: InProcess) -> None:
    fields = {**ASKED["samples"], "max_tokens": 40}  # no sample ends before the last loss
    replicas.lost = lambda order, said: order < 4 and said == 3
    assert streamed(fleet, fields) == streamed(alone, fields)
    assert len(replicas.orders) == 5
    told = [sum(map(len, order.written.values())) for order in replicas.orders]
    assert told == sorted(told) and told[-1] > told[1] > 0
    assert replicas.orders[-1].avoid and replicas.orders[-1].params.seed == fields["seed"]


def test_figures_are_those_of_the_whole_answer_and_metrics_those_of_each_replica(
    fleet: TestClient, replicas: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RequestStats] = []
    for replica in replicas.replicas.values():
        monkeypatch.setattr(replica._service.metrics, "sample_finished", lambda stats, reason: found.append(stats))
    monkeypatch.setattr(fleets, "RETRY_S", 0.2)
    replicas.lost = lambda order, said: order < 4 and said == 3
    fields = {**ASKED["drawn"], "max_tokens": 40, "speculation": "off"}
    started = perf_counter()
    told = fleet.post(CHAT, json=body(fields)).json()["forerun"]
    took_s, lost_s = perf_counter() - started, 4 * 0.2
    assert told["num_steps"] == 40 and told["acceptance_length"] == 1.0
    assert 0 < told["queue_s"] == told["ttft_s"] <= took_s - lost_s and told["decode_s"] >= lost_s
    last = max(found, key=lambda stats: stats.num_elsewhere)
    assert last.num_elsewhere == len(replicas.orders[-1].written[0]) == 8 and last.num_tokens == 40
    assert last.num_steps == 32 and last.acceptance_length == 1.0


def test_a_replica_counts_what_it_wrote_itself() -> None:
    metrics = Metrics(lambda: EngineLoad(0, 0, 0.0, True, {}, 0, {}))
    gone_on = RequestStats(num_tokens=40, num_elsewhere=30, num_steps=5, queue_s=0.5, ttft_s=1.0, decode_s=0.9)
    metrics.sample_finished(gone_on, "stop")
    value = metrics.registry.get_sample_value
    assert value("forerun_generation_tokens_total") == 10 and value("forerun_acceptance_length_sum") == 2.0
    assert value("forerun_time_to_first_token_seconds_count") == value("forerun_queue_seconds_count") == 0
    assert value("forerun_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    metrics.sample_finished(RequestStats(num_tokens=1, num_steps=1, ttft_s=1.0), "stop")
    assert value("forerun_time_to_first_token_seconds_count") == value("forerun_queue_seconds_count") == 1
    metrics.sample_finished(RequestStats(num_tokens=30, num_elsewhere=30), "abort")
    assert value("forerun_generation_tokens_total") == 11 and value("forerun_acceptance_length_count") == 2


def test_a_call_beside_a_response_format_goes_on_elsewhere(
    replicas: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.setitem(MARKS, "glm45", ("<|im_start|>", "</tool_call>"))  # one token of the model's
    [opening], [name] = (mini.plain().tokenizer.encode(text, False) for text in ("<|im_start|>", "look"))
    fields = {**ASKED["a schema"], "tools": [{"type": "function", "function": {"name": "look"}}],
              "logit_bias": {str(opening): 60.0, str(name): 100.0}, "max_tokens": 2, "speculation": "off"}  # fmt: skip
    with fleet_client(replicas, tool_parser="glm45") as client:
        replicas.lost = lambda order, said: order == 0 and said == 2  # behind the opening mark
        [choice] = client.post(CHAT, json=body(fields)).json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
    assert replicas.orders[1].written == {0: (opening,)}


def test_a_seed_that_nobody_gave_is_drawn_once(fleet: TestClient, replicas: InProcess) -> None:
    replicas.lost = lambda order, said: order == 0 and said == 3
    fields = {**ASKED["drawn"], "seed": None, "speculation": "off"}  # a step a token
    first = fleet.post(CHAT, json=body(fields)).json()
    replicas.lost = lambda order, said: False
    again = fleet.post(CHAT, json=body({**fields, "seed": first["forerun"]["seeds"][0]})).json()
    assert again["choices"] == first["choices"]
    assert first["forerun"]["num_steps"] >= again["forerun"]["num_steps"] == 12  # those of the lost one count


def test_log_probabilities_of_prompts_arrive(alone: TestClient, fleet: TestClient, replicas: InProcess) -> None:
    asked = {
        "prompt": "Once upon a time",
        "max_tokens": 5,
        "seed": 2,
        "prompt_logprobs": 1,
        "logprobs": 1,
        "echo": True,
    }
    expected = alone.post("/v1/completions", json=asked).json()["choices"]
    assert fleet.post("/v1/completions", json=asked).json()["choices"] == expected
    replicas.lost = lambda order, said: said == 3 and order % 2 == 0
    replicas.orders.clear()
    assert fleet.post("/v1/completions", json=asked).json()["choices"] == expected


def test_without_failover_the_client_is_told(replicas: InProcess) -> None:
    replicas.lost = lambda order, said: said == 3
    with fleet_client(replicas, failover=False) as client:
        answer = client.post(CHAT, json=body(ASKED["drawn"]))
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert answer.json()["error"]["code"] == "replica_lost"


def test_replicas_that_bring_nothing_are_not_tried_for_ever(fleet: TestClient, replicas: InProcess) -> None:
    replicas.lost = lambda order, said: said == 0  # before any takes it
    assert fleet.post(CHAT, json=body(ASKED["drawn"])).status_code == 503
    assert len(replicas.orders) == fleets.MAX_TRIES


def test_a_request_that_brings_replicas_down_does_not_bring_down_all(fleet: TestClient, replicas: InProcess) -> None:
    replicas.lost = lambda order, said: said == 1
    answer = fleet.post(CHAT, json=body(ASKED["drawn"]))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_lost"
    assert len(replicas.orders) == fleets.MAX_DEATHS
    replicas.orders.clear()
    replicas.lost = lambda order, said: said == 2  # after a token
    assert fleet.post(CHAT, json=body({**ASKED["drawn"], "max_tokens": 100})).status_code == 503
    assert len(replicas.orders) == fleets.MAX_ALL_DEATHS


def test_replicas_that_end_while_a_request_waits_for_a_seat_are_no_proof_against_it(
    fleet: TestClient, replicas: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(num_lost: int) -> int:
        replicas.orders.clear()
        replicas.lost = lambda order, said: order < num_lost and said == 1  # taken, without a token
        status = fleet.post(CHAT, json=body(ASKED["drawn"])).status_code
        assert len(replicas.orders) == min(num_lost + (status == 200), fleets.MAX_ALL_DEATHS)
        return status

    for replica in replicas.replicas.values():
        monkeypatch.setattr(replica._service, "num_behind", lambda num_samples: 1)
    assert asked(fleets.MAX_ALL_DEATHS - 1) == 200
    assert asked(fleets.MAX_ALL_DEATHS) == 503


def test_an_order_without_a_seat_waits(fleet: TestClient, replicas: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fleet.post(CHAT, json=body({**ASKED["drawn"], "n": 2})).status_code == 200
    replica = replicas.replicas["r0"]

    async def accepted() -> Any:
        async with aclosing(replica.run(replicas.orders[0])) as said:  # type: ignore[type-var]
            return await anext(said)

    for num_free in (0, 1):
        monkeypatch.setattr(replica._service, "_num_open", replica._service.num_seats - num_free)
        assert asyncio.run(accepted()) == Accepted("r0", waits=num_free == 0)


def test_engines_that_fail_count_as_deaths_and_full_ones_do_not(
    fleet: TestClient, replicas: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "engine_error"

    async def refuse(order: Any) -> AsyncIterator[Any]:
        yield Accepted("r")
        yield Refusal(500 if code == "engine_error" else 429, "no", None, code, {})

    for replica in replicas.replicas.values():
        monkeypatch.setattr(replica, "run", refuse)
    assert fleet.post(CHAT, json=body(LONG)).json()["error"]["code"] == "engine_error"
    assert len(replicas.orders) == fleets.MAX_DEATHS
    code = "queue_full"
    assert fleet.post(CHAT, json=body(LONG)).status_code == 429
    assert len(replicas.orders) == fleets.MAX_DEATHS + fleets.MAX_TRIES


def test_a_replica_that_refuses_is_known_by_its_name(
    fleet: TestClient, replicas: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in replicas.replicas.values():
        monkeypatch.setattr(replica, "_kind", "another")
    assert fleet.post(CHAT, json=body(LONG)).json()["error"]["code"] == "replica_changed"
    assert [len(order.avoid) for order in replicas.orders] == [0, 1, *[2] * (fleets.MAX_TRIES - 2)]
    assert set(replicas.orders[-1].avoid) == set(replicas.replicas)


def test_no_replica_is_sought_behind_the_deadline(
    fleet: TestClient, replicas: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "RETRY_S", 30.0)
    replicas.lost = lambda order, said: said == 0
    answer = fleet.post(CHAT, json=body({**LONG, "timeout": 0.2}))
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded"

    async def silent(order: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(30)
        yield Accepted("r")

    replicas.lost = lambda order, said: False
    for replica in replicas.replicas.values():
        monkeypatch.setattr(replica, "run", silent)
    assert fleet.post(CHAT, json=body({**LONG, "timeout": 0.2})).status_code == 504


@pytest.mark.parametrize("place", [0, 2])
def test_what_is_given_up_on_the_way_reaches_the_client(
    place: int, alone: TestClient, fleet: TestClient, replicas: InProcess
) -> None:
    """As when the transport cancels a call that nobody here has cancelled."""

    def gone(order: int, said: int) -> bool:
        if order == 0 and said == place:
            raise asyncio.CancelledError
        return False

    expected = whole(alone, ASKED["drawn"])
    replicas.lost = gone
    assert whole(fleet, ASKED["drawn"]) == expected and len(replicas.orders) == 2


def test_an_ingress_waits_for_its_own_deployment(replicas: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "DESCRIBE_S", 0.001)
    own = next(iter(replicas.replicas.values())).describe()
    told = iter([None, None, own])

    async def ask() -> Description | None:
        return next(told)

    assert asyncio.run(fleets.described_by(ask)) is own


def test_kinds_differ_by_weights_and_by_what_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(resolve_model("mini"), tmp_path / "model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"old")

    def kind(lora: bool = False, device: str = "cpu") -> str:
        config = EngineConfig(model=str(tmp_path / "model"), lora={"a": str(adapter)} if lora else {})
        engine = SimpleNamespace(kv_cache=SimpleNamespace(device=torch.device(device)))
        return kind_of(SimpleNamespace(config=config, engine=engine, max_model_len=512))  # type: ignore[arg-type]

    before, adapted = kind(), kind(lora=True)
    assert kind() == before and adapted not in (before, "")
    (adapter / "adapter_model.safetensors").write_bytes(b"new")
    assert kind(lora=True) != adapted
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one")
    one = kind(device="cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "other")
    assert len({before, one, kind(device="cuda")}) == 3
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "9.9")
        assert kind() != before
    weights = max((tmp_path / "model").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert kind() != before


def test_errors_of_requests_are_theirs_and_are_not_tried_again(fleet: TestClient, replicas: InProcess) -> None:
    wrong = {**ASKED["drawn"], "allowed_token_ids": [5], "logit_bias": {"5": -100}, "bad_words": ["the"]}
    answer = fleet.post(CHAT, json=body({**wrong, "timeout": 0.0001}))
    assert answer.status_code == 504 and len(replicas.orders) <= 1
    assert fleet.post(CHAT, json=body({"top_p": 3})).status_code == 400


def test_an_answer_does_not_go_on_under_another_model(fleet: TestClient, replicas: InProcess) -> None:
    """As when a deployment is changed while its old replicas drain."""
    ours = list(replicas.replicas.values())
    before = ours[0]._kind
    try:
        for replica in ours:
            replica._kind = "another"
        answer = fleet.post(CHAT, json=body(ASKED["drawn"]))
    finally:
        for replica in ours:
            replica._kind = before
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_changed"


def test_too_many_requests_are_refused_before_they_begin(replicas: InProcess) -> None:
    with fleet_client(replicas, max_queue=0) as client:
        seats = mini.plain().config.max_num_seqs
        for num_samples in (seats + 1, len(replicas.replicas) * seats + 1):  # for one of them, for all
            answer = client.post(CHAT, json=body({**LONG, "n": num_samples}))
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
        service: Any = client.app.state.service  # type: ignore[attr-defined]
        service._num_open = len(replicas.replicas) * seats - 1
        answer = client.post(CHAT, json=body({**LONG, "n": 2}))
        assert answer.status_code == 429 and answer.headers["Retry-After"]
        assert not replicas.orders
    empty = InProcess(*replicas.replicas.values())
    with fleet_client(empty) as client:
        empty.replicas.clear()
        answer = client.post(CHAT, json=body(LONG))
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert client.get("/health").status_code == 503


def test_a_step_that_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, goes_on = mini.drafting("none"), Event()
    step = llm.step
    monkeypatch.setattr(llm, "step", lambda: goes_on.wait(60) and step())
    replica = Replica("r", llm, settings())
    try:
        with fleet_client(InProcess(replica)) as client, ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.post, CHAT, json=body(ASKED["greedy"]))
            replica.check(60.0)
            assert wait_until(lambda: replica._service.step_s > 0.02)
            with pytest.raises(RuntimeError, match="has not ended"):
                replica.check(0.01)
            goes_on.set()
            assert answer.result().status_code == 200
            replica.check(0.01)
    finally:
        goes_on.set()
        replica.stop()
    with pytest.raises(RuntimeError, match="stopped working"):
        replica.check(60.0)


def test_a_client_that_leaves_ends_its_request(replicas: InProcess) -> None:
    described = next(iter(replicas.replicas.values())).describe()
    fleet, frontend = Fleet(replicas, described, settings()), RemoteFrontend(described)

    async def leave() -> None:
        stream = fleet.submit(frontend.prepare("Once", SamplingParams(max_tokens=400, ignore_eos=True)))
        await anext(stream.deltas())
        assert fleet.load().num_running == 1
        fleet.abort(stream)
        with suppress(asyncio.CancelledError):
            await stream.task

    asyncio.run(leave())
    assert wait_until(lambda: fleet.load().num_running == 0, 10)
    fleet.check_room(2 * described.config.max_num_seqs + 2 * settings().max_queue)  # nothing counts as open


def test_metrics_name_the_replica(fleet: TestClient, replicas: InProcess) -> None:
    assert fleet.post(CHAT, json=body(LONG)).status_code == 200
    text = fleet.get("/metrics").text
    assert "forerun_moved_requests_total" in text
    for name in replicas.replicas:
        assert f'forerun_replica_requests_running{{replica="{name}"}} 0.0' in text
    assert 'forerun_replica_samples_finished_total{reason="length",replica="r' in text


def test_a_verification_that_depends_on_drafts_is_refused(replicas: InProcess) -> None:
    from dataclasses import replace

    described = next(iter(replicas.replicas.values())).describe()
    other = replace(described, config=EngineConfig(model="mini", verification="rejection"))
    with pytest.raises(ConfigError, match="coupled"):
        Fleet(replicas, other, None)  # type: ignore[arg-type]
