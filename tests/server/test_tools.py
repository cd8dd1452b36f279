"""Tool calls and reasoning: found in text that arrives in any pieces, and forced by grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from forerun import LLM
from forerun.errors import ConfigError
from forerun.server.call_readers import CallPiece, JsonCalls, NoCalls, OutputPiece, Prose, ToolParser, read_json
from forerun.server.chat import ChatJob
from forerun.server.chat_choice import ChatChoice
from forerun.server.context import ServerContext
from forerun.server.conversation import render
from forerun.server.harmony import Harmony
from forerun.server.pieces import Pieces
from forerun.server.reasoning import STYLES as REASONING
from forerun.server.reasoning import ReasoningMarks, ReasoningSplitter, may_think, reasoning_style, starts_inside
from forerun.server.schema import ChatBody
from forerun.server.streams import Delta
from forerun.server.tagged_calls import typed
from forerun.server.tools import (
    MARKS,
    STYLES,
    ForcedArguments,
    ForcedCalls,
    call_id,
    calls_schema,
    tool_style,
)
from forerun.weights.tokenizer import Tokenizer
from tests.server.conftest import client_of, events_of, settings
from tests.support.shared import shared_data
from tests.weights.makers import byte_level, save


class Call(NamedTuple):
    """A call put together."""

    name: str
    arguments: str


CALL = '{"name": "f", "arguments": {"x": [1, "a]}"]}}'
NO_NAME = '{"name": "\\ud800", "arguments": {}}'
F = Call("f", '{"x": [1, "a]}"]}')
FUNCTIONS: dict[str, dict[str, Any]] = {  # a function without a schema, and one with parameters of every type
    "f": {},
    "g": {
        "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "on": {"type": ["boolean", "null"]},
            "one_of": {"enum": ["5", "b"]}, "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "there": {"$ref": "#/$defs/place"}, "list": {"type": "array"},
        },
        "$defs": {"place": {"type": "string"}},
    },
}  # fmt: skip
TYPED = {"text": "5", "count": "5", "on": "True", "one_of": "5", "either": "5", "there": "[1]", "list": "[1, 2]"}
G = Call("g", '{"text": "5", "count": 5, "on": true, "one_of": "5", "either": 5, "there": "[1]", "list": [1, 2]}')
XML_G = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in TYPED.items())
GLM_G = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in TYPED.items())
MINIMAX_G = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in TYPED.items())
DSML = "<｜DSML｜"
DSML_G = "".join(
    f'{DSML}parameter name="{key}" string="false">{value}</｜DSML｜parameter>\n' for key, value in TYPED.items()
)
GEMMA_G = '{text:<|"|>5<|"|>,count:5,on:true,one_of:<|"|>5<|"|>,either:5,there:<|"|>[1]<|"|>,list:[1, 2]}'
KIMI_END = "<|tool_calls_section_end|>"
KIMI_F = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": [1, "a]}"]}'
    f"<|tool_call_end|>{KIMI_END}"
)
CHANNELS = (
    "<|channel|>analysis<|message|>Hm. <b>?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": [1, "a]}"]}<|call|>'
)
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
    "llama-person": ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "llama-stranger": (
        "llama3_json", '{"name": "h", "parameters": {}} x', '{"name": "h", "parameters": {}} x', []
    ),
    "llama-tag-stranger": ("llama3_json", '<|python_tag|>{"name": "h"}', "", [Call("h", "{}")]),
    "llama-text": ("llama3_json", "No. {", "No. {", []),
    "mistral": ("mistral", f"Sure. [TOOL_CALLS] [{CALL}, {CALL}]", "Sure. ", [F, F]),
    "mistral-new": (
        "mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [Call("f", '{"x": 1}'), Call("g", "{}")]
    ),
    "mistral-no-list": ("mistral", "[TOOL_CALLS][TOOL_CALLS]", "[TOOL_CALLS][TOOL_CALLS]", []),
    "mistral-broken": ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
    "qwen-typed": ("qwen3_coder", f"<tool_call>\n<function=g>\n{XML_G}</function>\n</tool_call>", "", [G]),
    "glm": ("glm45", f"Well.\n<tool_call>g\n{GLM_G}</tool_call>", "Well.\n", [G]),
    "glm-two": ("glm45", "<tool_call>f\n</tool_call>\n<tool_call>f</tool_call>", "", [Call("f", "{}")] * 2),
    "glm-47": (
        "glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>a <b> & c</arg_value></tool_call>", "",
        [Call("f", '{"x": "a <b> & c"}')],
    ),
    "longcat": ("longcat", f"So:<longcat_tool_call>\n{CALL}\n</longcat_tool_call>", "So:", [F]),
    "longcat-keyed": (
        "longcat_keyed",
        f"<longcat_tool_call>g\n{GLM_G.replace('arg_', 'longcat_arg_')}</longcat_tool_call>", "", [G],
    ),
    "glm-cut": ("glm45", "<tool_call>get_wea", "<tool_call>get_wea", []),
    "glm-text": ("glm45", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
    "minimax": (
        "minimax_m2",
        f'<minimax:tool_call>\n<invoke name="g">\n{MINIMAX_G}</invoke>\n<invoke name="f">\n</invoke>\n'
        "</minimax:tool_call>",
        "", [G, Call("f", "{}")],
    ),
    "minimax-broken": (
        "minimax_m2", "<minimax:tool_call><b></minimax:tool_call>", "<minimax:tool_call><b></minimax:tool_call>", []
    ),
    "dsml": (
        "deepseek_v32",
        f'So: {DSML}function_calls>\n{DSML}invoke name="g">\n{DSML_G}</｜DSML｜invoke>\n{DSML}invoke name="f">\n'
        f'{DSML}parameter name="x" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "So: ", [G, Call("f", '{"x": "5"}')],
    ),
    "gemma": ("gemma4", f"<|tool_call>call:g{GEMMA_G}<tool_call|><|tool_call>call:f{{}}<tool_call|>", "",
              [G, Call("f", "{}")]),
    "gemma-nested": (
        "gemma4",
        'a<|tool_call>call:f{x:{y:[<|"|>{"q": 1},\n<|"|>,-1.5e3,null],z w:{}},u:bare word}<tool_call|>b',
        "ab",
        [Call("f", '{"x": {"y": ["{\\"q\\": 1},\\n", -1500.0, null], "z w": {}}, "u": "bare word"}')],
    ),
    "gemma-bare": (
        "gemma4",
        "<|tool_call>call:f{at:12:30,when:[12:30]}<tool_call|><|tool_call>call:g{text:5,list:[1],count:2}<tool_call|>",
        "",
        [Call("f", '{"at": "12:30", "when": "[12:30]"}'), Call("g", '{"text": "5", "list": [1], "count": 2}')],
    ),
    "gemma-cut": ("gemma4", '<|tool_call>call:f{x:1,y:<|"|>a, b', ',y:<|"|>a, b', [Call("f", '{"x": 1')]),
    "gemma-broken": (
        "gemma4", "<|tool_call>call:f{:1}<tool_call|>", ":1}<tool_call|>", [Call("f", "")]
    ),
    "kimi": ("kimi_k2", f"Well. {KIMI_F}", "Well. ", [F]),
    "kimi-two": (
        "kimi_k2",
        f"{KIMI_F.removesuffix(KIMI_END)}\n<|tool_call_begin|> g:12 <|tool_call_argument_begin|> {{}}\n"
        f"<|tool_call_end|>\n{KIMI_END}\nDone.",
        "Done.", [F, Call("g", "{}")],
    ),
    "kimi-cut": ("kimi_k2", KIMI_F.partition('"a]')[0], "", [Call("f", '{"x": [1, ')]),
    "kimi-text": ("kimi_k2", f"{KIMI_F.partition('{')[0]}5{KIMI_END}", f"{KIMI_F.partition('{')[0]}5{KIMI_END}", []),
    "kimi-broken": (
        "kimi_k2", KIMI_F.replace("<|tool_call_end|>", " <|tool_call_begin|>"), f" <|tool_call_begin|>{KIMI_END}", [F]
    ),
    "command": (
        "command",
        'So: <|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"x": [1, "a]}"]}},\n    '
        '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}\n]<|END_ACTION|>',
        "So: ", [F, Call("g", "{}")],
    ),
    "harmony": ("openai", CHANNELS, "I look.", [F]),
    "harmony-role": (
        "openai",
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>"
        "Done.<|return|>",
        "Done.", [Call("f", "{}")],
    ),
    "harmony-cut": ("openai", '<|channel|>commentary to=functions.f<|message|>{"x', "", [Call("f", '{"x')]),
    "harmony-empty": ("openai", "<|channel|>commentary to=functions.f<|message|>", "", [Call("f", "{}")]),
    "harmony-two": (
        "openai", "<|channel|>final<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "a\n\nb", []
    ),
    "harmony-half": ("openai", "<|channel|>final<|message|>a<|end|><|start|>assist", "a\n\n<|start|>assist", []),
    "harmony-plain": ("openai", "to be < or <| not", "to be < or <| not", []),
    "harmony-one-letter": ("openai", "t", "t", []),
    "harmony-other": ("openai", "<|channel|>loud<|message|>x", "<|channel|>loud<|message|>x", []),
    "harmony-long": ("openai", "to=" + "x" * 300, "to=" + "x" * 300, []),
    "none": ("none", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
}  # fmt: skip


def pieces_of(parser: ToolParser, texts: Iterable[str]) -> list[OutputPiece]:
    return [piece for found in [*map(parser.feed, texts), parser.finish()] for piece in found]


def text_of(pieces: Iterable[OutputPiece], reasoning: bool = False) -> str:
    return "".join(each.text for each in pieces if isinstance(each, Prose) and each.is_reasoning == reasoning)


def read(parser: ToolParser, texts: Iterable[str]) -> tuple[str, list[Call]]:
    found = pieces_of(parser, texts)
    return text_of(found), together(found)


def together(pieces: Iterable[OutputPiece]) -> list[Call]:
    calls: list[Call] = []
    for piece in pieces:
        if isinstance(piece, Prose):
            continue
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
        assert read(STYLES[style](FUNCTIONS), pieces) == (content, calls), pieces


@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 300), max_size=8))
def test_any_cut_gives_the_same(name: str, places: list[int]) -> None:
    style, text, content, calls = TEXTS[name]
    assert read(STYLES[style](FUNCTIONS), cut(text, places)) == (content, calls)


def items_of(parser: ToolParser, texts: list[str]) -> list[list[str]]:
    """The items that /v1/responses and /v1/messages make of an output: kind, name, text."""
    choice, pieces, items = ChatChoice(0, None, parser, "", 0, only_one_call=False), Pieces(None), list[list[str]]()
    for number, text in enumerate(texts, 1):
        reason: Any = "stop" if number == len(texts) else None
        for part in choice.take(Delta(0, text, (), (), reason, None, 0, None, None, ())):
            for piece in pieces.take({"delta": part}):
                items += [[piece.kind, piece.name, ""]] if piece.begins else []
                items[-1][2] += piece.text
    return items


@given(st.sampled_from(sorted(TEXTS)), st.sampled_from(("", " Done. ")), st.lists(st.integers(0, 600), max_size=8))
def test_any_cut_gives_the_same_items(name: str, between: str, places: list[int]) -> None:
    """Text, reasoning and calls keep their order: what one step of the engine brings depends on drafts."""
    style, text, *_ = TEXTS[name]
    text = text + between + text
    assert items_of(STYLES[style](FUNCTIONS), cut(text, places)) == items_of(STYLES[style](FUNCTIONS), list(text))


def test_a_call_and_the_text_behind_it_may_come_at_once() -> None:
    text = f"So: <tool_call>{CALL}</tool_call>Done.<tool_call>{CALL}"
    expected = [["text", "", "So: "], ["call", "f", F.arguments], ["text", "", "Done."], ["call", "f", F.arguments]]
    assert items_of(STYLES["hermes"](FUNCTIONS), [text]) == expected


@given(st.sampled_from([name for name in STYLES if name != "none"]), st.text("<tol_ca>[TOOL_CALLS]{}\n x", max_size=40))
def test_text_without_calls_is_kept_whole(style: str, text: str) -> None:
    content, calls = read(STYLES[style](FUNCTIONS), list(text))
    assert calls or content == text


MARKUP = (
    "<tool_call>", "</tool_call>", "<function=g>", "<parameter=count>", "</parameter>", "</function>", "<arg_key>",
    "count", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>",
    '<invoke name="g">', '<parameter name="on">', "</invoke>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="g">',
    "</｜DSML｜function_calls>", '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "<|tool_call>", "call:g{", "}", "<tool_call|>", '<|"|>', "{", "[", "]", ",", ":", "5", "<|start|>",
    "assistant", "<|channel|>", "final", "analysis", "commentary", " to=functions.g", "<|message|>", "<|end|>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.g:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|START_ACTION|>", '{"tool_name": "g"}', "<|END_ACTION|>",
    "<|call|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "x", '{"name": "g", "arguments": {', " ", "\n", "g",
)  # fmt: skip


@given(
    st.sampled_from([name for name in STYLES if name != "none"]),
    st.lists(st.sampled_from(MARKUP), max_size=14),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_broken_output_is_read_the_same_however_it_is_cut(style: str, parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    whole = read(STYLES[style](FUNCTIONS), [text])
    assert read(STYLES[style](FUNCTIONS), cut(text, places)) == read(STYLES[style](FUNCTIONS), list(text)) == whole
    content, calls = whole
    if not calls and style != "openai":
        assert content == text


@given(st.text("ab <|>\n", max_size=60).map(lambda text: text.replace("<|", "<")))
def test_harmony_keeps_the_text_of_every_channel(text: str) -> None:
    parser = STYLES["openai"]({})
    said = (
        f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|end|>"
        f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{text}<|call|>"
    )
    found = pieces_of(parser, said)
    assert text_of(found, reasoning=True) == text_of(found) == text
    assert together(found) == [Call("f", text or "{}")]


def test_harmony_without_tools_reads_channels_only() -> None:
    parser = Harmony(NoCalls(), reads_calls=False)
    found = pieces_of(parser, CHANNELS)
    assert text_of(found, reasoning=True) == "Hm. <b>?" and not together(found)
    assert text_of(found) == f"I look.\n\n{F.arguments}"
    forced = Harmony(ForcedCalls(), reads_calls=False)
    answer = f"<|channel|>commentary<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>[{CALL}]"
    assert read(forced, list(answer)) == ("So.", [F])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (None, "5", 5),
        (None, "True", "True"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer"}, "many", "many"),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, '{"a": 1}', {"a": 1}),
        ({"type": "number"}, "-1e3", -1000.0),
        ({"const": 3}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, "7", "7"),
        ({"$ref": "#/nowhere"}, "7", 7),
        ({"type": 5, "enum": 5}, "7", 7),
        ({"$ref": "#"}, "7", 7),
    ],
)
def test_values_have_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    assert json.loads(typed(text, schema, {"$defs": {"n": {"type": "string"}}})) == value


def test_a_schema_that_refers_to_itself_is_looked_into_once() -> None:
    lookups = 0

    class Definitions(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal lookups
            lookups += 1
            return super().get(key, default)

    again = {"$ref": "#/$defs/a"}
    root = {"$defs": Definitions(a={"anyOf": [*({**again} for _ in range(3)), {"type": "string"}]})}
    assert typed("7", again, root) == '"7"' and lookups <= 5


def test_forced_calls() -> None:
    assert read(ForcedCalls(), list(f"[{CALL}, {CALL}]")) == ("", [F, F])
    cut_off = Call("f", '{"x": [1, "a]')  # by max_tokens: the finish reason says so
    assert read(ForcedCalls(), list(f"[{CALL}, {CALL[:-5]}")) == ("", [F, cut_off])
    for unnamed in ('[{"name": "f', f"[{CALL}, {CALL[:9]}"):  # text, as nothing a model wrote is lost
        calls = [F] * unnamed.count(CALL)
        assert read(ForcedCalls(), list(unnamed)) == (unnamed.removeprefix(f"[{CALL}"), calls)
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
        content, calls = read(STYLES[style](FUNCTIONS), [text])
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
    parser, seen = STYLES[style](FUNCTIONS), []
    for character in text:
        seen.append(parser.feed(character))
    start = text.index(first) + len(first) - 1
    assert not any(seen[:start])
    assert seen[start] == [CallPiece("f"), CallPiece(None, "{")]
    for place, character in enumerate(F.arguments[1:], start + 1):
        assert seen[place] == [CallPiece(None, character)]


def test_xml_arguments_are_passed_on_by_parameter() -> None:
    parser = STYLES["qwen3_coder"]({})
    texts = ("<tool_call>\n<function=f>", "\n<parameter=x>\n5\n</para", "meter>\n<parameter=y>NaN</parameter>",
             "</function></tool_call>")  # fmt: skip
    assert [together([CallPiece("f"), *parser.feed(text)]) for text in texts] == [
        [Call("f", ""), Call("f", "")], [Call("f", "")], [Call("f", '{"x": 5, "y": "NaN"')], [Call("f", "}")]
    ]  # fmt: skip


def test_styles_are_found_in_the_real_templates() -> None:
    folder = shared_data("tokenizers/chat_templates")
    expected = {
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
        "Qwen-Qwen2.5-7B-Instruct": "hermes",
        "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
        "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
        "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    }
    found = {name: tool_style("auto", (folder / f"{name}.jinja").read_text("utf-8")) for name in expected}
    assert found == expected
    assert tool_style("qwen", None) == "hermes" and tool_style("glm47", None) == "glm45"
    assert len(call_id("mistral", "f", 0)) == 9
    with pytest.raises(ConfigError, match="tool_parser"):
        tool_style("gpt", None)


# -- reasoning --------------------------------------------------------------------------------------------------


def split(
    text: str, pieces: list[str], inside: bool = False, marks: ReasoningMarks = REASONING["think"]
) -> tuple[str, str]:
    splitter = ReasoningSplitter(marks, inside)
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


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>thought\nhm\n<channel|>Yes", "hm", "Yes"),
        ("<|channel>thought\n<channel|>Yes", "", "Yes"),
        ("<|channel>thoughtful\n<channel|>Yes", "thoughtful", "Yes"),
        ("<|channel>thought\n\nthought\nx", "thought\nx", ""),
        ("<|channel>thoug", "", ""),
        ("Yes <channel|>", "", "Yes <channel|>"),
    ],
)
def test_gemma_names_its_channel(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), cut(text, [12, 17, 18]), cut(text, [18, 19])):
        assert split(text, pieces, marks=REASONING["gemma4"]) == (reasoning, content), pieces


def test_reasoning_is_found_in_templates() -> None:
    assert reasoning_style("auto", "'<|channel>thought\n<channel|>'") == REASONING["gemma4"]
    assert reasoning_style("auto", "[THINK]x[/THINK]") == REASONING["mistral"]
    assert reasoning_style("auto", "<longcat_think>x</longcat_think>") == REASONING["longcat"]
    assert reasoning_style("glm45", None) == REASONING["think"] and reasoning_style("openai_gptoss", None) is None


@pytest.mark.parametrize(
    ("sign", "style"),
    [
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm45"),
        ("<longcat_tool_call>\n{name, arguments}", "longcat"),
        ("<longcat_tool_call>{name}\n<longcat_arg_key>{key}</longcat_arg_key>", "longcat_keyed"),
        ("'<minimax:tool_call>'", "minimax_m2"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("'<|tool_call>call:' + name, '<|channel>thought'", "gemma4"),
        ("'<|start|>assistant<|channel|>analysis<|message|>'", "openai"),
        ("'<|tool_calls_section_begin|><|tool_call_begin|>' + tool_call.id", "kimi_k2"),
    ],
)
def test_families_are_told_by_what_their_templates_write(sign: str, style: str) -> None:
    assert tool_style("auto", f"{{{{ {sign} }}}}") == style


def test_whether_a_prompt_leaves_room_for_thinking() -> None:
    marks = reasoning_style("auto", "... '</think>' ...")
    assert marks == REASONING["think"] and reasoning_style("auto", "hello") is None
    assert starts_inside("<|Assistant|><think>\n", marks) and not starts_inside("<think>\n\n</think>\n\n", marks)
    assert not may_think("<think>\n\n</think>\n\n", marks) and may_think("assistant\n", marks)
    assert not starts_inside("user\nWhat is <think>?\nassistant\n", marks)
    assert starts_inside("assistant\n<|channel>thought\n", REASONING["gemma4"])
    assert starts_inside("assistant\n<|channel>", REASONING["gemma4"])
    for said, inside in (("\n<think>hm", True), ("<think>hm</think>So", False), ("Write <think> first", False)):
        assert starts_inside(f"<think>?\nassistant\n{said}", marks, said) == inside, said
    with pytest.raises(ConfigError, match="reasoning_parser"):
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


def test_a_forced_call_of_gpt_oss_may_come_as_it_writes_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar")
    from forerun.engine.stopping import OutputText

    monkeypatch.setattr(OutputText, "visible", lambda self: CHANNELS if self.request.finish_reason else CHANNELS[:40])
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 3}
    with client_of(llm, tool_parser="openai") as client:
        for choice in (tool, "required"):
            answer = client.post("/v1/chat/completions", json={**asked, "tool_choice": choice}).json()
            [call] = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "f", "arguments": F.arguments}


def test_calls_of_kimi_are_numbered_through_the_conversation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its template shows the model the ids of its calls, and no names."""
    from forerun.engine.stopping import OutputText

    text = f"{KIMI_F.removesuffix(KIMI_END)}<|tool_call_begin|>f<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    monkeypatch.setattr(OutputText, "visible", lambda self: text if self.request.finish_reason else text[:90])
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    earlier = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "5"},
    ]
    asked = {"messages": [{"role": "user", "content": "?"}, *earlier], "max_tokens": 3, "n": 2,
             "tools": [{"type": "function", "function": {"name": "f"}}]}  # fmt: skip
    with client_of(llm, tool_parser="kimi_k2") as client:
        for choice in client.post("/v1/chat/completions", json=asked).json()["choices"]:
            assert [one["id"] for one in choice["message"]["tool_calls"]] == ["functions.f:1", "functions.f:2"]


