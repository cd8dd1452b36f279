"""Tool calls and reasoning: found in text that arrives in any pieces, and forced by grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from forerun import LLM
from forerun.errors import ConfigError
from forerun.server.call_readers import CallPiece, JsonCalls, read_json
from forerun.server.reasoning import ReasoningSplitter, may_think, reasoning_style, starts_inside
from forerun.server.tools import (
    STYLES,
    ForcedArguments,
    ForcedCalls,
    ToolParser,
    call_id,
    calls_schema,
    tool_style,
)
from tests.server.conftest import events_of
from tests.support.shared import shared_data


class Call(NamedTuple):
    """A call put together."""

    name: str
    arguments: str


CALL = '{"name": "f", "arguments": {"x": [1, "a]}"]}}'
NO_NAME = '{"name": "\\ud800", "arguments": {}}'
F = Call("f", '{"x": [1, "a]}"]}')
TEXTS: dict[str, tuple[str, str, str, list[Call]]] = {  # name -> style, text, content, calls
    "hermes": ("hermes", f"I will. <tool_call>\n{CALL}\n</tool_call>", "I will. ", [F]),
    "hermes-two": ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [F, F]),
    "hermes-cut": ("hermes", f"<tool_call>\n{CALL}", "", [F]),
    "hermes-broken": ("hermes", "a <tool_call>{oops</tool_call> b", "a <tool_call>{oops</tool_call> b", []),
    "hermes-none": ("hermes", "1 < 2 and <tool is not", "1 < 2 and <tool is not", []),
    "qwen-xml": (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n<parameter=y>\nsome\ntext\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [Call("f", '{"x": 5, "y": "some\\ntext"}')],
    ),
    "qwen-half": (  # half a surrogate pair is no character, 1e999 no number
        "qwen3_coder",
        '<tool_call><function=f><parameter=x>"\\ud800"</parameter><parameter=y>1e999</parameter></function></tool_call>',
        "",
        [Call("f", '{"x": "\\"\\\\ud800\\"", "y": "1e999"}')],
    ),
    "hermes-half": (
        "hermes", f'<tool_call>{NO_NAME}</tool_call>', f'<tool_call>{NO_NAME}</tool_call>', []
    ),
    "llama": ("llama3_json", '{"name": "f", "parameters": {"x": [1, "a]}"]}}', "", [F]),
    "llama-tag": ("llama3_json", f"<|python_tag|>{CALL}; {CALL}", "", [F, F]),
    "llama-other-json": ("llama3_json", '{"answer": 5}', '{"answer": 5}', []),
    "llama-text": ("llama3_json", "No. {", "No. {", []),
    "mistral": ("mistral", f"Sure. [TOOL_CALLS] [{CALL}, {CALL}]", "Sure. ", [F, F]),
    "mistral-new": (
        "mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [Call("f", '{"x": 1}'), Call("g", "{}")]
    ),
    "mistral-broken": ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    "none": ("none", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
}  # fmt: skip


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[Call]]:
    parsed = [*map(parser.feed, pieces), parser.finish()]
    return "".join(p.content for p in parsed), together([piece for p in parsed for piece in p.calls])


def together(pieces: list[CallPiece]) -> list[Call]:
    calls: list[Call] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append(Call(piece.name, ""))
        calls[-1] = Call(calls[-1].name, calls[-1].arguments + piece.arguments)
    return calls


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    style, text, content, calls = TEXTS[name]
    for pieces in ([text], list(text), cut(text, list(range(0, 200, 3))), cut(text, [7, 19, 23])):
        assert read(STYLES[style](), pieces) == (content, calls), pieces


@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_gives_the_same(name: str, places: list[int]) -> None:
    style, text, content, calls = TEXTS[name]
    assert read(STYLES[style](), cut(text, places)) == (content, calls)


@given(st.sampled_from([name for name in STYLES if name != "none"]), st.text("<tol_ca>[TOOL_CALLS]{}\n x", max_size=40))
def test_text_without_calls_is_kept_whole(style: str, text: str) -> None:
    content, calls = read(STYLES[style](), list(text))
    assert calls or content == text


def test_forced_calls() -> None:
    assert read(ForcedCalls(), list(f"[{CALL}, {CALL}]")) == ("", [F, F])
    cut_off = Call("f", '{"x": [1, "a]')  # by max_tokens: the finish reason says so
    assert read(ForcedCalls(), list(f"[{CALL}, {CALL[:-5]}")) == ("", [F, cut_off])
    assert read(ForcedArguments("g"), ['{"a"', ": 1}"]) == ("", [Call("g", '{"a": 1}')])


@pytest.mark.parametrize("text", ["", "[1]", '{"name": 3}', '{"name": "f"', "[{}]", "x", '["' + "[" * 100_000])
def test_what_is_no_json_call_is_left(text: str) -> None:
    for pieces in ([text], list(text)[:50] + [text[50:]]):
        reader = JsonCalls()
        found = [piece for part in pieces for piece in reader.feed(part)] + reader.finish()
        assert found == [] and (reader.rest or "") == text


def test_a_call_may_be_written_in_other_ways() -> None:
    for text, calls in (
        ('{"name": "f"}', [Call("f", "{}")]),
        (
            '[{"arguments": {"a": 1}, "name": "f"}; {"name": "g", "parameters": {}}]',
            [Call("f", '{"a": 1}'), Call("g", "{}")],
        ),
        ('{"name": "f", "arguments": {"a": "}"}, "id": "{"} {"name": "g"}', [Call("f", '{"a": "}"}'), Call("g", "{}")]),
    ):
        for pieces in ([text], list(text)):
            reader = JsonCalls()
            assert together([piece for part in pieces for piece in reader.feed(part)]) == calls
            reader.finish()
            assert reader.rest is None
    reader = JsonCalls()
    assert together(reader.feed('{"name": "f"} {"x": 1}')) == [Call("f", "{}")] and reader.rest == ' {"x": 1}'


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize("style", [style for style in STYLES if style != "none"])
def test_deep_values_are_no_errors(style: str) -> None:
    for text in (
        f'<tool_call>{{"name": "f", "other": {DEEP}}}</tool_call>',
        f"<tool_call><function=f><parameter=x>{DEEP}</parameter></function></tool_call>",
        f'{{"name": "f", "other": {DEEP}}}',
        f'[TOOL_CALLS][{{"name": "f", "other": {DEEP}}}]',
    ):
        content, calls = read(STYLES[style](), [text])
        assert calls or content == text
        assert not calls or json.loads(calls[0].arguments) == {"x": DEEP}


@pytest.mark.parametrize(
    ("style", "text", "first"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>", '{"name": "f", "arguments": {'),
        ("llama3_json", CALL, '{"name": "f", "arguments": {'),
        ("mistral", f"[TOOL_CALLS][{CALL}]", '{"name": "f", "arguments": {'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": [1, "a]}"]}', "[ARGS]{"),
    ],
)
def test_arguments_are_passed_on_as_they_come(style: str, text: str, first: str) -> None:
    """Every character of the arguments, as soon as it is there; the name before the first of them."""
    parser, seen = STYLES[style](), []
    for character in text:
        seen.append(list(parser.feed(character).calls))
    start = text.index(first) + len(first) - 1
    assert not any(seen[:start])
    assert seen[start] == [CallPiece("f"), CallPiece(None, "{")]
    for place, character in enumerate(F.arguments[1:], start + 1):
        assert seen[place] == [CallPiece(None, character)]


def test_xml_arguments_are_passed_on_by_parameter() -> None:
    parser = STYLES["qwen3_coder"]()
    texts = ("<tool_call>\n<function=f>", "\n<parameter=x>\n5\n</para", "meter>\n<parameter=y>NaN</parameter>",
             "</function></tool_call>")  # fmt: skip
    assert [together([CallPiece("f"), *parser.feed(text).calls]) for text in texts] == [
        [Call("f", ""), Call("f", "")], [Call("f", "")], [Call("f", '{"x": 5, "y": "NaN"')], [Call("f", "}")]
    ]  # fmt: skip


def test_styles_are_found_in_the_real_templates() -> None:
    folder = shared_data("tokenizers/chat_templates")
    expected = {
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
        "Qwen-Qwen2.5-7B-Instruct": "hermes",
        "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
        "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
        "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    }
    found = {name: tool_style("auto", (folder / f"{name}.jinja").read_text("utf-8")) for name in expected}
    assert found == expected
    assert tool_style("qwen", None) == "hermes" and len(call_id("mistral")) == 9
    with pytest.raises(ConfigError, match="tool-parser"):
        tool_style("gpt", None)


# -- reasoning --------------------------------------------------------------------------------------------------


def split(text: str, pieces: list[str], inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter("<think>", "</think>", inside)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes <think>", False, "hm\n\nso", "Yes <think>"),
        ("hm\n</think>\n\nYes", True, "hm", "Yes"),
        ("plain < text", False, "", "plain < text"),
        ("<think>never ends", False, "never ends", ""),
        ("<thinking aloud", False, "", "<thinking aloud"),
        ("</think>done", True, "", "done"),
        ("<think></think>\n\n", False, "", ""),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_split_however_the_text_is_cut(text: str, inside: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), cut(text, [3, 9, 15]), cut(text, [8, 10, 11, 12])):
        assert split(text, pieces, inside) == (reasoning, content), pieces


def test_whether_a_prompt_leaves_room_for_thinking() -> None:
    marks = reasoning_style("auto", "... '</think>' ...")
    assert marks == ("<think>", "</think>") and reasoning_style("auto", "hello") is None
    assert starts_inside("<|Assistant|><think>\n", marks) and not starts_inside("<think>\n\n</think>\n\n", marks)
    assert not may_think("<think>\n\n</think>\n\n", marks) and may_think("assistant\n", marks)
    with pytest.raises(ConfigError, match="reasoning-parser"):
        reasoning_style("loud", None)


# -- through the server -----------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "$defs": {"city": {"type": "string", "maxLength": 10}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}


def test_the_schema_of_forced_calls() -> None:
    schema = calls_schema([("f", None), ("g", {"properties": {"a": {"$ref": "#/$defs/c"}}, "$defs": {"c": {}}})], 1)
    assert schema["maxItems"] == 1
    assert schema["$defs"]["g"] == {"properties": {"a": {"$ref": "#/$defs/g/$defs/c"}}, "$defs": {"c": {}}}
    assert [kind["properties"]["name"]["const"] for kind in schema["items"]["anyOf"]] == ["f", "g"]


def test_tools_of_a_model_that_writes_calls(
    llm: LLM, chat: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model knows no tools; its text is replaced by one that calls them."""
    from forerun.engine.stopping import OutputText

    text, ends = f"Let me see. <tool_call>{CALL}</tool_call>", list(llm.tokenizer.eos_token_ids)
    monkeypatch.setattr(OutputText, "visible", lambda self: text if self.request.finish_reason else text[:15])
    [choice] = chat("weather?", tools=[WEATHER, CLOCK], max_tokens=3, allowed_token_ids=ends)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see. "
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": F.arguments} and call["id"].startswith("call_")
    [untouched] = chat("weather?", tools=[WEATHER], tool_choice="none", max_tokens=3)["choices"]
    assert untouched["message"]["content"] == text


