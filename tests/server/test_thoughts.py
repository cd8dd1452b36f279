"""What a model thinks is told from what it says, in every way that templates mark it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from forerun.server.call_readers import Prose
from forerun.server.thoughts import Thoughts, needs_special_tokens, said
from tests.support import mini

GPT_OSS = "{{- '<|start|>assistant<|channel|>final<|message|>' }}"
HARMONY = "<|channel|>analysis<|message|>They ask for France.<|end|>"
HARMONY += "<|start|>assistant<|channel|>final<|message|>Paris.<|return|>"
THINK, MISTRAL = "{{- '</think>' }}", "{{- '[/THINK]' }}"


class Pieces:
    """A tokenizer of a few tokens; the special ones begin with < or [."""

    def __init__(self, template: str | None, text: str, special: Sequence[str]) -> None:
        self.chat_template = template
        rest, self.names = text, list[str]()
        while rest:
            name = next((mark for mark in special if rest.startswith(mark)), rest[0])
            self.names.append(name)
            rest = rest.removeprefix(name)
        self.special_ids = frozenset(i for i, name in enumerate(self.names) if name in special)

    def token_id(self, text: str) -> int | None:
        return self.names.index(text) if text in self.names else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.names[i] for i in token_ids if not (skip_special_tokens and i in self.special_ids))


MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>", "[THINK]", "[/THINK]", "</s>")


@pytest.mark.parametrize("template,answer,thought", [
    (GPT_OSS, HARMONY, "They ask for France."),
    (THINK, "<think>\nThey ask for France.\n</think>\n\nParis.</s>", "They ask for France."),
    (MISTRAL, "[THINK]They ask for France.[/THINK]Paris.</s>", "They ask for France."),
    (THINK, "Paris.", ""),
    (None, "Paris.</s>", ""),
])  # fmt: skip
def test_thoughts_are_told_from_the_answer(template: str | None, answer: str, thought: str) -> None:
    tokenizer: Any = Pieces(template, answer, MARKS)
    ids = list(range(len(tokenizer.names)))
    assert said(tokenizer, [], ids) == "Paris."
    reader = Thoughts(tokenizer, [])
    text = tokenizer.decode(ids, skip_special_tokens=not needs_special_tokens(tokenizer))
    pieces = [piece for letter in text.removesuffix("</s>") for piece in reader.feed(letter)] + reader.finish()
    assert "".join(piece.text for piece in pieces if piece.is_reasoning) == thought
    assert "".join(piece.text for piece in pieces if not piece.is_reasoning) == "Paris."


def test_special_marks_are_asked_for() -> None:
    harmony: Any = Pieces(GPT_OSS, HARMONY, MARKS)
    mistral: Any = Pieces(MISTRAL, "[THINK][/THINK]", MARKS)
    plain: Any = Pieces(THINK, "</think>", MARKS)
    assert needs_special_tokens(harmony) and needs_special_tokens(mistral) and not needs_special_tokens(plain)
    assert not needs_special_tokens(mini.plain().tokenizer)


def test_an_answer_to_a_prompt_that_opened_or_closed_the_thinking() -> None:
    for opening, expected in (("<think>\n", [Prose("Hm", True)]), ("<think>\n\n</think>\n\n", [Prose("Hm")])):
        tokenizer: Any = Pieces(THINK, opening, ())
        reader = Thoughts(tokenizer, range(len(tokenizer.names)))
        assert [*reader.feed("Hm"), *reader.finish()] == expected
