"""Tool calls and reasoning: found in text that arrives in any pieces, and forced by grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.server.reasoning import ReasoningSplitter, may_think, reasoning_style, starts_inside
from forerun.server.tools import (
    STYLES,
    Call,
    ForcedArguments,
    ForcedCalls,
    ToolParser,
    call_id,
    calls_schema,
    read_json_calls,
    tool_style,
)
from tests.support.mini import SHARED

CALL = '{"name": "f", "arguments": {"x": [1, "a]}"]}}'
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
    return "".join(p.content for p in parsed), [call for p in parsed for call in p.calls]


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
    assert read(ForcedCalls(), list(f"[{CALL}, {CALL[:-5]}")) == ("", [F])  # cut off by max_tokens
    assert read(ForcedArguments("g"), ['{"a"', ": 1}"]) == ("", [Call("g", '{"a": 1}')])


def test_json_calls_are_read_strictly() -> None:
    assert read_json_calls("") is None and read_json_calls("[1]") is None and read_json_calls('{"name": 3}') is None
    assert read_json_calls('{"name": "f"} {"x": 1}') is None
    assert read_json_calls('{"name": "f"}') == [Call("f", "{}")]


def test_styles_are_found_in_the_real_templates() -> None:
    folder = SHARED / "tokenizers" / "chat_templates"
    if not folder.exists():
        pytest.skip("real chat templates are not here")
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
    schema = calls_schema([("f", None), ("g", {"type": "object", "$defs": {"c": {}}})], 1)
    assert schema["maxItems"] == 1 and schema["$defs"] == {"c": {}}
    assert [kind["properties"]["name"]["const"] for kind in schema["items"]["anyOf"]] == ["f", "g"]


def test_tools_of_a_model_that_writes_calls(chat: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model knows no tools; its text is replaced by one that calls them."""
    from forerun.engine.stopping import OutputText

    text = f"Let me see. <tool_call>{CALL}</tool_call>"
    monkeypatch.setattr(OutputText, "visible", lambda self: text if self.request.finish_reason else text[:15])
    [choice] = chat("weather?", tools=[WEATHER, CLOCK], max_tokens=3, stop_token_ids=list(range(8192)))["choices"]
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