def test_conversations_with_calls_are_rendered(post: Callable[..., Any]) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    answer = post("/v1/chat/completions", messages=messages, tools=[WEATHER], max_tokens=2)
    assert answer["usage"]["prompt_tokens"] > post("/tokenize", messages=messages)["count"]  # the tools are told of


def test_named_and_required_calls_are_valid(chat: Callable[..., Any]) -> None:
    pytest.importorskip("xgrammar")
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"tools": [WEATHER, CLOCK], "max_tokens": 160, "temperature": 1.0}
    for choice in (named, "required"):
        answers = [
            chat("weather in Rome?", tool_choice=choice, parallel_tool_calls=False, speculation=speculation, **fields)
            for speculation in ("auto", "off")
        ]
        first, second = (answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in answers)
        assert first == second
        arguments = json.loads(first["arguments"])
        if first["name"] == "get_weather":
            assert len(arguments["city"]) <= 10 and 1 <= arguments["days"] <= 9
        assert first["name"] in ("get_weather", "get_time")


def shop(name: str, **kinds: Any) -> dict[str, Any]:
    """A tool whose parameters refer to a definition that other tools define otherwise, and one to itself."""
    parameters = {
        "type": "object",
        "properties": {"item": {"$ref": "#/$defs/Item"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["item"],
        "$defs": {"Item": kinds},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_each_tool_keeps_its_own_definitions(chat: Callable[..., Any]) -> None:
    """Pydantic names definitions after classes, and two tools may have one class name."""
    pytest.importorskip("xgrammar")
    tools = [shop("buy", enum=["apple", "pear"]), shop("sell", type="integer", minimum=10, maximum=12)]
    seen = set()
    for seed in range(12):
        answer = chat("trade", tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=90, seed=seed)
        [choice] = answer["choices"]
        if choice["finish_reason"] != "tool_calls":
            continue
        [call] = choice["message"]["tool_calls"]
        arguments, known = json.loads(call["function"]["arguments"]), {"buy": ("apple", "pear"), "sell": (10, 11, 12)}
        while arguments is not None:
            assert arguments["item"] in known[call["function"]["name"]]
            arguments = arguments.get("next")
        seen.add(call["function"]["name"])
    assert seen == {"buy", "sell"}


def test_a_stream_of_calls_has_the_arguments_in_pieces(client: TestClient) -> None:
    pytest.importorskip("xgrammar")
    body = {"messages": [{"role": "user", "content": "Rome?"}], "tools": [WEATHER, CLOCK], "tool_choice": "required",
            "parallel_tool_calls": False, "max_tokens": 160, "seed": 3}  # fmt: skip
    [whole] = client.post("/v1/chat/completions", json=body).json()["choices"]
    *events, done = events_of(client.post("/v1/chat/completions", json={**body, "stream": True}).text)
    choices = [json.loads(event)["choices"][0] for event in events]
    opening, *pieces = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    [call] = whole["message"]["tool_calls"]
    assert set(opening) == {"index", "id", "type", "function"}
    assert opening["function"] == {"name": call["function"]["name"], "arguments": ""}
    assert len(pieces) > 1 and all(set(piece) == {"index", "function"} for piece in pieces)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [whole["finish_reason"]]
    assert done == "[DONE]"


def test_deep_arguments_of_earlier_calls_are_text(post: Callable[..., Any]) -> None:
    deep = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 30_000 + "]" * 30_000}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [deep]}, {"role": "user", "content": "?"}]
    assert post("/tokenize", messages=messages)["count"] > 0


@pytest.mark.parametrize("text", ["[" * 10_000 + "]" * 10_000, "NaN", "[1e999]", '"\\udc00"', "9" * 5000, "{"])
def test_json_no_answer_can_hold_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        read_json(text)
