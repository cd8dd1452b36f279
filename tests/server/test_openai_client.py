"""The official openai client against a real port: what people's applications do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal
from urllib.parse import urlparse
from uuid import UUID

import pytest

openai = pytest.importorskip("openai", reason="the openai client is not installed")

from fastapi import FastAPI  # noqa: E402
from pydantic import (  # noqa: E402
    BaseModel,
    Field,
    HttpUrl,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
    create_model,
)

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


HARMONY = (
    "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
    '<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"name": "fox"}'
)
GEMMA = '<|channel>thought\nThey ask.<channel|>I look.<|tool_call>call:find{name:<|"|>fox<|"|>}<tool_call|>'
GLM = (
    "<think>They ask.</think>I look.<tool_call>find\n<arg_key>name</arg_key>\n<arg_value>fox</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("tools", "reasoning", "text"), [("openai", "auto", HARMONY), ("gemma4", "gemma4", GEMMA), ("glm47", "glm45", GLM)]
)
def test_a_familys_own_format(llm: LLM, monkeypatch: pytest.MonkeyPatch, tools: str, reasoning: str, text: str) -> None:
    """The embedded model writes none of them; its text is replaced."""
    from forerun.engine.stopping import OutputText

    ends = list(llm.tokenizer.eos_token_ids)
    monkeypatch.setattr(OutputText, "visible", lambda self: text if self.request.finish_reason else text[:40])
    find: Any = {"type": "function", "function": {"name": "find", "parameters": {}}}
    asked: Any = {"model": "mini", "messages": MESSAGES, "tools": [find], "extra_body": {"allowed_token_ids": ends}}
    with running(create_app(llm, settings(tool_parser=tools, reasoning_parser=reasoning))) as at:
        api = openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0, timeout=120)
        [whole] = api.chat.completions.create(**asked).choices
        deltas = [chunk.choices[0].delta for chunk in api.chat.completions.create(**asked, stream=True)]
    assert (whole.message.content, whole.message.reasoning_content) == ("I look.", "They ask.")
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    assert call.function.name == "find" and json.loads(call.function.arguments) == {"name": "fox"}
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "They ask."
    pieces = [piece.function.arguments or "" for delta in deltas for piece in delta.tool_calls or ()]
    assert "".join(pieces) == call.function.arguments


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    age: Annotated[int, Field(multiple_of=5, gt=0, lt=100)]


class Colour(Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


def price(**limits: int) -> Any:
    """Decimal as pydantic described it until 2.13: with a pattern that looks ahead."""
    pattern = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "maxLength": 8}
    return Annotated[Decimal, Field(**limits), WithJsonSchema({"anyOf": [{"type": "integer"}, pattern]})]  # type: ignore[arg-type]


TYPES: dict[str, Any] = {  # what pydantic writes a format, a length, a pattern, a union for
    "HttpUrl": HttpUrl,
    "union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "set": set[Colour],
    "set of literals": Annotated[set[Literal["a", "b", 3]], Field(min_length=1, max_length=2)],
    "multiple_of": Annotated[int, Field(multiple_of=25, ge=0, le=1000)],
    "multiple_of float": Annotated[float, Field(multiple_of=0.25, ge=0, le=9)],
    "Decimal": price(),
    "pattern": Annotated[str, StringConstraints(pattern=r"^[a-z]+(-[a-z]+)*$", max_length=12)],
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
    "UUID": UUID,
    "IPv4Address": IPv4Address,
    "SecretStr": Annotated[SecretStr, Field(max_length=9)],
}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_pydantic(api: Any, llm: LLM, name: str) -> None:
    """Through the client's own `parse`, which makes the schema strict and reads the answer into the type."""
    pytest.importorskip("xgrammar")
    answer_type = create_model("Answer", value=(TYPES[name], ...))
    ends = {str(llm.tokenizer.encode(text, add_special_tokens=False)[0]): 7.0 for text in ('"', '"}')}  # of a long URL
    asked = {"model": "mini", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 400, "logit_bias": ends}
    for seed in range(3):
        parsed = api.chat.completions.parse(**asked, response_format=answer_type, seed=seed)
        assert parsed.choices[0].finish_reason == "stop"
        print(name, parsed.choices[0].message.content, "->", repr(parsed.choices[0].message.parsed.value))
        assert isinstance(parsed.choices[0].message.parsed, answer_type)


def test_a_type_that_cannot_be_enforced_is_refused_by_name(api: Any) -> None:
    pytest.importorskip("xgrammar")
    answer_type = create_model("Answer", value=(set[str], ...))
    with pytest.raises(
        openai.BadRequestError, match="in properties.value: 'uniqueItems' can be enforced where"
    ) as error:
        api.chat.completions.parse(model="mini", messages=MESSAGES, response_format=answer_type)
    assert error.value.param == "response_format" and error.value.code == "invalid_grammar"


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
