"""Text from patterns: alternatives in brackets, names in braces.

Knows: how a pattern becomes text, and what stands around any request. Does not know: what is requested. `[a|b|c]` is one of
the three, brackets may be nested, and an empty alternative is allowed; `{name}` is filled from the names given, `{Name}`
with a capital letter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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


LAYOUTS = (  # where a request stands beside its text, and what may be said around it
    "{I}: {x}", "{I}.\n\n{x}", "{I}:\n{x}", "{I}:\n\n{x}", "{x}\n\n{I}.", "{x}\n{I}[.|]", "Please {i}: {x}",
    "Please {i}[.|:]\n\n{x}", "{x}\n\n[Please|Now|Now please] {i}.", "[Now|Next|First|Then|So|Okay|Well], {i}[: |.\n\n]{x}",
    "[Can|Could|Will|Would] you [please|] {i}?[ |\n\n]{x}", "{x}\n\n[Can|Could|Would] you {i}?",
    "I [want|would like|need|ask|tell] you to {i}[: |.\n\n]{x}", "[Text|Input|My text|Here is the text]: {x}\n\n{I}.",
    "[Hello|Hi|Hey][!|.] {I}[: |.\n\n]{x}", "[Your task|A task|My request|To do|Task]: {i}.\n\n{x}", "{I}. [Thank you|Thanks]!\n\n{x}",
    "[You should|You must|Try to|Help me to|Be so kind and] {i}[: |.\n\n]{x}", "{I}, [please|will you][: |.\n\n]{x}", "{I}[.|!] {x}",
)  # fmt: skip


@dataclass(frozen=True)
class Wordings:
    """Patterns of one request: those to learn from, and those kept for the examination.

    `asks` are what is asked without the text, as commands ("sort these words"); each is learnt in all `LAYOUTS`.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    asks: tuple[str, ...] = ()

    def of(self, split: str) -> tuple[str, ...]:
        """The patterns of a split."""
        return self.train + self.asked if split == "train" else self.test

    @cached_property
    def asked(self) -> tuple[str, ...]:
        """The commands in every layout."""
        return tuple(layout.replace("{I}", _begun(ask)).replace("{i}", ask) for ask in self.asks for layout in LAYOUTS)


def _begun(pattern: str) -> str:
    """A pattern whose text begins with a capital letter, whichever alternative comes first."""
    return re.sub(
        r"^\[[^\]]*\]|^.", lambda found: re.sub(r"(^|\[|\|)([a-z])", lambda c: c[0].upper(), found[0]), pattern
    )


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


def numbered(lines: Sequence[str]) -> str:
    """A line each, with its number."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


def listed(items: Sequence[str], joint: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {joint} {items[-1]}"
