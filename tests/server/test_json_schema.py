"""What a grammar of a schema lets through is valid: patterns as Python reads them, keywords by the texts they allow."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="structured output is not installed")

import xgrammar

from forerun.server.grammar_worker import _choices, compile_grammar, vocabulary_info
from forerun.server.json_pattern import other_than
from forerun.server.json_schema import normal_schema

VOCABULARY = [*(bytes([i]) for i in range(256)), b'{"', b'": ', b'"}', b"null", b'", "', b'"a"', b'"x1"', b"</s>"]
END = len(VOCABULARY) - 1
LETTERS = 'ab"\\\n'
TEXTS = ["".join(text) for length in range(5) for text in itertools.product(LETTERS, repeat=length)]
Compile = Callable[[Any], Any]


@pytest.fixture(scope="module")
def compile_schema() -> Compile:
    info = vocabulary_info(VOCABULARY, [END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda schema: compile_grammar(compiler, "json", json.dumps(schema))


def accepts(compiled: Any, text: str) -> bool:
    """Whether the whole text is in the grammar."""
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text)) and END in _choices(matcher, len(VOCABULARY))


@pytest.mark.parametrize(
    "pattern",
    ["a(b|ab)?", "[ab]{2}(a[ab]{2,3})?", "(a{1,2}|a)", "(b[ab]{2,})?", "((b{2,3}){0,2}){2,}", '"\\\\(b|a)?', '[^"]*',
     ".{2}", "[^a]+b", "a\\nb?", '("|\\\\|a)*', "(?:ab){2}", "a+?b??", "[\\s\\S]{1,2}", "", "[\\]\\-a]+",
     "\\x61\\u0062"],
)  # fmt: skip
def test_a_pattern_takes_what_python_takes(compile_schema: Compile, pattern: str) -> None:
    expected = {text for text in TEXTS if re.fullmatch(pattern, text)}
    for written in (pattern, f"^({pattern})$"):
        compiled = compile_schema({"type": "string", "pattern": written})
        assert {text for text in TEXTS if accepts(compiled, json.dumps(text))} == expected


def test_characters_beyond_ascii(compile_schema: Compile) -> None:
    compiled = compile_schema({"type": "string", "pattern": "^[α-ω]世?[😀-😂]$"})
    for text, expected in (("α世😀", True), ("ω😂", True), ("a😀", False), ("α世😃", False)):
        assert accepts(compiled, json.dumps(text, ensure_ascii=False)) == expected


def test_long_repetitions_hold_no_escapes(compile_schema: Compile) -> None:
    compiled = compile_schema({"type": "string", "pattern": "[^<]{1,900}(<b>)?"})
    for text, expected in (
        ("ab" * 450, True),
        ("ab" * 451, False),
        ("a<b>", True),
        ("<b>", False),
        ("\n", False),
    ):  # which would cost
        assert accepts(compiled, json.dumps(text)) == expected


def test_lengths_count_characters_and_keep_control_characters_out(compile_schema: Compile) -> None:
    compiled = compile_schema({"type": "string", "minLength": 1, "maxLength": 2})
    for text, expected in (("", False), ("é", True), ("😀x", True), ("abc", False)):
        assert accepts(compiled, json.dumps(text, ensure_ascii=False)) == expected
    assert not accepts(compiled, '"\x1f"') and not accepts(compiled, '"\n"')
    assert accepts(compile_schema({"maxLength": 0}), '""')


@pytest.mark.parametrize("names", [["a"], ["a", "ab"], ["", "b"], ['a"', "b\\"], ["ab", "aba", "b"]])
def test_other_texts_than_some(names: list[str]) -> None:
    assert {text for text in TEXTS if re.fullmatch(other_than(names), text)} == set(TEXTS) - set(names)


def test_a_listed_key_is_not_written_again_as_another(compile_schema: Compile) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}, "required": ["a"]}
    compiled = compile_schema(schema)
    for text, expected in (
        ('{"a": 1}', True),
        ('{"a": 1, "ab": null, "": null}', True),
        ('{"a": 1, "a": null}', False),
        ('{"b": null}', False),
    ):
        assert accepts(compiled, text) == expected


VALID: list[tuple[Any, list[Any], list[Any]]] = [  # a schema, values it allows, values it does not
    ({"minimum": 5}, [5, 7], [4]),
    ({"maxLength": 2, "minimum": 3}, ["ab", 3], ["abc", 2]),
    ({"type": "string", "enum": ["a", 3, None]}, ["a"], [3, None]),
    ({"type": "integer", "enum": [1, 2.0, 2.5, True]}, [1], [2.5, True]),
    ({"type": "integer", "enum": [7, float("inf")]}, [7], [8]),  # 1e999 is infinite to a JSON reader
    ({"type": "string", "anyOf": [{"maxLength": 1}, {"enum": ["yes", 4]}, {"type": "string", "pattern": "^b+$"}]},
     ["a", "yes", "bbb"], [4, "no"]),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, [{}], [{"y": "x"}, {"y": 1}]),
    ({"required": ["a"], "additionalProperties": {"type": "integer"}}, [{"a": 1}, {"a": 1, "b": 2}], [{"a": "x"}, {}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"minItems": 1, "maxItems": 2}, [[1], [1, "b"]], [[], [1, 2, 3]]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "allowed", "forbidden"), VALID, ids=lambda value: json.dumps(value)[:40])
def test_keywords_hold(compile_schema: Compile, schema: Any, allowed: list[Any], forbidden: list[Any]) -> None:
    compiled = compile_schema(schema)
    assert [accepts(compiled, json.dumps(value)) for value in allowed] == [True] * len(allowed)
    assert not any(accepts(compiled, json.dumps(value)) for value in forbidden)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a", "bcd"], "maxLength": 2},
        {"type": "string", "enum": [3]},
        {"$ref": "#/$defs/t", "maximum": 3, "$defs": {"t": {"type": "integer"}}},
        {"anyOf": [{"type": "object"}], "required": ["a"]},
        {"type": "object", "anyOf": [{"type": "string"}, {"type": "object"}]},
        {"anyOf": [{}], "oneOf": [{}]},
        {"contains": {"type": "null"}},
        {"propertyNames": {"maxLength": 2}, "additionalProperties": False},
        {"propertyNames": {"maxLength": 2}, "properties": {"abc": {}}},
        {"patternProperties": {"^x": {}, "^y": {}}},
        {"patternProperties": {"^x": {}}, "properties": {"x1": {}}},
        {"patternProperties": {"^x": {}}, "additionalProperties": {"type": "null"}},
        {"type": "object", "minProperties": 2},
        {"properties": {}, "required": ["a"], "additionalProperties": False},
        {"unevaluatedProperties": {"type": "null"}},
        {"minLength": 3, "maxLength": 2},
        {"type": "string", "pattern": "^a*$", "format": "email"},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x"},
        {"$recursiveRef": "#"},
        {"type": []},
    ],
)
def test_what_the_library_would_ignore_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"'\$?\w+|no string"):
        normal_schema(schema)


def test_random_texts_of_a_schema_are_valid(compile_schema: Compile) -> None:
    validators = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = {
        "properties": {
            "a": {"type": "string", "pattern": '^[a-z]{1,2}( [a-z"]{2,3})?$'},
            "x1": {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 2},
            "b": {"anyOf": [{"type": "number", "maximum": 4}, {"maxItems": 1}]},
        },
        "required": ["a", "z"],
        "additionalProperties": {"type": "boolean"},
    }
    compiled, rng, judge = compile_schema(schema), random.Random(1), validators.Draft202012Validator(schema)
    texts = [text for text in (written(compiled, rng) for _ in range(60)) if text is not None]
    assert len(texts) > 30
    for text in texts:
        assert judge.is_valid(json.loads(text)), text


def written(compiled: Any, rng: random.Random) -> str | None:
    """A random text of a grammar, ending soon; None if it did not end."""
    matcher, raw = xgrammar.GrammarMatcher(compiled), b""
    for _ in range(150):
        choices = _choices(matcher, len(VOCABULARY))
        if END in choices:
            return raw.decode("utf-8", "replace")
        weights = [8 if VOCABULARY[token] in (b'"', b"}", b"]") else 1 for token in choices]
        [token] = rng.choices(choices, weights)
        matcher.accept_token(token)
        raw += VOCABULARY[token]
    return None
