"""/v1/messages: the same answers as chat completions, told in Anthropic's words."""

from __future__ import annotations

import json
import re
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")

import httpx  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from forerun.server.errors import ApiError  # noqa: E402
from forerun.server.messages import _chat_body  # noqa: E402
from forerun.server.messages_input import chat_body  # noqa: E402
from forerun.server.messages_schema import CountTokensBody, MessageTurn, Thinking  # noqa: E402
from forerun.server.schema import MAX_MESSAGES, ChatBody, Message  # noqa: E402
from tests.server.conftest import Post  # noqa: E402

ASKED: dict[str, Any] = {"seed": 7, "temperature": 0.8}
HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def stream_of(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed request, whose names must be their types."""
    answer = client.post("/v1/messages", json={"stream": True, "max_tokens": 100, **fields})
    assert answer.status_code == 200, answer.text
    named = re.findall(r"event: (\S+)\ndata: (.*)\n\n", answer.text)
    events = [json.loads(data) for _, data in named]
    assert [name for name, _ in named] == [event["type"] for event in events]
    return events


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def num_input(usage: dict[str, Any]) -> int:
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


CONVERSATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> chat's fields, ours
    "text": ({"messages": HELLO}, {"messages": HELLO}),
    "turns": (
        {"messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
            {"role": "assistant", "content": "Good day.", "reasoning_content": "A greeting."},
            {"role": "user", "content": "Tell me about a cat"}]},
        {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "A greeting.", "signature": ""},
                {"type": "text", "text": "Good "}, {"type": "text", "text": "day.", "citations": None}]},
            {"role": "user", "content": "Tell me about a cat"}]},
    ),
    "calls": (
        {"tools": [CHAT_TOOL], "messages": [
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": "I will.", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "tool", "tool_call_id": "c2", "content": "Error: two"},
            {"role": "user", "content": "Again"}]},
        {"tools": [{**TOOL, "type": "custom"}], "messages": [
            {"role": "user", "content": "Add"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I will."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {"a": 2}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "two", "is_error": True},
                {"type": "text", "text": "Again"}]}]},
    ),
}  # fmt: skip


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as dictionaries, a single part as its text."""
    made = [message.model_dump(exclude_none=True) for message in messages]
    for message in made:
        if isinstance(message.get("content"), list) and len(message["content"]) == 1:
            message["content"] = message["content"][0]["text"]
    return made


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_conversation_whatever_the_template(name: str) -> None:
    chat, ours = CONVERSATIONS[name]
    made, expected = chat_body(CountTokensBody(**ours), "", False), ChatBody(**chat)
    assert plain(made.messages) == plain(expected.messages) and made.tools == expected.tools


def test_what_differs_in_every_request_of_claude_code_is_no_part_of_the_prompt() -> None:
    """Its first block would be the first line of the prompt, behind which no prefix is known."""
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.36; cch=97bd6;"}
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    whole = CountTokensBody(**asked, system=[billing, {"type": "text", "text": "Be brief."}])
    assert plain(chat_body(whole, "", False).messages)[0] == {"role": "system", "content": "Be brief."}
    alone = chat_body(CountTokensBody(**asked, system=[billing]), "", False)
    assert [message.role for message in alone.messages] == ["user"]


@pytest.mark.parametrize(
    ("asked", "template", "made"),
    [
        ({"type": "disabled"}, "{{ enable_thinking }}", {"enable_thinking": False}),
        ({"type": "adaptive"}, "{{ enable_thinking }}", {"enable_thinking": True}),
        ({"type": "enabled"}, "<think>", {}),
        ({"type": "adaptive", "display": "omitted"}, "<think>", {"include_reasoning": False}),
    ],
)
def test_thinking_is_told_to_the_template(asked: dict[str, Any], template: str, made: dict[str, Any]) -> None:
    body = CountTokensBody(messages=[MessageTurn(role="user", content="Hi")], thinking=Thinking(**asked))
    fields = chat_body(body, template, thinks=True).model_dump(exclude_unset=True, exclude={"messages"})
    assert fields == made
    silent = body.model_copy(update={"thinking": Thinking(type="disabled")})
    assert not chat_body(silent, "", thinks=False).enable_thinking  # a model that never thinks need not be told
    with pytest.raises(ApiError, match="cannot switch"):
        chat_body(silent, "<think>", thinks=True)


@pytest.mark.parametrize(
    ("tools", "choice", "made"), [([], None, False), ([TOOL], None, None), ([TOOL], {"type": "none"}, False)]
)
def test_thinking_is_told_to_the_template_that_is_used(tools: Any, choice: Any, made: bool | None) -> None:
    templates = {"chat_template": "{{ enable_thinking }}", "tool_template": "{{ tools }}"}
    context: Any = SimpleNamespace(tokenizer=SimpleNamespace(**templates), thinks=False)
    off: Any = {"messages": HELLO, "tools": tools, "tool_choice": choice, "thinking": {"type": "disabled"}}
    assert _chat_body(context, CountTokensBody(**off)).enable_thinking is made


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_same_text_as_chat_completions(client: TestClient, post: Post, name: str) -> None:
    chat, ours = CONVERSATIONS[name]
    expected = post("/v1/chat/completions", **chat, **ASKED, max_tokens=16)
    message = post("/v1/messages", **ours, **ASKED, max_tokens=16)
    assert text_of(message) == expected["choices"][0]["message"]["content"] != ""
    assert message["content"] == [{"type": "text", "text": text_of(message)}]  # nothing null
    assert num_input(message["usage"]) == expected["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    assert message["forerun"]["seeds"] == [7] and message["forerun"].keys() == expected["forerun"].keys()
    counted = post("/v1/messages/count_tokens", **ours)
    assert counted == {"input_tokens": expected["usage"]["prompt_tokens"]}
    events = stream_of(client, **ours, **ASKED, max_tokens=16)
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == text_of(message)
    end = events[-2]
    assert end["delta"]["stop_reason"] == message["stop_reason"] and end["forerun"]["seeds"] == [7]
    assert num_input(end["usage"]) == events[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"]


def test_all_events_in_their_order(thinking: httpx.Client) -> None:
    text = f"<think>hm so</think>I will. {CALL}{CALL}"
    asked = {**ASKED, "max_tokens": 300, "messages": HELLO, "tools": [TOOL], "guided_choice": [text]}
    events = stream_of(thinking, **asked)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [kind for kind, _ in groupby(event["type"] for event in events)]
    assert kinds == ["message_start", *block * 4, "message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm so"
    assert "".join(delta.get("text", "") for delta in deltas) == "I will. "
    for index in (2, 3):
        found = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
        assert json.loads("".join(delta["partial_json"] for delta in found)) == {"a": 1}
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert 0 < end["usage"]["output_tokens_details"]["thinking_tokens"] < end["usage"]["output_tokens"]
    message = thinking.post("/v1/messages", json=asked).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][2]["input"] == {"a": 1} and message["stop_reason"] == "tool_use"
    assert message["content"][2]["id"] != message["content"][3]["id"]
    hidden = {**asked, "thinking": {"type": "adaptive", "display": "omitted"}}
    blocks = thinking.post("/v1/messages", json=hidden).json()["content"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    single = {**asked, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    blocks = thinking.post("/v1/messages", json=single).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]


def test_text_behind_a_call_is_a_block_of_its_own(thinking: httpx.Client) -> None:
    asked = {**ASKED, "max_tokens": 300, "messages": HELLO, "tools": [TOOL], "guided_choice": [f"{CALL}Done."]}
    for speculation in ("auto", "off"):
        call, text = thinking.post("/v1/messages", json={**asked, "speculation": speculation}).json()["content"]
        assert call["type"] == "tool_use" and call["input"] == {"a": 1}, speculation
        assert text == {"type": "text", "text": "Done."}, speculation


def test_a_conversation_of_too_many_messages_is_refused(post: Post) -> None:
    asked = {"messages": HELLO * MAX_MESSAGES, "system": "Be kind."}
    for path, fields in (("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
        error = post(path, 400, **asked, **fields)["error"]
        assert error["type"] == "invalid_request_error" and f"the most is {MAX_MESSAGES}" in error["message"]


def test_names_of_tools_are_as_long_as_the_api_allows(post: Post) -> None:
    asked = {"messages": HELLO, "max_tokens": 1}
    assert post("/v1/messages", **asked, tools=[{**TOOL, "name": "f" * 128}])["usage"]["output_tokens"] == 1
    error = post("/v1/messages", 400, **asked, tools=[{**TOOL, "name": "f" * 129}])["error"]
    assert error["message"].startswith("tools.0")


def test_the_last_message_of_the_model_is_continued(post: Post) -> None:
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I have"}]}]
    chat = {"messages": [*HELLO, {"role": "assistant", "content": "I have"}], "continue_final_message": True}
    expected = post("/v1/chat/completions", **chat, **ASKED, max_tokens=8)
    message = post("/v1/messages", messages=begun, **ASKED, max_tokens=8)
    assert text_of(message) == expected["choices"][0]["message"]["content"]
    assert num_input(message["usage"]) == expected["usage"]["prompt_tokens"]


def test_how_an_answer_ends(post: Post) -> None:
    asked = {"messages": HELLO, "seed": 7}
    cut = post("/v1/messages", **asked, max_tokens=2, ignore_eos=True)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    whole = text_of(post("/v1/messages", **asked, max_tokens=40))
    stopped = post("/v1/messages", **asked, max_tokens=40, stop_sequences=[whole[3:6]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", whole[3:6])
    assert text_of(stopped) == whole[: whole.index(whole[3:6])]


def test_a_call_cut_off_stays_readable(thinking: httpx.Client) -> None:
    forced = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}
    message = thinking.post("/v1/messages", json={"messages": HELLO, "max_tokens": 1, **forced}).json()
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"].keys() == {"INVALID_JSON"}


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'], ids=["nan", "inf", "half"])
def test_arguments_no_answer_can_hold_stay_readable(thinking: httpx.Client, value: str) -> None:
    arguments = f'{{"a": {value}}}'
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    asked = {"messages": HELLO, "max_tokens": 900, "tools": [TOOL], "guided_choice": [call]}
    answer = thinking.post("/v1/messages", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_errors_in_a_stream_and_before_it(client: TestClient, post: Post) -> None:
    slow = {"messages": HELLO, "max_tokens": 480, "ignore_eos": True, "timeout": 0.05}
    last = stream_of(client, **slow)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
    assert post("/v1/messages", 504, **slow)["error"]["type"] == "timeout_error"
    assert post("/v1/messages", 404, messages=HELLO, max_tokens=3, model="x")["error"]["type"] == "not_found_error"
    assert client.post("/v1/messages/batches", json={}).json()["type"] == "error"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # what -> fields, the word in the message
    "image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    "document": ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
    "hosted tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget_tokens"),
    "thinking": ({"thinking": {"type": "enabled"}}, "thinking"),
    "effort": ({"output_config": {"effort": "low"}}, "output_config.effort"),
    "container": ({"container": "c"}, "container"),
    "servers": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    "editing": ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    "unknown": ({"temprature": 1}, "temprature"),
    "choice without tools": ({"tool_choice": {"type": "any"}}, "tools"),
    "choice without name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name"),
    "no limit": ({"max_tokens": None}, "max_tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_by_name(post: Post, what: str) -> None:
    fields, word = REFUSED[what]
    answer = post("/v1/messages", 400, **{"messages": HELLO, "max_tokens": 4, **fields})
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert word in answer["error"]["message"]


def test_fields_without_effect_on_the_text_are_accepted(post: Post) -> None:
    asked = {"messages": HELLO, "max_tokens": 6, "seed": 1}
    harmless: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "standard_only", "cache_control": {"type": "ephemeral"},
        "thinking": {"type": "disabled"}, "speed": "standard", "mcp_servers": [], "tool_choice": {"type": "auto"},
    }  # fmt: skip
    plain = text_of(post("/v1/messages", **asked))
    assert text_of(post("/v1/messages", **asked, **harmless)) == plain
    claude_code = {
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    assert text_of(post("/v1/messages", **asked, **claude_code)) == plain


# -- the official client ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api(address: str) -> Any:
    return anthropic.Anthropic(base_url=address, api_key="secret", max_retries=0, timeout=120)


class Digit(BaseModel):
    """Yes or no."""

    digit: bool


def test_the_client_creates_streams_and_counts(api: Any) -> None:
    asked: dict[str, Any] = {"model": "mini", "max_tokens": 12, "system": "Be kind.", "messages": HELLO}
    whole = api.messages.create(**asked, extra_body={"seed": 7})
    assert whole.content[0].text and whole.usage.output_tokens <= 12
    with api.messages.stream(**asked, extra_body={"seed": 7}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == whole.stop_reason
    counted = api.messages.count_tokens(model="mini", system="Be kind.", messages=HELLO).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_the_client_calls_and_parses(api: Any) -> None:
    pytest.importorskip("xgrammar")
    asked: dict[str, Any] = {
        "model": "mini", "max_tokens": 200, "messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "any"},
    }  # fmt: skip
    message = api.messages.create(**asked, extra_body={"seed": 7})
    call = message.content[0]
    assert (call.type, call.name) == ("tool_use", "add") and isinstance(call.input["a"], int)
    with api.messages.stream(**asked, extra_body={"seed": 7}) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    again = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert api.messages.create(model="mini", max_tokens=8, messages=again, tools=[TOOL]).role == "assistant"
    parsed = api.messages.parse(model="mini", max_tokens=50, messages=HELLO, output_format=Digit)
    assert isinstance(parsed.parsed_output, Digit)


def test_errors_have_their_classes(api: Any, address: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        api.messages.create(model="nobody", max_tokens=3, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        api.messages.create(model="mini", max_tokens=3, messages=HELLO, extra_body={"temperature": -1})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=address, api_key="wrong", max_retries=0).messages.create(
            model="mini", max_tokens=3, messages=HELLO
        )
    bearer = anthropic.Anthropic(base_url=address, auth_token="secret", max_retries=0)
    assert bearer.messages.create(model="mini", max_tokens=3, messages=HELLO).role == "assistant"
