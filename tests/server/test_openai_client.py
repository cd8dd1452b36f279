"""The official openai client against a real port: what people's applications do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import pytest

openai = pytest.importorskip("openai", reason="the openai client is not installed")

from fastapi import FastAPI  # noqa: E402

from forerun import LLM  # noqa: E402
from forerun.server.app import create_app  # noqa: E402
from tests.server.conftest import running, settings, wait_until  # noqa: E402

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about a fox"}]


@pytest.fixture(scope="module")
def served(llm: LLM) -> FastAPI:
    return create_app(llm, settings(api_keys=("secret",)))


@pytest.fixture(scope="module")
def address(served: FastAPI) -> Iterator[str]:
    with running(served) as address:
        yield address


@pytest.fixture(scope="module")
def api(address: str) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=120)


def test_chat_streaming_and_models(api: Any) -> None:
    asked = {"model": "mini", "messages": MESSAGES, "max_tokens": 16, "seed": 7, "temperature": 0.8}
    whole = api.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens <= 16
    assert whole.forerun["num_steps"] > 0
    chunks = list(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert [model.id for model in api.models.list()] == ["mini", "other-name"]
    assert api.models.retrieve("other-name").id == "other-name"
    with pytest.raises(openai.NotFoundError, match="org/nothing"):
        api.models.retrieve("org/nothing")


def test_completions_logprobs_samples_and_extra_fields(api: Any) -> None:
    answer = api.completions.create(
        model="mini", prompt=["Once upon", "The cat"], n=2, max_tokens=6, logprobs=2, seed=3, stop=["\n"],
        extra_body={"top_k": 20, "min_p": 0.01, "speculation": "off"},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) for c in answer.choices)


def test_fields_of_the_client_and_of_vllm(api: Any) -> None:
    """What the client has names for, notes included, and what its users send beside that."""
    pytest.importorskip("xgrammar")
    parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    said = api.chat.completions.create(
        model="mini", messages=MESSAGES, seed=2, functions=[{"name": "count", "parameters": parameters}],
        function_call={"name": "count"}, metadata={"run": "7"}, store=True, service_tier="flex",
        prompt_cache_key="k", safety_identifier="s", user="u",
    ).choices[0]  # fmt: skip
    assert said.finish_reason == "function_call" and said.message.function_call.name == "count"
    assert json.loads(said.message.function_call.arguments)["n"] in (1, 2)
    begun = [*MESSAGES, {"role": "assistant", "content": "The fox"}]
    whole = api.chat.completions.create(
        model="mini", messages=begun, seed=2, max_tokens=6,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "prompt_logprobs": 0},
    )  # fmt: skip
    assert len(whole.prompt_logprobs) == whole.usage.prompt_tokens
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = api.chat.completions.create(
        model="mini", messages=MESSAGES, max_tokens=6, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 6


def test_errors_have_their_classes(api: Any, address: str) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        api.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="mini", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()


def test_tools_and_json_schema(api: Any) -> None:
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    tools: list[Any] = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    choice: Any = {"type": "function", "function": {"name": "count"}}
    asked = {"model": "mini", "messages": MESSAGES, "seed": 1, "tools": tools, "tool_choice": choice}
    message = api.chat.completions.create(**asked).choices[0].message
    assert message.content is None and 0 <= json.loads(message.tool_calls[0].function.arguments)["n"] <= 99
    streamed = list(api.chat.completions.create(**asked, stream=True))
    calls = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or ()]
    pieces = "".join(call.function.arguments or "" for call in calls)
    assert pieces == message.tool_calls[0].function.arguments
    assert streamed[-1].choices[0].finish_reason == "tool_calls"
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = api.chat.completions.create(model="mini", messages=MESSAGES, response_format=form)
    assert 0 <= json.loads(answer.choices[0].message.content)["n"] <= 99


def test_a_client_that_hangs_up_frees_its_blocks(api: Any, llm: LLM) -> None:
    asked = {"model": "mini", "prompt": "Once", "max_tokens": 480, "extra_body": {"ignore_eos": True}}
    stream = api.completions.create(**asked, stream=True)
    next(iter(stream))
    assert llm.engine.scheduler.pool.num_used > 0
    stream.response.close()
    assert wait_until(lambda: llm.engine.scheduler.pool.num_used == 0, 20)
    with pytest.raises(openai.APITimeoutError):
        api.with_options(timeout=0.3).completions.create(**asked)  # not streamed: the server waits for it alone
    assert wait_until(lambda: llm.engine.scheduler.pool.num_used == 0, 20)
    llm.engine.scheduler.check_integrity()


def test_garbage_and_half_requests_leave_the_server_alive(api: Any, address: str) -> None:
    where = (urlparse(address).hostname, urlparse(address).port)
    opened = [socket.create_connection(where) for _ in range(50)]
    for raw, connection in zip(
        [b"GARBAGE\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"] * 25, opened, strict=True
    ):
        connection.sendall(raw)
    assert api.models.list().data
    for connection in opened:
        connection.close()
    assert api.completions.create(model="mini", prompt="a", max_tokens=1).choices
