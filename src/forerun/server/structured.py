"""The fields of requests that ask for structured output: schemas, regular expressions, grammars, choices.

Knows: these fields and their meanings. Does not know: how grammars are compiled and applied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.server.bodies import check_parts
from forerun.server.errors import ApiError
from forerun.server.schema import SamplingBody

ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an output must match."""

    kind: str  # "json" (a schema), "regex" or "grammar" (GBNF)
    text: str
    param: str = field(default="response_format", compare=False)  # the field that asks for it


def grammar_spec(body: SamplingBody) -> GrammarSpec | None:
    """The structure a request asks for; raises ApiError if it is malformed or asked for twice."""
    found = {name: spec for name, spec in _asked(body) if spec is not None}
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} were given: give one of them", param=next(iter(found)))
    return next(iter(found.values()), None)


def _asked(body: SamplingBody) -> list[tuple[str, GrammarSpec | None]]:
    outputs, form = body.structured_outputs, body.response_format
    asked = [
        ("response_format", _from_format(body) if form is not None else None),
        ("guided_json", json_spec("guided_json", body.guided_json)),
        ("guided_regex", _spec("guided_regex", "regex", body.guided_regex)),
        ("guided_choice", _choice_spec("guided_choice", body.guided_choice)),
        ("guided_grammar", _spec("guided_grammar", "grammar", body.guided_grammar)),
    ]
    if outputs is None:
        return asked
    name = "structured_outputs"
    return asked + [
        (f"{name}.json", json_spec(name, outputs.json_)),
        (f"{name}.regex", _spec(name, "regex", outputs.regex)),
        (f"{name}.choice", _choice_spec(name, outputs.choice)),
        (f"{name}.grammar", _spec(name, "grammar", outputs.grammar)),
        (f"{name}.json_object", GrammarSpec("json", ANY_OBJECT, name) if outputs.json_object else None),
    ]


def _from_format(body: SamplingBody) -> GrammarSpec | None:
    form = body.response_format
    assert form is not None
    if form.type == "text":
        return None
    if form.type == "json_object":
        return GrammarSpec("json", ANY_OBJECT)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(400, "response_format json_schema needs json_schema.schema", param="response_format")
    return json_spec("response_format", form.json_schema.schema_)


def json_spec(param: str, schema: Any) -> GrammarSpec | None:
    """The grammar of a JSON schema (an object, or its text); raises ApiError naming `param`."""
    if schema is None:
        return None
    if isinstance(schema, str):
        check_parts(schema.encode())
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        return GrammarSpec("json", json.dumps(value, ensure_ascii=False), param)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{param}: this is not JSON: {error}", param=param, code="invalid_grammar") from error


def _spec(param: str, kind: str, text: str | None) -> GrammarSpec | None:
    return None if text is None else GrammarSpec(kind, text, param)


def _choice_spec(param: str, choices: Sequence[str] | None) -> GrammarSpec | None:
    if choices is None:
        return None
    if not choices:
        raise ApiError(400, f"{param}: the list of choices is empty: give at least one", param=param)
    listed = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return GrammarSpec("grammar", f"root ::= {listed}", param)
