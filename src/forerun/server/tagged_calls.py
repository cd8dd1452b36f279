"""Reads tool calls whose parameters stand one by one between tags: Qwen3-Coder, GLM, LongCat, MiniMax, DSML, Gemma 4.

Knows: how each of these writes a name, a parameter and the end of a call, and what a parameter's schema makes of its
text. Does not know: the marks around calls, HTTP, tokens. A parameter is passed on when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from forerun.server.call_readers import CallPiece, read_json, written_json

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]  # parameters' JSON schema by function name


class Parameter(NamedTuple):
    """A complete parameter: its value as JSON, and where it ends in the text."""

    key: str
    value: str
    end: int


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes a call."""

    begin: re.Pattern[str]  # group 1: the name
    read: Callable[[str, Schema], Parameter | None]  # text, schema of the function -> its first parameter
    end: re.Pattern[str] | None  # None: a call ends with its stretch, and one without arguments is a name alone
    last: str = ">"  # characters that can complete one of these; nothing is looked for before one arrives


@dataclass(slots=True)
class TaggedCalls:
    """Calls in one form, any number of them."""

    form: CallForm
    functions: Functions
    rest: str | None = None
    num_calls: int = 0
    _held: str = ""
    _name: str = ""
    _num_parameters: int | None = None  # of the call that is being read

    def feed(self, text: str) -> list[CallPiece]:
        """What is certain now."""
        if self.rest is not None:
            self.rest += text
            return []
        self._held += text
        pieces: list[CallPiece] = []
        if any(character in self.form.last for character in text):
            while any(character in self._held for character in self.form.last) and self._advance(pieces):
                pass
        return pieces

    def _advance(self, pieces: list[CallPiece]) -> bool:
        if self._num_parameters is None:
            return self._begin(pieces)
        if found := self.form.read(self._held, self.functions.get(self._name, {})):
            lead = ", " if self._num_parameters else "{"
            pieces.append(CallPiece(None, f"{lead}{written_json(found.key)}: {found.value}"))
            self._num_parameters += 1
            self._held = self._held[found.end :]
        elif self.form.end and (end := self.form.end.match(self._held)):
            pieces.append(self._closed())
            self._held = self._held[end.end() :]
        else:
            return False
        return True

    def _begin(self, pieces: list[CallPiece]) -> bool:
        found = self.form.begin.match(self._held)
        if found is None:
            self.rest, self._held = self._held, ""
            return False
        self._held = self._held[found.end() :]
        pieces.append(self._opened(found[1].strip()))
        return True

    def _opened(self, name: str) -> CallPiece:
        self.num_calls, self._num_parameters, self._name = self.num_calls + 1, 0, name
        return CallPiece(name)

    def _closed(self) -> CallPiece:
        end = "}" if self._num_parameters else "{}"
        self._num_parameters = None
        return CallPiece(None, end)

    def finish(self) -> list[CallPiece]:
        """A call whose end never came ends here, unless it stopped in a parameter."""
        held = self._held.strip()
        if self.rest is None and self.form.end is None and self._num_parameters is None and held in self.functions:
            self._held = ""
            return [self._opened(held), self._closed()]
        if self.rest is None and (held or not self.num_calls):
            self.rest = self._held
            return []
        return [] if self._num_parameters is None else [self._closed()]


# -- values -----------------------------------------------------------------------------------------------------


def typed(text: str, schema: Any, root: Schema) -> str:
    """A parameter's text as JSON of a type its schema allows; without one, JSON if it is JSON, else a string.

    `root`: what the schema's references point into.
    """
    kinds = set(_kinds(schema, root))
    if kinds == {"string"}:
        return written_json(text)
    for spelled in (text, _FROM_PYTHON.get(text.strip(), "")):
        value = _json(spelled)
        if value is not None and (kinds & _kinds_of(value) or (not kinds and spelled == text)):
            return value
    return written_json(text) if not kinds or "string" in kinds else _json(text) or written_json(text)


_FROM_PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates show models earlier values like this
MAX_SCHEMAS = 1000  # that are looked into for types


def _kinds(schema: Any, root: Schema) -> Iterator[str]:
    """Names of the JSON types a schema allows; none if it does not say. Each schema within it is read once."""
    seen, waiting = set[int](), [schema]
    while waiting and len(seen) < MAX_SCHEMAS:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        named = schema.get("type")
        yield from (name for name in [named, *_list(named)] if isinstance(name, str))
        for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            if named is None:
                yield from _kinds_of(json.dumps(value))
        waiting += [*_list(schema.get("anyOf")), *_list(schema.get("oneOf")), *_list(schema.get("allOf"))]
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(_referred(reference, root))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Schema) -> Any:
    """The part of `root` that "#/$defs/name" points at; None if there is none."""
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _kinds_of(text: str) -> set[str]:
    """The types that allow the value of JSON text."""
    first = text.lstrip()[:1]
    if first in "-0123456789":
        whole = float(text).is_integer() if len(text) < MAX_NUMBER else text.lstrip("-").isdigit()
        return {"number", "integer"} if whole else {"number"}
    return {{'"': "string", "{": "object", "[": "array", "n": "null"}.get(first, "boolean")}


