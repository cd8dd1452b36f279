"""JSON schemas as they are compiled: what cannot be enforced while a text is written is refused, not ignored.

Knows: the keywords of JSON Schema and which of them the grammar library passes over in silence. Does not know:
grammars, requests. Standard library only.
"""

from __future__ import annotations

import json
from typing import Any

from forerun.server.json_pattern import marked

IGNORED = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems")
MAX_DEPTH = 64
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalProperties", "propertyNames", "contains", "additionalItems", "unevaluatedProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def normal_schema(schema: Any, depth: int = 0) -> Any:
    """The schema as it is compiled; raises ValueError naming what cannot be enforced.

    Objects that list their properties are closed unless they say otherwise: every text is still valid, and a model does
    not invent more. Properties that are required but not described may hold anything.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        return schema
    bad = [name for name in IGNORED if name in schema] + ["uniqueItems"] * bool(schema.get("uniqueItems"))
    if bad:
        raise ValueError(f"the keyword {bad[0]!r} cannot be enforced while a text is written; leave it out")
    made = dict(schema)
    if isinstance(made.get("pattern"), str):
        made["pattern"] = marked(made["pattern"])
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {marked(key): value for key, value in made["patternProperties"].items()}
    for name in _MAPS:
        if isinstance(made.get(name), dict):
            made[name] = {key: normal_schema(value, depth + 1) for key, value in made[name].items()}
    for name in _ONES:
        if name in made:
            made[name] = normal_schema(made[name], depth + 1)
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [normal_schema(value, depth + 1) for value in made[name]]
    return _closed(made)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list) and isinstance(properties or {}, dict):
        missing: dict[str, Any] = {
            name: {} for name in required if isinstance(name, str) and name not in (properties or {})
        }
        properties = {**(properties or {}), **missing} if missing else properties
    if not isinstance(properties, dict):
        return schema
    is_open = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"} & set(schema)
    listed = "properties" in schema
    return {**schema, "properties": properties, **({} if is_open or not listed else {"additionalProperties": False})}


def schema_text(schema: Any) -> str:
    """The JSON text of a schema, ready to compile; raises ValueError."""
    return json.dumps(normal_schema(schema), ensure_ascii=False)
