"""Strings of JSON schemas: a pattern, a format and a length together, as one expression or one automaton.

Knows: the formats, as expressions that match valid texts only, and how lengths limit them. Does not know: the rest of a
schema, grammars beyond how the library writes one as text. Several conditions are intersected by the package
interegular; a single expression stays as it is.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple

import interegular
from interegular.fsm import FSM, Alphabet, anything_else

from forerun.server.json_pattern import marked

MAX_STATES = 4096  # of an automaton: each becomes a rule
COUNTED = 256  # lengths from so many characters on are enforced outside of the grammar
Lengths = tuple[int, int | None]


class Format(NamedTuple):
    """An expression for a format: matches only valid texts, perhaps not all; `least` and `most` bound their lengths.

    `cut`: a simpler expression without counts, to combine with another length or a pattern; valid up to
    `most_cut` characters.
    """

    pattern: str
    least: int
    most: int | None = None
    cut: str | None = None
    most_cut: int | None = None


_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HOURS = "([0-9]{1,3}H([0-9]{1,3}M([0-9]{1,3}S)?)?|[0-9]{1,3}M([0-9]{1,3}S)?|[0-9]{1,3}S)"
_LABEL = "[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20})?"
_HOST = f"{_LABEL}(\\.{_LABEL}){{0,2}}"
_DOMAIN = f"{_LABEL}(\\.{_LABEL})?\\.[A-Za-z]{{2,10}}"
_SIMPLE_HOST = "[A-Za-z0-9]+([.-][A-Za-z0-9]+)*"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(\\.{_BYTE}){{3}}"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (f"({_H}:){{7}}{_H}", f"({_H}:){{1,7}}:", f"({_H}:){{1,6}}:{_H}",
     *(f"({_H}:){{1,{7 - n}}}(:{_H}){{1,{n}}}" for n in range(2, 7)), f":((:{_H}){{1,7}}|:)")
)  # fmt: skip
_X = "[0-9a-fA-F]"
_TOKEN = '[^\\x00-\\x1f/~"\\\\]|~[01]'  # a character of a JSON pointer
_MOST_HTTP_URL = 2083  # pydantic's length of HttpUrl, an old limit of browsers


def _uuid(version: str) -> Format:
    return Format(
        f"{_X}{{8}}-{_X}{{4}}-{version}{_X}{{3}}-{'[89abAB]' if version != _X else _X}{_X}{{3}}-{_X}{{12}}", 36, 36
    )


_PATH = "[A-Za-z0-9._~!$&'()*+,;=:@/?-]"
_SIMPLE_URI = f"[A-Za-z][A-Za-z0-9+.-]{{1,10}}:(//{_SIMPLE_HOST}([/?]{_PATH}*)?|[A-Za-z0-9]{_PATH}*)"


FORMATS: dict[str, Format] = {
    "date": Format(_DATE, 10, 10),
    "time": Format(_TIME, 9, 21),
    "date-time": Format(f"{_DATE}T{_TIME}", 20, 32),
    "duration": Format(f"P([0-9]{{1,3}}W|[0-9]{{1,5}}D(T{_HOURS})?|T{_HOURS})", 3, 20),
    "email": Format(
        f"[A-Za-z0-9_+-]{{1,30}}(\\.[A-Za-z0-9_+-]{{1,30}})?@{_DOMAIN}",
        6,
        156,
        f"[A-Za-z0-9_+-]+(\\.[A-Za-z0-9_+-]+)*@{_SIMPLE_HOST}\\.[A-Za-z]{{2,4}}",
        63,
    ),
    "hostname": Format(_HOST, 1, 125, _SIMPLE_HOST, 63),
    "ipv4": Format(_IPV4, 7, 15),
    "ipv6": Format(_IPV6, 2, 39),
    "ipvanyaddress": Format(f"{_IPV4}|{_IPV6}", 2, 39),
    "uuid": _uuid(_X),
    **{f"uuid{n}": _uuid(str(n)) for n in range(1, 9)},
    "uri": Format(_SIMPLE_URI, 4),
    "http-url": Format(f"https?://{_SIMPLE_HOST}(:[1-9][0-9]{{0,3}})?([/?]{_PATH}*)?", 8),
    "uri-reference": Format(f"({_SIMPLE_URI}|/?([A-Za-z0-9._~-]+(/[A-Za-z0-9._~-]+)*)?)", 0),
    "json-pointer": Format(f"(/({_TOKEN})*)*", 0),
    "relative-json-pointer": Format(f"(0|[1-9][0-9]{{0,3}})(#|(/({_TOKEN})*)*)", 1),
    "base64": Format("([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?", 0),
    "base64url": Format("([A-Za-z0-9_-]{4})*([A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?", 0),
}
_SAME = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri-reference",
         "uri-template": "uri", "byte": "base64"}  # fmt: skip
FORMATS |= {name: FORMATS[other] for name, other in _SAME.items()}
ANY_TEXT = ("password", "binary", "path", "string")  # formats that only describe how a string is shown or used
INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1), "uint32": (0, 2**32 - 1)}
ANY_NUMBER = ("float", "double", "decimal", "number", "integer")


class Longest(NamedTuple):
    """A string length enforced outside of the grammar, which would take long to compile if it counted so far."""

    length: int
    keys: tuple[str | None, ...]  # the keys whose values are such strings; None: they may be anywhere


def longest_strings(schema: Any) -> Longest | None:
    """The schema's longest maxLengths, down to half of the longest, with their keys; None if there are none."""
    found = list(_lengths(schema, None, 64))
    most = max((length for length, _ in found), default=0)
    taken = [(length, key) for length, key in found if 2 * length >= most]
    if not taken:
        return None
    keys = tuple(dict.fromkeys(key for _, key in taken))
    return Longest(min(length for length, _ in taken), (None,) if None in keys else keys)


