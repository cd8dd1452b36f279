"""Regular expressions of JSON schemas as grammar rules, with the escapes that JSON strings need.

Knows: how xgrammar writes grammars as text. Does not know: schemas, requests. The library compiles `pattern` in two
ways of its own, and both let wrong texts pass: one merges states that are not alike (`^[a-z]{2}( [a-z]{2,5})?$` also
takes `abcde`, `^(a{1,2}|a)$` any number of `a`), the other writes quotes and backslashes without an escape. Its
conversion of free-standing expressions is right, so a placeholder stands for each pattern while the library
converts the schema, and is replaced afterwards; likewise for values that the library has no grammar for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

_MARK = re.compile(r'Regex\("\^forerun_([a-z]*)_([0-9a-f]*)\$", json_string=true\)')
_VALUE = re.compile(r'"\\"forerun_([a-z]+)_([0-9a-f]*)\\""')
_OTHER = re.compile(r'Regex\("((?:\\.|[^"\\])*)", json_string=true\)')
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\broot(?:_\d+)*\b', re.DOTALL)
_CHARACTER = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}
_OF_LENGTH = r"[^\"\\\r\n]"  # the library's characters of strings with a length
_REPEATED = re.compile(r"\b(root(?:_\d+)*)\{(\d+), (-?\d+)\}")
_MANY = 64  # beyond this, bounded repetitions of a choice cost more than a model's step; those of one class do not
_ANYTHING = r"[\0-\U0010ffff]"  # what the library makes of a dot, which should not match line ends (ECMA-262, 22.2.2.7)
_LINE_ENDS = "\n\r\u2028\u2029"
_ESCAPED = '"\\\n\r\t\b\f'  # what a backslash can escape in JSON strings (RFC 8259, 7)
_LAST = 0x10FFFF
_NEVER_PLAIN = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))
Ranges = list[tuple[int, int]]  # first and last code point


def marked(pattern: str, kind: str = "") -> str:
    """A placeholder for `pattern` while the library converts the schema around it.

    `kind`: how to read the text; "": as a regular expression.
    """
    return f"^forerun_{kind}_{pattern.encode().hex()}$"


def marked_value(text: str, kind: str) -> str:
    """A string constant that is a placeholder for values of this kind."""
    return f"forerun_{kind}_{text.encode().hex()}"


def other_than(names: Sequence[str]) -> str:
    """A regular expression that matches every text except these."""
    heads = {name[0] for name in names if name}
    longer = [f"{_literal(head)}({other_than([name[1:] for name in names if name[:1] == head])})" for head in
              sorted(heads)]  # fmt: skip
    another = f"[^{''.join(_literal(head) for head in sorted(heads))}][\\s\\S]*" if heads else r"[\s\S]+"
    return "|".join([*([] if "" in names else [""]), another, *longer])


def _literal(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"


def with_patterns(grammar: str, convert: Mapping[str, Callable[[str], str]]) -> str:
    """The text of a schema's grammar with rules for each pattern and each marked value in it.

    `convert`: by kind, a text -> the text of a grammar whose first rule is `root`. Raises ValueError for a pattern that
    no JSON string can match.
    """
    rules: list[str] = []

    def put_in(kind: str, text: str, in_string: bool = True) -> str:
        name = f"forerun_part_{len(rules)}"
        made = convert[kind](text)
        rules.append(in_json(made, name) if in_string else re.sub(r"\broot(?=(_\d+)*\b)", name, made))
        return f"({name})"

    grammar = grammar.replace(_OF_LENGTH, r"[^\0-\x1f\"\\]")
    grammar = _MARK.sub(lambda found: put_in(found[1], bytes.fromhex(found[2]).decode()), grammar)
    grammar = _VALUE.sub(lambda found: put_in(found[1], bytes.fromhex(found[2]).decode(), in_string=False), grammar)
    grammar = _OTHER.sub(lambda found: put_in("", "".join(_characters(found[1]))), grammar)
    return "\n".join([grammar.rstrip("\n"), *rules]) + "\n"


def in_json(grammar: str, name: str) -> str:
    """The same grammar inside the quotes of a JSON string, its rules called `name` instead of `root`.

    Characters that need an escape are left out of a class that is repeated often up to a bound.
    """
    often = {rule for rule, least, most in _REPEATED.findall(grammar) if max(int(least), int(most)) > _MANY}
    lines = (_line_in_json(line, name, line.partition(" ")[0] in often) for line in grammar.splitlines() if line)
    return "\n".join(lines)


def _line_in_json(line: str, name: str, often: bool) -> str:
    def token(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith('"'):
            return _quoted("".join(_escape(c) for c in _characters(text[1:-1])))
        return _class(text, often) if text.startswith("[") else name + text.removeprefix("root")

    return _TOKEN.sub(token, line)


def _characters(text: str) -> list[str]:
    """The characters of a text as the library writes it between quotes or brackets."""
    return [_character(found) for found in _CHARACTER.finditer(text)]


def _character(found: re.Match[str]) -> str:
    code = found[1]
    if code is None:
        return found[2]
    return chr(int(code[1:], 16)) if len(code) > 1 else _NAMED.get(code, code)


def _escape(character: str) -> str:
    return json.dumps(character, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def _class(text: str, often: bool) -> str:
    """A class of characters: the plain ones and, unless `often`, the escapes of the others."""
    ranges = _ranges(text)
    if text == _ANYTHING:
        ranges = _without(ranges, ((ord(c), ord(c)) for c in _LINE_ENDS))
    escapes = [_quoted(_escape(c)) for c in _ESCAPED if any(low <= ord(c) <= high for low, high in ranges)]
    plain = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in _without(ranges, _NEVER_PLAIN))
    if plain and often:
        return f"[{plain}]"
    choices = [*([f"[{plain}]"] if plain else []), *escapes]
    if not choices:
        raise ValueError("a pattern asks for a character that JSON strings here cannot hold")
    return f"({' | '.join(choices)})"


def _ranges(text: str) -> Ranges:
    """The code points of a class as the library writes it."""
    negated = text.startswith("[^")
    found = [(m[0], ord(_character(m))) for m in _CHARACTER.finditer(text[2 if negated else 1 : -1])]
    ranges: Ranges = []
    i = 0
    while i < len(found):
        is_range = i + 2 < len(found) and found[i + 1][0] == "-"
        ranges.append((found[i][1], found[i + 2 if is_range else i][1]))
        i += 3 if is_range else 1
    return _without([(0, _LAST)], ranges) if negated else ranges


def _without(ranges: Ranges, others: Iterable[tuple[int, int]]) -> Ranges:
    for first, last in others:
        ranges = [piece for low, high in ranges for piece in _cut(low, high, first, last)]
    return ranges


def _cut(low: int, high: int, first: int, last: int) -> Sequence[tuple[int, int]]:
    """The parts of a range that are outside of another."""
    pieces = ((low, min(high, first - 1)), (max(low, last + 1), high))
    return [(a, b) for a, b in pieces if a <= b]