MAX_NUMBER = 300  # characters; longer ones do not fit in a float


def _json(text: str) -> str | None:
    """The text as JSON that an answer can hold; None if it is none."""
    try:
        return written_json(read_json(text))
    except ValueError:
        return None


def _property(key: str, schema: Schema) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


# -- forms ------------------------------------------------------------------------------------------------------


def _tagged(pattern: str) -> Callable[[str, Schema], Parameter | None]:
    """Reads parameters of a pattern: group 1 is the key, 2 the text; a group "string" of "true" makes it a string."""
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str, schema: Schema) -> Parameter | None:
        found = compiled.match(text)
        if found is None:
            return None
        key, groups = found[1].strip(), found.groupdict()
        kind = {"type": "string"} if groups.get("string") == "true" else _property(key, schema)
        return Parameter(key, typed(found["value"], kind, schema), found.end())

    return read


_LEXEME = re.compile(
    r'<\|"\|>(?P<string>.*?)<\|"\|>|(?P<sign>[{}\[\],:])|(?P<bare>(?:(?!<\|"\|>)[^{}\[\],:])+)', re.DOTALL
)


def _gemma_parameter(text: str, schema: Schema) -> Parameter | None:
    """`key:value` up to a "," or the call's "}"; strings stand between <|"|>, names of members stand bare."""
    key, made, depth, place = None, list[str](), 0, len(text) - len(text.lstrip(", \t\r\n"))
    begin = place
    while found := _LEXEME.match(text, place):  # none where a string is not complete
        sign = found["sign"] or ""
        if depth == 0 and sign and sign in ",}":
            return None if key is None else _member(key, text[begin:place].strip(), "".join(made), place, schema)
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(sign, 0)
        made.append(sign or _gemma_word(found, text))
        place = found.end()
        if depth == 0 and sign == ":" and key is None:
            key, made, begin = "".join(made[:-1]), [], place
    return None


def _gemma_word(found: re.Match[str], text: str) -> str:
    """A string or a bare word as JSON; a word before ":" is a name."""
    if found["string"] is not None:
        return written_json(found["string"])
    word = found["bare"].strip()
    is_name = text[found.end() : found.end() + 1] == ":"
    return "" if not word else written_json(word) if is_name else _json(word) or written_json(word)


def _member(key: str, text: str, made: str, end: int, schema: Schema) -> Parameter | None:
    """A parameter whose key is JSON, and whose value is `text`, which was `made` into what should be JSON."""
    try:
        name = read_json(key)
    except ValueError:
        return None
    if not isinstance(name, str):
        return None
    value = _json(made) if _MARK.search(text) else None
    if value is None or not value.startswith('"'):
        value = typed(value or text, _property(name, schema), schema)
    return Parameter(name, value, end)


_MARK = re.compile(r'<\|"\|>|[{}\[\]]')  # none in a bare value


QWEN = CallForm(
    re.compile(r"\s*<function=([^>]+)>"),
    _tagged(r"\s*<parameter=([^>]+)>\n?(?P<value>.*?)\n?</parameter>"),
    re.compile(r"\s*</function>"),
)


def _keyed(mark: str) -> CallForm:
    """Keys and values in turn, between tags whose names begin with `mark`."""
    key, value = f"{mark}_key", f"{mark}_value"
    return CallForm(
        re.compile(rf"\s*([^\s<>]+)\s*(?=<{key}>)"),
        _tagged(rf"\s*<{key}>(.*?)</{key}>\s*<{value}>(?P<value>.*?)</{value}>"),
        None,
    )


GLM, LONGCAT = _keyed("arg"), _keyed("longcat_arg")
MINIMAX = CallForm(
    re.compile(r'\s*<invoke name="([^">]+)">'),
    _tagged(r'\s*<parameter name="([^">]+)">(?P<value>.*?)</parameter>'),
    re.compile(r"\s*</invoke>"),
)
DSML = CallForm(
    re.compile(r'\s*<｜DSML｜invoke name="([^">]+)">'),
    _tagged(
        r'\s*<｜DSML｜parameter name="([^">]+)"(?: string="(?P<string>true|false)")?>(?P<value>.*?)</｜DSML｜parameter>'
    ),
    re.compile(r"\s*</｜DSML｜invoke>"),
)
GEMMA = CallForm(re.compile(r"\s*call:([^\s{},<>]+)\{"), _gemma_parameter, re.compile(r"[\s,]*\}"), last="{},")