def _lengths(schema: Any, key: str | None, depth: int) -> Iterator[tuple[int, str | None]]:
    """Lengths of at least COUNTED, each with the key of its strings."""
    if isinstance(schema, list):
        for part in schema:
            yield from _lengths(part, key, depth)
    if not isinstance(schema, dict) or depth == 0:
        return
    if type(most := schema.get("maxLength")) is int and most >= COUNTED:
        yield most, key
    for name, part in schema.items():
        if name == "properties" and isinstance(part, dict):
            for own, value in part.items():
                yield from _lengths(value, own, depth - 1)
        elif name in ("items", "prefixItems", "anyOf", "oneOf", "allOf"):
            yield from _lengths(part, key, depth - 1)
        elif name in ("$defs", "definitions", "patternProperties") and isinstance(part, dict):
            yield from _lengths(list(part.values()), None, depth - 1)
        elif name in ("additionalProperties", "propertyNames", "additionalItems"):
            yield from _lengths(part, None, depth - 1)


def with_string(schema: dict[str, Any], longest: int | None = None) -> dict[str, Any]:
    """The schema with one expression for pattern, format and length. Raises ValueError for what cannot be enforced.

    `longest`: see `longest_strings`; lengths from this on are left out.
    """
    made = _with_number_format(schema)
    least, most = made.get("minLength", 0), made.get("maxLength")
    if type(least) is int and type(most) is int and most < least:
        raise ValueError(f"no string is from {least} to {most} characters long")
    if made.get("format") == "uri" and most == _MOST_HTTP_URL and "pattern" not in made:
        made["format"] = "http-url"
    if longest is not None and type(most) is int and most >= longest:
        del made["maxLength"]
        most = None
    pattern, name = made.get("pattern"), made.get("format")
    if name is None and not isinstance(pattern, str):
        return made
    patterns = [pattern] if isinstance(pattern, str) else []
    lengths: Lengths = (least, most)
    if name is not None:
        own, lengths = _format(name, lengths, alone=not patterns)
        patterns.append(own)
    for keyword in ("format", "minLength", "maxLength"):
        made.pop(keyword, None)
    if lengths == (0, None) and len(patterns) == 1 and not _LOOK_AHEAD.search(patterns[0]):
        return {**made, "pattern": marked(patterns[0])}
    return {**made, "pattern": marked(json.dumps([patterns, lengths]), "both")}


