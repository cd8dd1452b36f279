"""What a grammar of a schema lets through is valid: patterns as Python reads them, keywords by the texts they allow."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason="structured output is not installed")

import numpy as np
import xgrammar

from forerun.server.grammar_matcher import Matcher
from forerun.server.grammar_worker import _choices, compile_grammar, vocabulary_info
from forerun.server.json_pattern import other_than
from forerun.server.json_schema import normal_schema
from forerun.server.json_strings import FORMATS, Longest, longest_strings

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
    # as pydantic writes them: HttpUrl, patterns with lengths, Decimal (two forms), set, multiple_of
    ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}, ["https://example.org/a?b=c", "http://a:80"],
     ["http", "http://a b", "mailto:x"]),
    ({"type": "string", "format": "uri", "maxLength": 300}, ["mailto:x", "s3://a/b"], ["b"]),
    ({"type": "string", "format": "uri", "maxLength": 40}, ["https://example.org/a"], ["https://a.org/" + "a" * 27]),
    ({"type": "string", "format": "email", "maxLength": 16}, ["al@example.org"], ["anna@example.org1", "@a.de"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, ["a", "abc"], ["", "abcd", "A"]),
    ({"type": "string", "pattern": '^(ab|c)+"?$', "minLength": 3, "maxLength": 5}, ["abc", 'cc"', 'abab"'], ["ab"]),
    ({"type": "string", "pattern": "^\\u0061\\d$", "minLength": 1}, ["a1"], ["a", "a\u0661"]),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]},
     ["1.5", "-.5", "+3.", "007", 1.5], ["", "-", "+.", ".", "-+1", "a"]),
    ({"pattern": "^(?!^[-+.]*$)[+-]?0*(?:\\d{0,4}|(?=[\\d.]{1,7}0*$)\\d{0,4}\\.\\d{0,2}0*$)"},
     ["1.25", "1234", "1234.56", "-.5"], ["", "1.255", "12345", "-"]),
    ({"type": "array", "items": {"$ref": "#/$defs/C"}, "uniqueItems": True, "minItems": 1, "maxItems": 2,
      "$defs": {"C": {"enum": ["red", 'bl"ue', 3, 3.0, True]}}},
     [["red", 'bl"ue'], [3, True], ["red"]], [[], ["red", "red"], [3, 3.0], ["red", 3, True]]),
    ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[], [False, True]], [[True, True]]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [[], ["a"]], [["a", "b"]]),
    ({"type": "integer", "multipleOf": 5}, [0, 5, -10, 12345], [1, 12, -3]),
    ({"type": "integer", "multipleOf": 5, "exclusiveMinimum": 0}, [5, 100], [0, -5, 7]),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 100}, [7, 98], [0, 105, 8]),
    ({"type": "number", "multipleOf": 0.25, "minimum": 0}, [0, 0.25, 10.5, 2], [-0.25, 0.1, 1.2]),
    ({"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0}, [0.01, 1.1, 12], [0, 0.0, -1, 0.001]),
    ({"$ref": "#/$defs/Pet", "$defs": {
        "Pet": {"discriminator": {"propertyName": "kind", "mapping": {}},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        "Cat": {"properties": {"kind": {"const": "cat", "default": "cat"}, "lives": {}}, "required": ["lives"]},
        "Dog": {"properties": {"kind": {"const": "dog"}, "lives": {}}, "required": ["kind"]}}},
     [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"lives": 9}, {"kind": "dog", "name": 1}, {"kind": "fox"}]),
    ({"oneOf": [{"type": "integer"}, {"enum": ["a", None]}, {"type": "boolean"}]}, [5, "a", None, True], ["b"]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1], [2**31]),
    ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", 5]),
    ({"type": ["string", "null"], "format": "date", "pattern": "^20.*"}, ["2024-02-29", None], ["1999-01-01"]),
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
        {"type": "string", "format": "zip code"},
        {"type": "number", "format": "date"},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "minItems": 2},
        {"type": "integer", "multipleOf": 7, "minimum": 8},
        {"type": "integer", "multipleOf": 0},
        {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"properties": {"a": {}}}, {"properties": {"a": {}, "b": {}}}]},
        {"oneOf": [{"properties": {"a": {}}, "required": ["a"]}, {"required": ["b"]}]},
        {"allOf": [{}, {}]},
        {"properties": {"a": {"$ref": "#/$defs/none"}, "b": {"items": {"$ref": "#/$defs/none"}, "uniqueItems": True}}},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x"},
        {"$recursiveRef": "#"},
        {"type": []},
    ],
)
def test_what_the_library_would_ignore_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"'\$?\w+|no string|no list"):
        normal_schema(schema)


@pytest.mark.parametrize(
    "pattern",
    ["(?!ab)[ab]+", '(?!ab$)[ab"]+', "^(?!^[-.]*$)a?b*", '(?=.*b)[ab"]{2,4}', "a(?=b)[ab]+", "(?:a|b(?=a$)a*)$",
     "(?!a)(?!b).*", "[^a]+b", 'a.b|\\n', '(a|ab)("|b")?', "(?:ab){1,2}(?!a).*", "(?!.*aa).*", '\\W(?!b)["ab]*', "^$"],
)  # fmt: skip
def test_patterns_with_a_length_take_what_python_takes(compile_schema: Compile, pattern: str) -> None:
    """Also those that look ahead, which the libraries do not know or get wrong."""
    inner = pattern.removeprefix("^").removesuffix("$")
    expected = {text for text in TEXTS if len(text) >= 1 and re.fullmatch(inner.replace("$", r"\Z"), text)}
    if not expected:
        with pytest.raises(ValueError, match="no string has this"):
            compile_schema({"type": "string", "pattern": pattern, "minLength": 1})
        return
    compiled = compile_schema({"type": "string", "pattern": pattern, "minLength": 1})
    assert {text for text in TEXTS if accepts(compiled, json.dumps(text))} == expected


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_random_texts_of_a_format_are_valid(compile_schema: Compile, name: str) -> None:
    checker = pytest.importorskip(
        "jsonschema", reason="jsonschema is not installed"
    ).Draft202012Validator.FORMAT_CHECKER
    own, rng = FORMATS[name], random.Random(2)
    cuts = [{}, {"minLength": own.least + 3}] + ([{"maxLength": own.most + 1}] if own.most else [])
    for cut in cuts if own.most != own.least else [{}, {"minLength": own.least, "maxLength": own.least}]:
        compiled = compile_schema({"type": "string", "format": name, **cut})
        texts = [json.loads(text) for text in (written(compiled, rng) for _ in range(12)) if text is not None]
        assert texts
        for text in texts:
            assert checker.conforms(text, name), text
            assert cut.get("minLength", own.least) <= len(text) <= cut.get("maxLength", own.most or 999)
            assert re.fullmatch(own.pattern, text) or re.fullmatch(own.cut or "", text)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 12, 0.5, 0.2, 0.25, 0.01, 2.5, 0.125])
@pytest.mark.parametrize("bound", [{}, {"minimum": 0}, {"exclusiveMaximum": 0}])
def test_multiples_are_all_multiples(compile_schema: Compile, step: float, bound: dict[str, int]) -> None:
    compiled = compile_schema({"type": "number", "multipleOf": step, **bound})
    for thousandths in [*range(-3000, 3001, 125), *range(-60, 61), 12_000, 12_340]:
        value = Decimal(thousandths) / 1000
        text = f"{value.normalize():f}"
        fits = (not bound or value <= 0) if "exclusiveMaximum" in bound else (not bound or value >= 0)
        fits = fits and not ("exclusiveMaximum" in bound and value == 0)
        assert accepts(compiled, text) == (fits and value % Decimal(str(step)) == 0), text


def test_a_refusal_says_where(compile_schema: Compile) -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"anyOf": [{}, {"contains": {}}]}}}}
    with pytest.raises(ValueError, match=r"^in properties.a.items.anyOf.1: the keyword 'contains'"):
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


LONG = {
    "properties": {
        "url": {"anyOf": [{"type": "string", "format": "uri", "minLength": 1, "maxLength": 300}, {"type": "null"}]},
        "list": {"items": {"type": "string", "maxLength": 400}, "minItems": 1, "maxItems": 1},
        "free": {"type": "string"},
        "in": {"required": ["a\"b", "free"], "properties": {
            "a\"b": {"type": "string", "pattern": "^[a-z]*$", "maxLength": 500}, "free": {"type": "string"}}},
    },
    "required": ["url", "list", "free", "in"],
}  # fmt: skip


def test_long_strings_end_in_time(compile_schema: Compile) -> None:
    """A grammar that counts hundreds of characters takes long to compile; these are counted while they are written."""
    validators = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    longest = longest_strings(LONG)
    assert longest == Longest(300, ("url", "list", 'a"b'))
    compiled, judge = compile_schema(LONG), validators.Draft202012Validator(LONG)
    lengths: dict[str, set[int]] = {"url": set(), "list": set(), "free": set(), "in": set()}
    for seed in range(4):
        text = rambling(Matcher(compiled, VOCABULARY, [END], longest), random.Random(seed))
        value = json.loads(text)
        judge.validate(value)
        for key, strings in (("url", [value["url"]]), ("list", value["list"]), ("in", [value["in"]['a"b']]),
                             ("free", [value["free"], value["in"]["free"]])):  # fmt: skip
            lengths[key] |= {len(string) for string in strings if string is not None}
    assert max(lengths["free"]) > 400  # whoever has no limit has none
    assert all(150 < max(lengths[key]) <= 300 for key in ("url", "list", "in")), lengths


def rambling(matcher: Matcher, rng: random.Random) -> str:
    """A text that ends strings and lists seldom."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != END:
        bits = np.frombuffer(matcher.allowed(tokens) or b"\xff" * 36, np.uint8)
        choices = np.flatnonzero(np.unpackbits(bits, count=len(VOCABULARY), bitorder="little")).tolist()
        assert choices, b"".join(VOCABULARY[token] for token in tokens)
        ends = [token for token in choices if b'"' in VOCABULARY[token] or VOCABULARY[token][:1] in (b"]", b"n")]
        others = [token for token in choices if token not in ends and VOCABULARY[token].isascii()]
        tokens.append(rng.choice(others if others and rng.random() < 0.998 else ends or others or choices))
    return b"".join(VOCABULARY[token] for token in tokens[:-1]).decode()


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
