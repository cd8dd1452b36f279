"""Limits the length of long JSON strings outside of the grammar, which would have to count every character.

Knows: enough of JSON to find strings and keys, and the bytes of tokens. Does not know: grammars, schemas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.server.grammar_messages import common_prefix
from forerun.server.json_strings import Longest

ESCAPE_BYTES = 12  # the longest escape of a character; it must fit once it has begun
MAX_KEY_BYTES = 512  # of a string's beginning, kept for comparing it with keys
_QUOTE, _BACKSLASH, _COLON = b'"\\:'
_OPENING, _CLOSING = b"{[", b"}]"
Keys = tuple[bytes, "Keys"] | tuple[()]


class _Place(NamedTuple):
    """The position of a text in its JSON structure."""

    in_string: bool = False
    escaped: bool = False  # right after a backslash
    length: int = 0  # bytes of the string, or of the last one
    begun: bytes = b""  # its first bytes
    key: bytes = b""  # of the value at this position
    outer: Keys = ()  # keys of the objects and lists around it


class StringLimit:
    """Near the limit of a string only tokens that fit, or that close it, are allowed.

    Bytes are counted, so that a string may end early, but never late.
    """

    def __init__(self, vocabulary: Sequence[bytes], longest: Longest) -> None:
        self._vocabulary = vocabulary
        self._longest = longest.length
        self._keys = None if None in longest.keys else {_as_written(key) for key in longest.keys if key is not None}
        self._sizes = np.array([len(name) for name in vocabulary])
        self._needed = self._sizes + np.array([ESCAPE_BYTES * (b"\\" in name) for name in vocabulary])
        self._most = int(self._needed.max())
        self._closing = np.array([name.startswith(b'"') for name in vocabulary])
        self._tokens: list[int] = []
        self._places = [_Place()]

    def within(self, prefix: Sequence[int], bits: bytes | None) -> bytes | None:
        """`bits` without the tokens that would make the string after `prefix` too long."""
        place = self._after(prefix)
        if not place.in_string or place.length + self._most <= self._longest:
            return bits
        if self._keys is not None and place.key not in self._keys:
            return bits
        left = self._longest - place.length
        fitting = self._sizes <= left if place.escaped else (self._needed <= left) | self._closing
        packed = np.packbits(fitting, bitorder="little").tobytes().ljust((len(fitting) + 31) // 32 * 4, b"\0")
        return packed if bits is None else bytes(np.frombuffer(packed, np.uint8) & np.frombuffer(bits, np.uint8))

    def _after(self, prefix: Sequence[int]) -> _Place:
        common = common_prefix(self._tokens, prefix)
        del self._tokens[common:], self._places[common + 1 :]
        for token in prefix[common:]:
            self._places.append(_read(self._places[-1], self._vocabulary[token]))
            self._tokens.append(token)
        return self._places[-1]


def _as_written(key: str) -> bytes:
    return json.dumps(key, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")[:MAX_KEY_BYTES]


def _read(place: _Place, text: bytes) -> _Place:
    in_string, escaped, length, begun, key, outer = place
    for byte in text:
        if in_string and (escaped or byte != _QUOTE):
            escaped = byte == _BACKSLASH and not escaped
            length += 1
            begun = begun if length > MAX_KEY_BYTES else begun + bytes([byte])
        elif byte == _QUOTE:
            in_string = not in_string
            length, begun = (0, b"") if in_string else (length, begun)
        elif byte == _COLON:
            key = begun
        elif byte in _OPENING:
            outer = (key, outer)
        elif byte in _CLOSING and outer:
            key, outer = outer
    return _Place(in_string, escaped, length, begun, key, outer)