def _format(name: Any, lengths: Lengths, alone: bool) -> tuple[str, Lengths]:
    """The expression of a format, and the length limits it does not imply."""
    if name not in FORMATS:
        listed = ", ".join(sorted([*FORMATS, *ANY_TEXT]))
        raise ValueError(f"the format {str(name)[:40]!r} cannot be enforced; leave it out, or use one of {listed}")
    least, most = lengths
    found = FORMATS[name]
    left_least = 0 if least <= found.least else least
    left_most = None if most is None or (found.most is not None and found.most <= most) else most
    if found.cut is None or (alone and not left_least and left_most is None):
        return found.pattern, (left_least, left_most)
    return found.cut, (left_least, min((n for n in (left_most, found.most_cut) if n is not None), default=None))


def _with_number_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with formats of numbers as bounds, and without formats that mean nothing."""
    made, name = dict(schema), schema.get("format")
    kind = schema.get("type", "string" if isinstance(name, str) else None)
    if (name in ANY_TEXT and kind == "string") or (name in ANY_NUMBER and kind in ("number", "integer")):
        del made["format"]
    elif name in INTEGERS and kind == "integer":
        del made["format"]
        low, high = INTEGERS[name]
        made["minimum"], made["maximum"] = max(made.get("minimum", low), low), min(made.get("maximum", high), high)
    elif name is not None and kind is not None and "string" not in (kind if isinstance(kind, list) else [kind]):
        raise ValueError(f"the format {str(name)[:40]!r} cannot be enforced on the type {kind!r}; leave it out")
    return made


# -- automata ---------------------------------------------------------------------------------------------------

_LOOK_AHEAD = re.compile(r"\(\?[=!]")
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[=!:]|.", re.DOTALL
)  # an escape, a class, a group's head, others
_ANY = "[\\s\\S]"


def both_grammar(text: str) -> str:
    """The text of a grammar, its first rule `root`, for strings that match several expressions and have a length.

    `text`: as `with_string` marks it. Raises ValueError.
    """
    patterns, (least, most) = json.loads(text)
    try:
        machine = _machine(patterns[0])
        for pattern in patterns[1:]:
            machine &= _machine(pattern)
        if least or most is not None:
            bound = f"{{{least},{'' if most is None else most}}}"
            _check_size(len(machine.states) * ((least if most is None else most) + 1))
            machine &= _machine(_ANY + bound)
    except (interegular.Unsupported, interegular.InvalidSyntax) as error:
        raise ValueError(f"a 'pattern' beside a length or a format cannot hold this: {error}") from error
    return _written(machine)


def _machine(pattern: str) -> FSM:
    """The automaton of an expression for whole strings."""
    pattern = _UNICODE.sub(lambda found: re.escape(chr(int(found[1], 16))), pattern)
    pieces = _PIECE.findall(pattern)
    made = _machine_of(pieces[1:] if pieces[:1] == ["^"] else pieces)
    if "." in pieces:
        made &= _plain("[^\r\u2028\u2029]*")  # a dot does not match line ends
    return made


def _machine_of(pieces: list[str]) -> FSM:
    """The automaton of an expression in pieces. Lookaheads are handled here: interegular gets them wrong."""
    branches = _branches(pieces)
    if len(branches) > 1:
        return reduce(operator.or_, map(_machine_of, branches))
    pieces = pieces[:-1] if pieces[-1:] == ["$"] else pieces
    ahead = next((place for place, piece in enumerate(pieces) if piece in ("(?=", "(?!")), None)
    if ahead is None:
        return _plain("".join(pieces))
    before, (inner, rest) = pieces[:ahead], _group(pieces, ahead)
    if not rest or _depth(before):
        raise ValueError("what looks ahead within a group of a 'pattern' cannot be enforced; write it first")
    inner = inner[1:] if inner[:1] == ["^"] and not before else inner
    seen = _machine_of(inner if inner[-1:] == ["$"] else ["(?:", *inner, ")", _ANY, "*"])
    found = _machine_of(rest)
    left: FSM = found & seen if pieces[ahead] == "(?=" else found - seen
    return left if not before else _concatenated(_machine_of(before), left)


def _concatenated(one: FSM, other: FSM) -> FSM:
    made: FSM = one + other
    return made


def _plain(pattern: str) -> FSM:
    made: FSM = interegular.parse_pattern(pattern).to_fsm()
    return made


def _branches(pieces: list[str]) -> list[list[str]]:
    """Alternatives of an expression, and of a group at its end if the group contains a lookahead."""
    depth, starts, last = 0, [0], None
    for place, piece in enumerate(pieces):
        if piece.startswith("("):
            last = place if depth == 0 else last
            depth += 1
        elif piece == ")":
            depth -= 1
        elif piece == "|" and depth == 0:
            starts.append(place + 1)
    if len(starts) > 1:
        return [pieces[a : b - 1] for a, b in zip(starts, [*starts[1:], len(pieces) + 1], strict=True)]
    kept = pieces[:-1] if pieces[-1:] == ["$"] else pieces
    if (
        last is None
        or kept[-1:] != [")"]
        or kept[last] not in ("(", "(?:")
        or not _LOOK_AHEAD.search("".join(kept[last:]))
    ):
        return [pieces]
    return [[*kept[:last], *branch] for branch in _branches(kept[last + 1 : -1])]


def _group(pieces: list[str], start: int) -> tuple[list[str], list[str]]:
    """The pieces inside the group that begins at `start`, and those after it."""
    for place in range(start + 1, len(pieces)):
        if pieces[place] == ")" and _depth(pieces[start:place]) == 1:
            return pieces[start + 1 : place], pieces[place + 1 :]
    return pieces[start + 1 :], []


def _depth(pieces: list[str]) -> int:
    return sum(piece.startswith("(") for piece in pieces) - pieces.count(")")


def _check_size(num_states: int) -> None:
    if num_states > 16 * MAX_STATES:
        raise ValueError("'pattern' or 'format' beside so great a length takes too many rules; lower the length")


def _written(machine: FSM) -> str:
    """One rule per state: a choice of characters and the states that follow."""
    live = _reaching(machine)
    if machine.initial not in live:
        raise ValueError("no string has this 'pattern', 'format' and length")
    if len(live) > MAX_STATES:
        raise ValueError("'pattern' or 'format' beside so great a length takes too many rules; lower the length")
    order = [machine.initial, *(state for state in sorted(live) if state != machine.initial)]
    names = {state: f"root_{place}" if place else "root" for place, state in enumerate(order)}
    lines = []
    for state in order:
        choices = ['""'] if state in machine.finals else []
        ways: dict[int, list[int]] = {}
        for key, target in machine.map.get(state, {}).items():
            if target in names:
                ways.setdefault(target, []).append(key)
        choices += [f"({_class(machine.alphabet, keys)} {names[target]})" for target, keys in ways.items()]
        lines.append(f"{names[state]} ::= {' | '.join(choices)}")
    return "\n".join(lines)


def _reaching(machine: FSM) -> set[Any]:
    """The states from which a final state can be reached."""
    before: dict[Any, list[Any]] = {}
    for state, ways in machine.map.items():
        for target in ways.values():
            before.setdefault(target, []).append(state)
    live, todo = set(machine.finals), list(machine.finals)
    while todo:
        new = set(before.get(todo.pop(), ())) - live
        live |= new
        todo += new
    return live


def _class(alphabet: Alphabet, keys: list[int]) -> str:
    """The characters of some transitions, as the library writes a class."""
    own = {character for key in keys for character in alphabet.by_transition[key]}
    if anything_else not in own:
        return f"[{_listed(own)}]"
    others = {character for members in alphabet.by_transition.values() for character in members}
    return f"[^{_listed(others - own)}]" if others - own else "[\\U00000000-\\U0010ffff]"


def _listed(characters: set[str]) -> str:
    return "".join(f"\\U{ord(character):08x}" for character in sorted(characters))