def test_a_user_may_write_about_the_marks_of_thinking(thinking: httpx.Client) -> None:
    pytest.importorskip("xgrammar")
    asked = {"messages": [{"role": "user", "content": "What is <think>?"}], "guided_choice": ["yes"]}
    message = thinking.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes"}


# -- a call, or an answer in the response format ----------------------------------------------------------------

OPENING = "<|im_start|>"  # a special token of the embedded model, which takes the part of <tool_call>
SHORT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}


@pytest.fixture
def marked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A request with a tool, whose call is the opening mark and the tool's name; its bias is towards both."""
    pytest.importorskip("xgrammar")
    for style in ("glm45", "llama3_json"):
        monkeypatch.setitem(MARKS, style, (OPENING, "</tool_call>"))
    [opening], [name] = (llm.tokenizer.encode(text, add_special_tokens=False) for text in (OPENING, "look"))
    bias = {str(opening): 60.0, str(name): 100.0}  # the format allows the name only behind the mark
    tools = [{"type": "function", "function": {"name": "look"}}]
    return {"messages": [{"role": "user", "content": "?"}], "tools": tools, "logit_bias": bias, "seed": 1}


def test_beside_a_response_format_a_call_may_come_first(llm: LLM, marked: dict[str, Any]) -> None:
    with client_of(llm, tool_parser="glm45") as client:

        def message(**fields: Any) -> dict[str, Any]:
            [choice] = client.post("/v1/chat/completions", json={**marked, "max_tokens": 9, **fields}).json()["choices"]
            return dict(choice["message"])

        for speculation in ("auto", "off"):
            called = message(response_format=SHORT, max_tokens=2, speculation=speculation)
            [call] = called["tool_calls"]
            assert call["function"] == {"name": "look", "arguments": "{}"} and called["content"] is None
        away = dict.fromkeys(marked["logit_bias"], -100.0)
        assert message(response_format=SHORT, logit_bias=away)["content"] in ('"a"', '"b"')
        assert message(guided_choice=["yes"])["content"] == "yes"  # all that such an answer may be


