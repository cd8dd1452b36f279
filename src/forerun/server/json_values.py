"""Values of JSON schemas that the grammar library knows no grammar for: multiples, and lists without repetition.

Knows: `multipleOf` and `uniqueItems`, and how grammars are written as text. Does not know: schemas around them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from forerun.server.json_pattern import marked_value

MAX_RULES = 4096
MAX_LISTED = 1024  # multiples between two bounds
MAX_MULTIPLE = 1000
Schema = dict[str, Any]
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


# -- multiples --------------------------------------------------------------------------------------------------


def with_multiple(schema: Schema) -> Schema:
    """The schema with `multipleOf` rewritten so that it is enforced. Raises ValueError if it cannot be."""
    if "multipleOf" not in schema:
        return schema
    step, kind = schema["multipleOf"], schema.get("type", "number")
    if type(step) not in (int, float) or not math.isfinite(step) or step <= 0:
        raise ValueError(f"'multipleOf' must be a number above 0, got {step!r}")
    if kind not in ("integer", "number"):
        raise ValueError("'multipleOf' can be enforced on the type 'integer' or 'number' alone")
    made = {name: value for name, value in schema.items() if name not in ("multipleOf", "type", *_BOUNDS)}
    exact = Fraction(Decimal(str(step)))
    exact = exact if kind == "number" else Fraction(exact.numerator)  # integer multiples of a/b are multiples of a
    low, high = _range(schema, exact)
    if low is not None and high is not None and high - low < MAX_LISTED:
        listed = [_number(n * exact) for n in range(low, high + 1)]
        if not listed:
            raise ValueError(f"'multipleOf': no multiple of {step} is between the bounds")
        return {**made, "enum": listed}
    if low not in (None, 0, 1) or high not in (None, 0, -1):
        raise ValueError(
            f"'multipleOf' can be enforced beside a bound of 0, or two with at most {MAX_LISTED} multiples between"
        )
    num_places = _num_places(exact)
    if exact * 10**num_places > MAX_MULTIPLE:
        raise ValueError(f"'multipleOf' can be enforced up to {MAX_MULTIPLE} in its last digit, got {step}")
    signs = "".join(sign for sign, bound in (("+", high), ("-", low)) if bound is None)
    has_zero = low != 1 and high != -1
    spec = [int(exact * 10**num_places), num_places, signs, has_zero]
    return {**made, "const": marked_value(json.dumps(spec), "multiple")}


def _range(schema: Schema, step: Fraction) -> tuple[int | None, int | None]:
    """The first and last multiple, counted in steps."""
    lows = [math.ceil(_fraction(schema["minimum"]) / step)] if "minimum" in schema else []
    lows += [math.floor(_fraction(schema["exclusiveMinimum"]) / step) + 1] if "exclusiveMinimum" in schema else []
    highs = [math.floor(_fraction(schema["maximum"]) / step)] if "maximum" in schema else []
    highs += [math.ceil(_fraction(schema["exclusiveMaximum"]) / step) - 1] if "exclusiveMaximum" in schema else []
    return max(lows, default=None), min(highs, default=None)


def _fraction(bound: Any) -> Fraction:
    if type(bound) not in (int, float) or not math.isfinite(bound):
        raise ValueError(f"a bound must be a number, got {bound!r}")
    return Fraction(Decimal(str(bound)))


def _num_places(value: Fraction) -> int:
    """Digits after the decimal point."""
    return next(places for places in range(400) if (value * 10**places).denominator == 1)


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def multiple_grammar(text: str) -> str:
    """The text of a grammar for numbers whose digits, without the point, form a multiple: one rule per remainder.

    Rules are called root_PLACE_REMAINDER, place 1 before the point, and root_PLACE_z where all digits so far are 0.
    """
    step, num_places, signs, has_zero = json.loads(text)
    if step * (num_places + 1) > MAX_RULES:
        raise ValueError("'multipleOf' has too many digits to be enforced")
    live = _live(step, num_places)
    starts = ['"0"'] * has_zero + [{"+": "root_0", "-": '("-" root_0)'}[sign] for sign in signs]
    lines = ["root ::= " + " | ".join(starts)]
    zeros = _zero_rules(step, live, has_zero)
    first = [f'("{digit}" root_1_{digit % step})' for digit in range(1, 10)]
    lines.append("root_0 ::= " + " | ".join([*first, *(['("0" root_2_z)'] if 0 in zeros else [])]))
    for rest in range(step):
        ways = [f'("{digit}" root_1_{(10 * rest + digit) % step})' for digit in range(10)]
        ways += [f"root_2_{rest}"] if num_places and rest in live[0] else []
        ways += ['""'] if rest * 10**num_places % step == 0 else []
        lines.append(f"root_1_{rest} ::= {' | '.join(ways)}")
    for place in range(num_places):
        rules = {str(rest): _ways(rest, place, step, live) for rest in sorted(live[place])}
        rules |= {"z": zeros[place]} if place in zeros else {}
        point = '"." ' if place == 0 else ""
        lines += [f"root_{place + 2}_{name} ::= {point}({' | '.join(ways)})" for name, ways in rules.items()]
    return "\n".join(lines)


def _zero_rules(step: int, live: Sequence[set[int]], has_zero: bool) -> dict[int, list[str]]:
    """By place after the point, the continuations when all digits so far are 0, where there are any."""
    zeros: dict[int, list[str]] = {}
    for place in reversed(range(len(live) - 1)):
        ways = ['"0"'] * has_zero + _ways(0, place, step, live, range(1, 10))
        ways += [f'("0" root_{place + 3}_z)'] if place + 1 in zeros else []
        if ways:
            zeros[place] = ways
    return zeros


def _live(step: int, num_places: int) -> list[set[int]]:
    """By place after the point, the remainders that the digits from there on can bring to 0."""
    live = [{0}]
    for _ in range(num_places):
        live.insert(0, {rest for rest in range(step) if any((10 * rest + d) % step in live[0] for d in range(10))})
    return live


def _ways(rest: int, place: int, step: int, live: Sequence[set[int]], digits: Iterable[int] = range(10)) -> list[str]:
    """A digit after the point and what follows: more digits, or the end if only zeros are missing."""
    ways = []
    for digit in digits:
        after, num_left = (10 * rest + digit) % step, len(live) - place - 2
        if num_left and after in live[place + 1]:
            ways.append(f'("{digit}" root_{place + 3}_{after})')
        if after * 10**num_left % step == 0:
            ways.append(f'"{digit}"')
    return ways


# -- lists without repetition -----------------------------------------------------------------------------------


def with_unique(schema: Schema, values: Sequence[Any] | None) -> Schema:
    """The schema with `uniqueItems` rewritten so that it is enforced: values in the order of the schema's list.

    `values`: what items may be, None if the schema does not list it. Raises ValueError where that cannot be enforced.
    """
    if not schema.get("uniqueItems"):
        return {name: value for name, value in schema.items() if name != "uniqueItems"}
    made = {
        name: value for name, value in schema.items() if name not in ("uniqueItems", "items", "minItems", "maxItems")
    }
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if most in (0, 1):
        return {**made, **{name: schema[name] for name in ("items", "minItems", "maxItems") if name in schema}}
    if values is None or "prefixItems" in schema or schema.get("type", "array") != "array":
        raise ValueError(
            "'uniqueItems' can be enforced where 'items' lists its values (an enum, constants, booleans) or 'maxItems' "
            "is 1; leave it out"
        )
    texts = list({_key(value): json.dumps(value, ensure_ascii=False) for value in reversed(values)}.values())[::-1]
    most = len(texts) if most is None else min(most, len(texts))
    if not (type(least) is int and type(most) is int and 0 <= least <= most):
        raise ValueError(
            f"no list has from {least} to {schema.get('maxItems', 'any number of')} of {len(texts)} values"
        )
    made.pop("type", None)
    return {**made, "const": marked_value(json.dumps([texts, least, most]), "unique")}


def _key(value: Any) -> tuple[str, Any]:
    """A key that is equal for values that are equal in JSON Schema."""
    if isinstance(value, (list, dict)):
        raise ValueError("'uniqueItems' cannot be enforced on lists or objects; leave it out")
    return "boolean" if isinstance(value, bool) else "number" if isinstance(value, (int, float)) else str(
        type(value)
    ), value


def unique_grammar(text: str) -> str:
    """The text of a grammar for lists of different values in a fixed order: one rule per place and count so far."""
    texts, least, most = json.loads(text)
    if len(texts) * (most + 1) > MAX_RULES:
        raise ValueError(f"'uniqueItems' over {len(texts)} values takes too many rules; give 'maxItems'")
    lines = [f'root ::= "[" {_from(0, 0)}']
    for count in range(most + 1):
        for place in range(len(texts) + 1):
            ways = []
            if place < len(texts):
                if count < most and count + 1 + len(texts) - place - 1 >= least:
                    ways.append(f"({_literal((', ' if count else '') + texts[place])} {_from(place + 1, count + 1)})")
                if count + len(texts) - place - 1 >= least:
                    ways.append(_from(place + 1, count))
            elif count >= least:
                ways.append('"]"')
            if ways:
                lines.append(f"{_from(place, count)} ::= {' | '.join(ways)}")
    return "\n".join(lines)


def _from(place: int, count: int) -> str:
    return f"root_{place + 1}_{count}"


def _literal(text: str) -> str:
    return '"' + "".join(f"\\U{ord(character):08x}" for character in text) + '"'
