"""Divides an answer in which no calls are read into what the model thinks and what it says, as it comes.

Knows: where a chat template tells how a model thinks (marks such as <think>, gpt-oss's channels). Does not know: calls,
requests, HTTP, what is done with thoughts.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.server.call_readers import NoCalls, Prose
from forerun.server.harmony import MESSAGE, Harmony
from forerun.server.reasoning import ReasoningSplitter, may_think, reasoning_style, starts_inside
from forerun.server.tools import HARMONY, tool_style
from forerun.weights.tokenizer import Tokenizer

NUM_OPENING = 64  # last tokens of a prompt, among which is what opens or closes the thinking


class Thoughts:
    """Reads one answer to a prompt that the model's chat template made."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        template = tokenizer.chat_template
        self._harmony = Harmony(NoCalls(), reads_calls=False) if is_harmony(template) else None
        marks = None if self._harmony is not None else reasoning_style("auto", template)
        prompt = tokenizer.decode(prompt_token_ids[-NUM_OPENING:], skip_special_tokens=False)
        self._splitter: ReasoningSplitter | None = None
        if marks is not None and may_think(prompt, marks):
            self._splitter = ReasoningSplitter(marks, starts_inside(prompt, marks))

    def feed(self, text: str) -> list[Prose]:
        """What is certain now; what may be part of a mark is held back."""
        if self._harmony is not None:
            return [piece for piece in self._harmony.feed(text) if isinstance(piece, Prose)]
        return _divided(*self._splitter.feed(text)) if self._splitter is not None else _divided("", text)

    def finish(self) -> list[Prose]:
        """What was held back."""
        if self._harmony is not None:
            return [piece for piece in self._harmony.finish() if isinstance(piece, Prose)]
        return _divided(*self._splitter.finish()) if self._splitter is not None else []


def _divided(reasoning: str, content: str) -> list[Prose]:
    return [Prose(text, is_reasoning) for text, is_reasoning in ((reasoning, True), (content, False)) if text]


def is_harmony(template: str | None) -> bool:
    """Whether a model writes its answers in channels."""
    return tool_style("auto", template) == HARMONY


def needs_special_tokens(tokenizer: Tokenizer) -> bool:
    """Whether the marks of thinking are special tokens, which texts usually omit."""
    marks = reasoning_style("auto", tokenizer.chat_template)
    mark = MESSAGE if is_harmony(tokenizer.chat_template) else marks.end if marks is not None else None
    return mark is not None and tokenizer.token_id(mark) in tokenizer.special_ids


def said(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], answer: Sequence[int]) -> str:
    """What an answer says, without its thoughts: what goes into the conversation."""
    reader, ids = Thoughts(tokenizer, prompt_token_ids), list(answer)
    while ids and ids[-1] in tokenizer.special_ids:  # what ended it
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=not needs_special_tokens(tokenizer))
    return "".join(piece.text for piece in [*reader.feed(text), *reader.finish()] if not piece.is_reasoning)