def test_a_response_format_that_no_call_could_get_past_is_refused(
    chat: Callable[..., Any], post: Callable[..., Any]
) -> None:
    pytest.importorskip("xgrammar")
    error = chat("?", 400, tools=[CLOCK], response_format=SHORT)["error"]
    assert error["param"] == "response_format" and "calls may begin with text" in error["message"]
    tool = {"type": "function", "name": "look"}
    form = {"format": {"type": "json_object"}}
    assert post("/v1/responses", 400, input="?", tools=[tool], text=form)["error"]["param"] == "text.format"
    [choice] = chat("?", tools=[CLOCK], response_format=SHORT, tool_choice="none")["choices"]
    assert choice["message"]["content"] in ('"a"', '"b"')


def test_calls_that_may_come_without_their_mark_are_refused_beside_a_format(llm: LLM, marked: dict[str, Any]) -> None:
    """Llama 3 writes bare JSON, though its mark is a token."""
    with client_of(llm, tool_parser="llama3_json") as client:
        answer = client.post("/v1/chat/completions", json={**marked, "response_format": SHORT})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format"


def test_texts_show_the_marks_of_calls_that_are_special_tokens(
    app: FastAPI, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = ChatBody(messages=[{"role": "user", "content": "?"}], tools=[CLOCK])

    def skips(asked: ChatBody) -> bool:
        return ChatJob(app.state.context, asked).groups[0].samples[0].request.params.skip_special_tokens

    assert skips(body)
    monkeypatch.setitem(MARKS, "hermes", (OPENING, "</tool_call>"))
    assert not skips(body) and skips(body.model_copy(update={"tool_choice": "none"}))


class Harmonized:
    """A tokenizer whose template reads reasoning as gpt-oss's does."""

    chat_template = "{{ message.thinking }}"

    def apply_chat_template(self, messages: list[dict[str, Any]], *_: Any, **__: Any) -> str:
        return json.dumps([{key: message.get(key) for key in ("content", "thinking")} for message in messages])


def test_reasoning_reaches_gpt_oss_by_its_own_name() -> None:
    """Not beside a text: its template refuses both in one message with a call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "reasoning_content": "hm", "tool_calls": [call]}
    body = ChatBody(messages=[said, {**said, "content": "So."}, {"role": "user", "content": "?"}])
    rendered = json.loads(render(cast(Tokenizer, Harmonized()), body, []))
    assert [tuple(message.values()) for message in rendered] == [("", "hm"), ("So.", None), ("?", None)]


def test_a_template_for_tools_is_taken_where_there_are_tools(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].function.name }}<function="}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    tokenizer = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=named))
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    )
    assert render(tokenizer, body, body.tools or []) == "f<function=" and render(tokenizer, body, []) == "hi"
    monkeypatch.setattr(llm.tokenizer, "tool_template", tokenizer.tool_template)
    assert ServerContext(llm, settings()).tool_style == "qwen3_coder"


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
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90, "temperature": 2.0}
    for seed in range(12):
        answer = chat("trade", tools=tools, seed=seed, **fields)
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
