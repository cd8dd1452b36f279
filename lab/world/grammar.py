"""Text from patterns: alternatives in brackets, names in braces.

Knows: how a pattern becomes text. Does not know: any words. `[a|b|c]` is one of the three, brackets may be nested, and
an empty alternative is allowed; `{name}` is filled from the names given, `{Name}` with a capital letter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPLITS = ("train", "test")
_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_NAME = re.compile(r"\{(\w+)\}")
_BLANKS = re.compile(r" {2,}")
_VOWELS = "aeiou"
_SOUNDS_LIKE_CONSONANT = ("uni", "use", "one", "eu")
_SILENT_H = ("hour", "honest")


@dataclass(frozen=True)
class GrammarSample:
    """A conversation: what the user says and what the assistant answers, in turns; `kind` says what it trains."""

    kind: str
    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Wordings:
    """Patterns of one request: those to learn from, and those kept for the examination."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    def of(self, split: str) -> tuple[str, ...]:
        """The patterns of a split."""
        return self.train if split == "train" else self.test


def expand(pattern: str, rng: random.Random, names: Mapping[str, str] | None = None) -> str:
    """One text of a pattern."""
    while (found := _INNERMOST.search(pattern)) is not None:
        pattern = pattern[: found.start()] + rng.choice(found[1].split("|")) + pattern[found.end() :]
    text = _NAME.sub(lambda name: _filled(name[1], names or {}), pattern)
    return _BLANKS.sub(" ", text).strip()


def _filled(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    return capital(names[name[0].lower() + name[1:]])


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def a(noun: str) -> str:
    """The noun with "a" or "an" before it."""
    low = noun.lower()
    vowel = (low[0] in _VOWELS and not low.startswith(_SOUNDS_LIKE_CONSONANT)) or low.startswith(_SILENT_H)
    return f"{'an' if vowel else 'a'} {noun}"


def listed(items: Sequence[str], joint: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {joint} {items[-1]}"
