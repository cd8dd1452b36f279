"""Alternatives of JSON schemas: what a reference refers to, which values a schema lists, whether two can both hold.

Knows: `oneOf`, `discriminator`, `$ref`. Does not know: grammars, which keywords can be enforced.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 16  # of references followed, and of nested schemas examined
MAX_VALUES = 64  # whole numbers between two bounds
KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
Schema = dict[str, Any]


def resolved(schema: Any, root: Any, num_steps: int = MAX_STEPS) -> Any:
    """The schema a reference refers to, or the schema itself. Raises ValueError if there is none."""
    if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
        return schema
    name = schema["$ref"]
    if not name.startswith("#") or num_steps == 0:
        raise ValueError(f"the '$ref' {name[:80]!r} cannot be followed; refer to a definition in this schema")
    found = root
    for part in unquote(name[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            raise ValueError(f"the '$ref' {name[:80]!r} refers to nothing in this schema")
    return resolved(found, root, num_steps - 1)


def values_of(schema: Any, root: Any, num_steps: int = MAX_STEPS) -> list[Any] | None:
    """All values a schema allows if it lists them, else None."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or num_steps == 0:
        return None
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            parts = [values_of(part, root, num_steps - 1) for part in schema[name]]
            return None if None in parts else [value for part in parts for value in part or []]
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return [value for value in schema["enum"] if "type" not in schema or has_type(value, schema["type"])]
    return _listed_by_type(schema)


def _listed_by_type(schema: Schema) -> list[Any] | None:
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "boolean":
            return [False, True]
        case "null":
            return [None]
        case "integer" if type(low) is int and type(high) is int and high - low < MAX_VALUES and set(schema) <= _PLAIN:
            return list(range(low, high + 1))
    return None


_PLAIN = {"type", "minimum", "maximum", "title", "description", "default", "examples"}


def has_type(value: Any, kinds: Any) -> bool:
    """Whether a value has one of the types a schema names."""
    named = kinds if isinstance(kinds, list) else [kinds]
    return not set(_kinds_of(value)).isdisjoint(named)


def _kinds_of(value: Any) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("number", "integer")
        case float():
            return ("number", "integer") if value.is_integer() else ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)


# -- oneOf ------------------------------------------------------------------------------------------------------


def one_of(schema: Schema, root: Any) -> Schema:
    """The schema with `anyOf` for `oneOf`, if no value can match two alternatives. Raises ValueError otherwise."""
    if not isinstance(schema.get("oneOf"), list) or "anyOf" in schema:
        return schema
    tag = schema.get("discriminator")
    name = tag.get("propertyName") if isinstance(tag, dict) else None
    parts = [_tagged(part, name, root) if isinstance(name, str) else part for part in schema["oneOf"]]
    for (i, one), (j, other) in combinations(enumerate(parts), 2):
        if not _apart(one, other, root):
            raise ValueError(
                f"alternatives {i} and {j} of 'oneOf' may match the same value; use 'anyOf', or give each a required "
                "property with a 'const' of its own"
            )
    return {**{key: value for key, value in schema.items() if key not in ("oneOf", "discriminator")}, "anyOf": parts}


def _tagged(part: Any, name: str, root: Any) -> Any:
    """The alternative with the discriminating property `name` made required."""
    found = resolved(part, root)
    if not isinstance(found, dict) or name not in (found.get("properties") or {}) or name in found.get("required", []):
        return part
    return {**found, "required": [*found.get("required", []), name]}


def _apart(one: Any, other: Any, root: Any, num_steps: int = MAX_STEPS) -> bool:
    """Whether it is certain that no value written for one schema matches the other."""
    one, other = resolved(one, root), resolved(other, root)
    if not isinstance(one, dict) or not isinstance(other, dict) or num_steps == 0:
        return one is False or other is False
    for name in ("anyOf", "oneOf"):
        for own, rest in ((one, other), (other, one)):
            if isinstance(own.get(name), list):
                return all(_apart(part, rest, root, num_steps - 1) for part in own[name])
    shared = (_written(one, root) & _matched(other, root)) | (_matched(one, root) & _written(other, root))
    listed = [values_of(part, root) for part in (one, other)]
    if listed[0] is not None and listed[1] is not None:
        return not any(_equal(a, b) for a in listed[0] for b in listed[1])
    return not shared or (shared == {"object"} and _objects_apart(one, other, root, num_steps))


def _matched(schema: Schema, root: Any) -> set[str]:
    """The types of values that match a schema, whole numbers as numbers."""
    values = values_of(schema, root)
    if values is not None:
        kinds = {kind for value in values for kind in _kinds_of(value)}
    else:
        named = schema.get("type", KINDS)
        kinds = set(named) if isinstance(named, (list, tuple)) else {named}
    return {"number" if kind == "integer" else kind for kind in kinds}


def _written(schema: Schema, root: Any) -> set[str]:
    """The types of values that are written for a schema: keywords imply their type."""
    is_object = "type" not in schema and any(name in schema for name in ("properties", "required"))
    return {"object"} if is_object else _matched(schema, root)


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _objects_apart(one: Schema, other: Schema, root: Any, num_steps: int) -> bool:
    """Whether a property that both require differs, or each requires one that the other does not write."""
    ours, theirs = one.get("properties") or {}, other.get("properties") or {}
    needed, needed_there = set(one.get("required") or ()), set(other.get("required") or ())
    for name in needed & needed_there & set(ours) & set(theirs):
        if _apart(ours[name], theirs[name], root, num_steps - 1):
            return True
    return (
        _writes_only(one, ours)
        and _writes_only(other, theirs)
        and bool(needed_there - set(ours) - needed and needed - set(theirs) - needed_there)
    )


def _writes_only(schema: Schema, listed: Schema) -> bool:
    """Whether only the listed properties are written, the default for compiled objects."""
    return bool(listed) and schema.get("additionalProperties", False) is False and "patternProperties" not in schema
