"""Whatever is wrong with a request: an error of OpenAI's shape that names it, and the server lives on."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM
from tests.server.conftest import Post, client_of

JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


def check(answer: Any, status: int, *, param: str | None = None, says: str = "") -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and says in error["message"], error
    assert param is None or error["param"] == param, error


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"prompt": ', b"[1]", b"null", b'"text"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
     b'{"prompt": "a", "temperature": NaN}', b'{"prompt": ' + b"[" * 50_000, b'{"prompt": 1' + b"0" * 5000 + b"}",
     b"\xff\xfe{\x00}\x00"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bodies_that_are_not_json(client: TestClient, path: str, raw: bytes) -> None:
    check(client.post(path, content=raw, headers=JSON), 400)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, None),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"bad_words": ["x", "x" * 1025]}, "bad_words"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, None),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, None),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 4}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"extra_body": {"top_k": 5}}, "extra_body"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"detokenize": False, "stop": "a"}, "detokenize"),
        ({"speculation": "sometimes"}, "speculation"),
        ({"speculation": {"drafter": "eagle"}}, "speculation"),
        ({"speculation": {"max_nodes": 0}}, "speculation"),
        ({"speculation": {"nodes": 3}}, "speculation.nodes"),
        ({"timeout": 0}, "timeout"),
        ({"priority": 10**9}, "priority"),
        ({"ignore_eos": True, "guided_choice": ["a"]}, None),
    ],
)
def test_fields_that_are_wrong_on_both_endpoints(client: TestClient, fields: dict[str, Any], param: str | None) -> None:
    check(client.post("/v1/completions", json={"prompt": "a", **fields}), 400, param=param)
    check(client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}), 400, param=param)


def test_of_several_forms_the_one_that_was_meant_is_named(client: TestClient) -> None:
    for fields, said in (
        ({"speculation": {"max_nodes": 0}}, "speculation.max_nodes: Input should be greater than or equal to 1; got 0"),
        ({"speculation": "on"}, "speculation: Input should be 'auto' or 'off'; got 'on'"),
        ({"stop": ["a", 5]}, "stop.1: Input should be a valid string; got 5"),
    ):
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert answer.json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, None),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages.0.colour"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "x"}]}]}, "messages"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [{"name": "f"}], "tools": [{"type": "function", "function": {"name": "g"}}]}, "functions"),
        ({"verbosity": "low"}, "verbosity"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"echo": True}, "echo"),
        ({"chat_template": "hi"}, "chat_template"),
        ({"continue_final_message": True}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True, "messages": [
            {"role": "assistant", "content": "a"}]}, "add_generation_prompt"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}],
          "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)  # fmt: skip
def test_chat_fields_that_are_wrong(client: TestClient, fields: dict[str, Any], param: str | None) -> None:
    check(client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}), 400, param=param)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": []}, {"prompt": [[]]}, {"prompt": ""}, {"prompt": [-1]}, {"prompt": [10**9]}, {"prompt": [1.5]},
     {"prompt": ["a", 1]}, {"prompt": ["a"] * 65}, {"prompt": None}, {}, {"prompt": "a", "logprobs": 99},
     {"prompt": "a", "suffix": "b"}, {"prompt": [300], "add_special_tokens": True},
     {"prompt": "a", "suffix": "b", "echo": True}, {"prompt": "a", "echo": True, "stream": True, "logprobs": 1}],
)  # fmt: skip
def test_completion_fields_that_are_wrong(client: TestClient, fields: dict[str, Any]) -> None:
    check(client.post("/v1/completions", json=fields), 400)


def test_a_prompt_beyond_the_context(llm: LLM, client: TestClient, complete: Post) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a " * 2000})
    check(answer, 400, says=str(llm.max_model_len))
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    [choice] = complete([5] * (llm.max_model_len - 1), max_tokens=8)["choices"]
    assert choice["finish_reason"] == "length"  # the longest prompt leaves room for one token


def test_unknown_models_and_paths(client: TestClient) -> None:
    check(client.post("/v1/completions", json={"prompt": "a", "model": "gpt-9"}), 404, param="model", says="gpt-9")
    check(client.get("/v1/nothing"), 404)
    check(client.post("/chat/completions", json={}), 404, says="asks for /v1/chat/completions")
    check(client.get("/v1/completions"), 405)


def test_parameters_that_leave_no_token_end_with_400(client: TestClient) -> None:
    body = {"prompt": "a", "allowed_token_ids": [300], "min_tokens": 3, "stop_token_ids": [300]}
    answer = client.post("/v1/completions", json=body)
    check(answer, 400)
    assert answer.json()["error"]["code"] == "no_token_possible"
    streamed = client.post("/v1/completions", json={**body, "stream": True})
    assert streamed.status_code == 200 and '"no_token_possible"' in streamed.text


def test_limits_keys_and_the_error_of_a_huge_body(llm: LLM) -> None:
    limits = {"api_keys": ("one", "two"), "max_body_bytes": 1000, "max_prompt_tokens": 10}
    with client_of(llm, **limits) as client:
        assert client.get("/health").status_code == 200  # for load balancers, without a key
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                check(client.get(path, headers=headers), 401)
        key = {"Authorization": "Bearer two"}
        assert client.get("/v1/models", headers=key).status_code == 200
        check(client.post("/v1/completions", json={"prompt": "a" * 2000}, headers=key), 413)
        check(client.post("/v1/completions", content=iter([b"a" * 600] * 3), headers={**key, **JSON}), 413)
        check(client.post("/v1/completions", json={"prompt": "a b c d e f g h i j k l"}, headers=key), 400, says="10")
        assert client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 1}, headers=key).status_code == 200


def test_every_answer_carries_its_request_id(client: TestClient) -> None:
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = client.get("/health", headers={"X-Request-Id": "no good\t"}).headers["x-request-id"]
    assert len(made) == 32
