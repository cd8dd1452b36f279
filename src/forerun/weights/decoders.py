"""How single tokens become bytes: byte-level BPE, and sentencepiece with byte fallback.

Knows: the decoders written in tokenizer.json. Does not know: streams or special tokens (see `detokenizer`).

A decoder maps a token to bytes that depend on that token alone, apart from one leading space that sentencepiece
tokenizers drop at the very start of a text. That makes streaming exact: text is the bytes so far, decoded as UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
META = "\u2581"  # sentencepiece's visible space


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a token's name becomes bytes.

    `byte_level`: characters stand for bytes as in GPT-2. Otherwise `replacements` are applied to the name and, with
    `byte_fallback`, names like <0x0A> are bytes. `strip_leading`: a space at the start of the whole text is dropped.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_leading: bool = False

    def to_bytes(self, name: str) -> bytes:
        """The bytes of the token called `name`."""
        if self.byte_level:
            return _from_byte_level(name)
        match = BYTE_TOKEN.fullmatch(name) if self.byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            name = name.replace(old, new)
        return name.encode("utf-8", "replace")


def piece_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """The rule for the `decoder` of a tokenizer.json, None if its tokens have no text of their own."""
    if decoder is None:
        return None
    steps = list(decoder.get("decoders", ())) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(byte_level=True)
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and "WordPiece" not in kinds:
        return _sentencepiece(steps)
    return None


def _metaspace(step: Mapping[str, Any]) -> PieceRule:
    prepends = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    return PieceRule(replacements=((step.get("replacement", META), " "),), strip_leading=prepends)


def _sentencepiece(steps: list[Any]) -> PieceRule | None:
    """Replace, ByteFallback, Fuse and Strip in the order sentencepiece conversions write them."""
    replacements: list[tuple[str, str]] = []
    strip = False
    for step in steps:
        if step["type"] == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if pattern is None:
                return None
            replacements.append((pattern, step.get("content", "")))
        elif step["type"] == "Metaspace":
            inner = _metaspace(step)
            replacements += inner.replacements
            strip = strip or inner.strip_leading
        elif step["type"] == "Strip":
            if (step.get("content"), step.get("start"), step.get("stop")) != (" ", 1, 0):
                return None
            strip = True
    fallback = any(step["type"] == "ByteFallback" for step in steps)
    return PieceRule(byte_fallback=fallback, replacements=tuple(replacements), strip_leading=strip)


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's 256 visible characters, one for each byte. Source: openai/gpt-2 encoder.py, bytes_to_unicode."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in visible}
    others = [byte for byte in range(256) if byte not in set(visible)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _from_byte_level(name: str) -> bytes:
    """A name with any character outside the alphabet stands for itself, as in the tokenizers library."""
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in name):
        return bytes(alphabet[character] for character in name)
    return name.encode("utf-8", "replace")
