"""Rewrites JSON schemas for the compiler: what cannot be enforced during generation is refused, not ignored.

Knows: the keywords of JSON Schema (draft 2020-12) and which of them the grammar library silently ignores, alone or
beside others. Does not know: grammars, requests. The compiled schema may allow less than the given one, never more:
every text it allows is valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from forerun.server.json_alternatives import has_type, one_of, resolved, values_of
from forerun.server.json_pattern import marked, other_than
from forerun.server.json_strings import longest_strings, with_string
from forerun.server.json_values import with_multiple, with_unique

IGNORED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems",
           "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef")  # fmt: skip
MAX_DEPTH = 64
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalProperties", "propertyNames", "additionalItems")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_VALUES, _BRANCHES = ("enum", "const"), ("anyOf", "oneOf", "allOf")
_ALTERNATIVES = ("$ref", *_BRANCHES, *_VALUES)  # the library ignores every other keyword next to one of these
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "additionalItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "unevaluatedProperties"),
}  # fmt: skip
_CONSTRAINTS = ("type", *(name for names in _OF_TYPE.values() for name in names))
_OTHER_KEYS = ("properties", "patternProperties", "unevaluatedProperties")  # these list properties too
Schema = dict[str, Any]


def normal_schema(schema: Any, root: Any = None, depth: int = 0, longest: int | None = None) -> Any:
    """The schema to compile; raises ValueError naming what cannot be enforced, and where.

    Objects that list their properties are closed unless they say otherwise: every text is still valid, and a model does
    not invent more. Properties that are required but not described may hold anything. `root`: what references refer to;
    `longest`: string lengths from this on are enforced outside of the grammar.
    """
    root = schema if root is None else root
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        return schema
    bad = [name for name in IGNORED if name in schema]
    if bad:
        raise ValueError(f"the keyword {bad[0]!r} cannot be enforced while a text is written; leave it out")
    if schema.get("type") == []:
        raise ValueError("'type' names no type; name one or leave it out")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise ValueError("'allOf' with several schemas cannot be enforced; merge them into one")
    made = with_string(_object(_alone(_by_value(schema, root))), longest)
    return _mapped(made, lambda part: normal_schema(part, root, depth + 1, longest))


def _by_value(schema: Schema, root: Any) -> Schema:
    """Keywords that can be expressed by listing values or alternatives, rewritten."""
    items = schema.get("items")
    values = values_of(resolved(items, root), root) if schema.get("uniqueItems") and isinstance(items, dict) else None
    return with_multiple(with_unique(one_of(schema, root), values))


def moved(schema: Any, place: str, depth: int = 0) -> Any:
    """The schema as a part of another one at `place` ("#/$defs/x"): its own references are prefixed by that place.

    Raises ValueError if it is nested too deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        return schema
    made = _mapped(schema, lambda part: moved(part, place, depth + 1))
    target = made.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        made["$ref"] = place + target[1:]
    return made


def _mapped(schema: Schema, change: Callable[[Any], Any]) -> Schema:
    """The schema with every schema directly in it changed. A ValueError is raised again with the place."""
    made = dict(schema)
    for name in _MAPS:
        if isinstance(made.get(name), dict):
            made[name] = {key: _at(f"{name}.{key}", change, value) for key, value in made[name].items()}
    for name in _ONES:
        if name in made:
            made[name] = _at(name, change, made[name])
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [_at(f"{name}.{i}", change, value) for i, value in enumerate(made[name])]
    return made


def _at(place: str, change: Callable[[Any], Any], part: Any) -> Any:
    try:
        return change(part)
    except ValueError as error:
        inner = str(error)
        raise ValueError(f"in {place[:80]}{'.' + inner[3:] if inner.startswith('in ') else ': ' + inner}") from error


def schema_text(schema: Any) -> str:
    """The JSON text of a schema, ready to compile; raises ValueError."""
    longest = longest_strings(schema)
    return json.dumps(normal_schema(schema, longest=longest.length if longest else None), ensure_ascii=False)


# -- keywords that decide alone, and types ----------------------------------------------------------------------


def _alone(schema: Schema) -> Schema:
    """The schema as the library reads it: one keyword of _ALTERNATIVES by itself, or keywords with an explicit type."""
    found = [name for name in _ALTERNATIVES if name in schema]
    if not found:
        return _typed(schema)
    head, *more = found
    made = dict(schema)
    if head in _VALUES:
        made = _of_type(made, head)
    elif head in _BRANCHES:
        made = _type_into(made, head)
    beside = [*more, *(name for name in _CONSTRAINTS if name in made)]
    if beside:
        raise ValueError(f"{beside[0]!r} beside {head!r} cannot be enforced; write it into {head!r} or leave it out")
    return made


