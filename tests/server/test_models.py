"""What the server says of itself: its models one by one, its version, its tokenizer, and how paths with names count."""

from __future__ import annotations

from fastapi.testclient import TestClient

from forerun import LLM, __version__
from tests.server.conftest import client_of


def test_a_model_by_one_of_its_names(client: TestClient) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [client.get(f"/v1/models/{entry['id']}").json() for entry in listed] == listed
    missing = client.get("/v1/models/nobody")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_names_with_slashes_are_one_path_of_the_metrics(llm: LLM) -> None:
    with client_of(llm, served_names=("org/name",)) as client:
        assert client.get("/v1/models/org/name").json()["id"] == "org/name"
        assert client.get("/v1/models/org%2Fname").json()["id"] == "org/name"
        assert client.get("/v1/models/").status_code == 404
        text = client.get("/metrics").text
    assert 'forerun_http_requests_total{path="/v1/models/{model_id}",status="200"} 2.0' in text


def test_version_and_tokenizer(llm: LLM, client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}
    info = client.get("/tokenizer_info").json()
    assert info["chat_template"] == llm.tokenizer.chat_template
    assert llm.tokenizer.token_id(info["eos_token"]) in llm.tokenizer.eos_token_ids
    assert {"bos_token", "unk_token", "pad_token"} <= set(info)
