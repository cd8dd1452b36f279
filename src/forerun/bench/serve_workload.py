"""The requests of a load generator: conversations from prompt files or of synthetic lengths, with shared prefixes.

Knows: bodies of requests, and how to make texts of about so many tokens. Does not know: HTTP, when requests are sent.
Everything follows from the seed; another seed gives other texts, which no prefix cache has seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any, Final

from forerun.bench.prompts import PromptCase
from forerun.errors import ConfigError

ENDPOINTS: Final = ("auto", "chat", "completions")
RESERVED: Final = ("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "temperature", "seed", "n")
# Common ones, which most vocabularies hold as one token.
WORDS: Final = (
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were",
    "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "if",
    "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make",
    "like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see", "number", "no", "way", "could",
    "people", "my", "than", "first", "water", "been", "call", "who", "oil", "its", "now", "find", "long", "down",
    "day", "did", "get", "come", "made", "may", "part", "over", "new", "sound", "take", "only",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The fields every request has besides its prompt."""

    model: str  # or several with commas, which conversations name in turn
    max_tokens: int
    temperature: float
    seed: int  # of the first conversation; the next one has the next seed
    usage: bool = True  # ask for token counts
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError for extra fields that have an option of their own."""
        taken = sorted(set(self.extra) & set(RESERVED))
        if taken:
            raise ConfigError(f"--extra-body may not set {', '.join(taken)}: there are options for these")

    def body(self, index: int) -> dict[str, Any]:
        """The fields of conversation `index`."""
        models = self.model.split(",")
        own = {"model": models[index % len(models)], "max_tokens": self.max_tokens, "temperature": self.temperature}
        options = {"stream_options": {"include_usage": True}} if self.usage else {}
        return {**own, "seed": self.seed + index, "stream": True, **options, **self.extra}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a path below /v1 and a body."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are sent one after the other, each with the earlier answers before it."""

    turns: tuple[str, ...]
    is_chat: bool
    prefix: str = ""  # a system message, or text before the first turn

    def ask(self, answers: Sequence[str], fields: Mapping[str, Any]) -> Ask:
        """The request of the turn after `answers`."""
        parts = [text for turn, answer in zip(self.turns, answers, strict=False) for text in (turn, answer)]
        parts.append(self.turns[len(answers)])
        if not self.is_chat:
            return Ask("/completions", {**fields, "prompt": "\n\n".join([self.prefix, *parts][not self.prefix :])})
        roles = cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, parts, strict=False)]
        system = [{"role": "system", "content": self.prefix}] if self.prefix else []
        return Ask("/chat/completions", {**fields, "messages": [*system, *messages]})


@dataclass(frozen=True, slots=True)
class Scale:
    """How many tokens a text of WORDS has on a server: `base` for the chat template, `per_word` for each word."""

    per_word: float = 1.0
    base: float = 0.0
    measured: bool = False  # else assumed

    @classmethod
    def through(cls, shorter: tuple[int, int], longer: tuple[int, int]) -> Scale:
        """The line through two (words, tokens)."""
        per_word = (longer[1] - shorter[1]) / (longer[0] - shorter[0])
        return cls(max(per_word, 0.1), max(0.0, shorter[1] - per_word * shorter[0]), measured=True)

    def num_words(self, num_tokens: int, with_base: bool = True) -> int:
        """The number of words for about `num_tokens` tokens, at least one."""
        return max(1, round((num_tokens - (self.base if with_base else 0.0)) / self.per_word))


def some_words(num_words: int, *key: int | str) -> str:
    """A text that depends on the key only."""
    return " ".join(Random("/".join(map(str, key))).choices(WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prefixes that requests share, taken in turn."""

    num_tokens: int = 0  # 0: none
    count: int = 1

    def texts(self, scale: Scale, seed: int) -> list[str]:
        """All prefixes; one empty text if there are none."""
        if self.num_tokens == 0:
            return [""]
        return [some_words(scale.num_words(self.num_tokens, False), seed, "prefix", i) for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of synthetic prompts: `mean`, drawn evenly from `mean` times 1 - spread to 1 + spread."""

    mean: int
    spread: float = 0.0

    def draw(self, count: int, seed: int) -> list[int]:
        """A length for each prompt."""
        random = Random(f"{seed}/lengths")
        return [max(1, round(self.mean * (1 + self.spread * random.uniform(-1, 1)))) for _ in range(count)]


def synthetic(
    count: int, lengths: Lengths, prefixes: Prefixes, scale: Scale, seed: int, endpoint: str = "auto"
) -> list[Conversation]:
    """`count` conversations of one turn, with prompts of about the given lengths, their prefixes not counted."""
    shared, is_chat = prefixes.texts(scale, seed), endpoint != "completions"
    texts = [some_words(scale.num_words(n), seed, "text", i) for i, n in enumerate(lengths.draw(count, seed))]
    return [Conversation((text,), is_chat, shared[i % len(shared)]) for i, text in enumerate(texts)]


def from_cases(
    count: int, cases: Sequence[PromptCase], prefixes: Prefixes, scale: Scale, seed: int, endpoint: str = "auto"
) -> list[Conversation]:
    """Conversations of `count` turns together, the cases taken in turn; the last one may be cut short."""
    shared, result, left = prefixes.texts(scale, seed), list[Conversation](), count
    for i, case in enumerate(cycle(cases)):
        if left <= 0:
            break
        is_chat = case.is_chat if endpoint == "auto" else endpoint == "chat"
        result.append(Conversation(case.turns[:left], is_chat, shared[i % len(shared)]))
        left -= len(case.turns)
    return result