def _typed(schema: Schema) -> Schema:
    """The schema with the types that its keywords imply; values of other types would be valid but are not written."""
    kinds = [kind for kind, names in _OF_TYPE.items() if any(name in schema for name in names)]
    if "type" in schema or not kinds:
        return dict(schema)
    return {**schema, "type": kinds[0] if len(kinds) == 1 else kinds}


def _of_type(schema: Schema, head: str) -> Schema:
    """The schema without the values of its enumeration that do not have its type."""
    made = dict(schema)
    kinds = made.pop("type", None)
    if kinds is None:
        return made
    values = made[head] if head == "enum" else [made[head]]
    kept = [value for value in values if has_type(value, kinds)] if isinstance(values, list) else values
    if not kept:
        raise ValueError(f"no value of {head!r} has the type {kinds!r}")
    return {**made, head: kept} if head == "enum" else made


def _type_into(schema: Schema, head: str) -> Schema:
    """The schema with a type beside alternatives moved into each of them."""
    made = dict(schema)
    kind = made.get("type")
    if kind is None or not isinstance(made[head], list):
        return made
    del made["type"]
    return {**made, head: [_with_type(branch, kind, head) for branch in made[head]]}


def _with_type(branch: Any, kind: Any, head: str) -> Any:
    if branch is True:
        return {"type": kind}
    if not isinstance(branch, dict) or branch.get("type") == kind:
        return branch
    if "type" in branch or any(name in branch for name in ("$ref", *_BRANCHES)):
        raise ValueError(f"'type' beside {head!r} cannot be enforced; write it into each alternative")
    return {**branch, "type": kind}


# -- objects ----------------------------------------------------------------------------------------------------


def _object(schema: Schema) -> Schema:
    """The keys an object may have, expressed in a way that the library enforces."""
    listed = schema.get("properties")
    if not isinstance(listed or {}, dict):
        return schema
    made = _closed(_with_required(schema))
    keys_open = made.get("additionalProperties") is not False or "patternProperties" in made
    least = made.get("minProperties")
    if keys_open and isinstance(least, int) and least > 1:
        raise ValueError("'minProperties' above 1 cannot be enforced where a key may be written twice; list the keys")
    return made


def _with_required(schema: Schema) -> Schema:
    """The schema with properties listed that are required but were not listed."""
    listed, required = schema.get("properties") or {}, schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    missing = [name for name in names if name not in listed]
    if not missing:
        return dict(schema)
    others = schema.get("additionalProperties", True)
    if others is False or "patternProperties" in schema:
        raise ValueError(f"the property {missing[0]!r} is required, but 'properties' does not list it")
    return {**schema, "properties": {**listed, **dict.fromkeys(missing, {} if others is True else others)},
            "additionalProperties": schema.get("additionalProperties", "properties" not in schema)}  # fmt: skip


def _closed(schema: Schema) -> Schema:
    made = dict(schema)
    if "propertyNames" in made and (set(_OTHER_KEYS) & set(made) or made.get("additionalProperties") is False):
        raise ValueError("'propertyNames' beside keywords that list properties cannot be enforced; leave it out")
    if made.pop("unevaluatedProperties", True) is not True:
        if schema["unevaluatedProperties"] is not False or "additionalProperties" in schema:
            raise ValueError("'unevaluatedProperties' cannot be enforced; use 'additionalProperties'")
        made["additionalProperties"] = False
    if "patternProperties" in made:
        return _with_patterns(made)
    if "properties" in made:
        made.setdefault("additionalProperties", False)
    if made.get("properties") and made.get("additionalProperties") is not False:
        return _others_apart(made)
    return made


def _with_patterns(schema: Schema) -> Schema:
    """Keys by a pattern: at most one pattern, which no listed key matches, and no other keys."""
    patterns = schema["patternProperties"]
    if not isinstance(patterns, dict) or len(patterns) > 1 or schema.get("additionalProperties", False) is not False:
        raise ValueError("'patternProperties' can be enforced with one pattern and without 'additionalProperties'")
    for pattern in patterns:
        if any(_may_match(pattern, name) for name in schema.get("properties") or {}):
            raise ValueError("'patternProperties' cannot be enforced on listed properties that match the pattern")
    marks = {marked(pattern): value for pattern, value in patterns.items()}
    return {**schema, "patternProperties": marks, "additionalProperties": False}


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # an expression of another dialect
        return True


def _others_apart(schema: Schema) -> Schema:
    """Other keys as a pattern that no listed key matches; else the library would allow a listed key twice."""
    rest = {marked(other_than(list(schema["properties"]))): schema["additionalProperties"]}
    return {**schema, "patternProperties": rest, "additionalProperties": False}
