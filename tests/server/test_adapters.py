"""LoRA adapters behind the server: a request names one as its model; they are listed, loaded and unloaded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.server.app import create_app
from forerun.server.playground import STREAM_PATH
from forerun.weights.resolve import resolve_model
from tests.models import factory
from tests.server.conftest import client_of, events_of, settings
from tests.support.adapters import write_adapter

PROMPT = [5, 6, 7, 8, 5, 6, 7]
MODULES = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    factory.make_checkpoint("llama", folder / "base")
    (folder / "base" / "chat_template.jinja").write_text("{{ messages[0].content }}", "utf-8")
    for seed in (1, 2):
        write_adapter(folder / f"a{seed}", folder / "base", MODULES, seed)
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> LLM:
    return LLM(str(folder / "base"), lora={"one": str(folder / "a1")}, threads=1)


@pytest.fixture(scope="module")
def client(own: LLM) -> Iterator[TestClient]:
    with client_of(own, allow_lora_loading=True) as client:
        yield client


def complete(client: TestClient, model: str, status: int = 200) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "seed": 1, "ignore_eos": True, "temperature": 1.0}
    body["return_token_ids"] = True
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def tokens(own: LLM, lora: str | None) -> list[int]:
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=1, ignore_eos=True)
    return list(own.generate([PROMPT], params, lora=lora)[0].outputs[0].token_ids)


def test_a_request_names_an_adapter_as_its_model(own: LLM, folder: Path, client: TestClient) -> None:
    apart = LLM(str(folder / "base"), lora={"one": str(folder / "a1")}, threads=1)
    plain, adapted = complete(client, "mini"), complete(client, "one")
    assert (plain["model"], adapted["model"]) == ("mini", "one")
    assert plain["choices"][0]["token_ids"] == tokens(apart, None)
    assert adapted["choices"][0]["token_ids"] == tokens(apart, "one") != tokens(apart, None)


def test_the_playground_names_the_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", resolve_model("mini"), MODULES, 1)
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with client_of(LLM("mini", lora={"one": str(tmp_path / "a")}, threads=1)) as client:
        for model in ("mini", "one"):
            answer = client.post(STREAM_PATH, json={**asked, "model": model})
            assert answer.status_code == 200, answer.text
            assert json.loads(events_of(answer.text)[0])["start"]["model"] == model


def test_adapters_are_listed(own: LLM, folder: Path, client: TestClient) -> None:
    listed = {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}
    assert listed["one"]["parent"] == "mini" and listed["one"]["root"] == str(folder / "a1")
    assert listed["mini"]["parent"] is None
    assert client.get("/v1/models/one").json() == listed["one"]


def test_adapters_are_loaded_and_unloaded(folder: Path, client: TestClient) -> None:
    complete(client, "two", status=404)
    given = {"lora_name": "two", "lora_path": str(folder / "a2")}
    assert client.post("/v1/load_lora_adapter", json=given).json()["id"] == "two"
    first = complete(client, "two")["choices"][0]["token_ids"]
    for name in ("two", "mini"):
        again = client.post("/v1/load_lora_adapter", json={**given, "lora_name": name})
        assert again.status_code == 400 and "name" in again.json()["error"]["message"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200
    again = client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert again.status_code == 404 and "'two' here; loaded are one" in again.json()["error"]["message"]
    complete(client, "two", status=404)
    given["lora_path"] = str(folder / "a1")
    assert client.post("/v1/load_lora_adapter", json=given).status_code == 200
    assert complete(client, "two")["choices"][0]["token_ids"] == complete(client, "one")["choices"][0]["token_ids"]
    assert complete(client, "two")["choices"][0]["token_ids"] != first
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200


def test_an_adapter_is_replaced_in_place(folder: Path, client: TestClient) -> None:
    given = {"lora_name": "two", "lora_path": str(folder / "a2"), "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=given).status_code == 200
    first = complete(client, "two")["choices"][0]["token_ids"]
    given["lora_path"] = str(folder / "a1")
    assert client.post("/v1/load_lora_adapter", json=given).status_code == 200
    assert complete(client, "two")["choices"][0]["token_ids"] != first
    assert client.post("/v1/load_lora_adapter", json={**given, "lora_name": "mini"}).status_code == 400
    gone = {"lora_name": "two", "lora_int_id": 2}
    assert client.post("/v1/unload_lora_adapter", json=gone).status_code == 200


def test_an_adapter_that_goes_before_its_request_begins_is_an_unknown_model(
    own: LLM, folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.load_adapter("short", str(folder / "a2"))
    prepare = own.prepare

    def late(*given: Any, **options: Any) -> Any:
        own.unload_adapter("short")
        return prepare(*given, **options)

    monkeypatch.setattr(own, "prepare", late)
    assert complete(client, "short", status=404)["error"]["code"] == "model_not_found"


def test_a_folder_that_is_no_adapter_is_refused(folder: Path, client: TestClient) -> None:
    for path, status in ((str(folder / "nowhere"), 404), (str(folder / "base"), 400), ("", 400)):
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "three", "lora_path": path})
        assert answer.status_code == status, answer.text
    assert complete(client, "mini")["choices"]


def test_a_panic_while_loading_is_the_loading_requests_alone(own: LLM, client: TestClient) -> None:
    class Panic(BaseException):
        """What libraries raise that is no Exception."""

    def work() -> None:
        raise Panic("broken")

    service: Any = client.app.state.service  # type: ignore[attr-defined]
    num_errors = service.metrics.errors._value.get()
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(asyncio.wait_for(service.between_steps(work), 10))
    assert service.metrics.errors._value.get() == num_errors, "a step counts as failed"
    assert complete(client, "mini")["choices"]


def test_loading_by_requests_has_to_be_allowed(own: LLM, folder: Path) -> None:
    with client_of(own) as client:
        named, path = {"lora_name": "two"}, {"lora_path": str(folder / "a2")}
        assert client.post("/v1/load_lora_adapter", json=named | path).status_code == 403
        assert client.post("/v1/unload_lora_adapter", json=named).status_code == 403


def test_an_adapter_may_not_have_the_models_name(own: LLM) -> None:
    with pytest.raises(ConfigError, match="another name"):
        create_app(own, settings(served_names=("one",)))
