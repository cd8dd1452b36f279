"""Splits a model's reasoning, the text between two marks such as <think> and </think>, from its answer.

Knows: the marks, and text that arrives in pieces. Does not know: tokens, requests.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from forerun.errors import ConfigError


class ReasoningMarks(NamedTuple):
    """What stands around a model's reasoning."""

    start: str
    end: str
    label: str = ""  # first line of the reasoning, which is no reasoning


STYLES = {
    "think": ReasoningMarks("<think>", "</think>"),
    "longcat": ReasoningMarks("<longcat_think>", "</longcat_think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "gemma4": ReasoningMarks("<|channel>", "<channel|>", "thought\n"),
}
PARSERS: dict[str, str | None] = {  # vLLM's names too; the tool parser "openai" reads reasoning itself
    "auto": None, "none": None, **{style: style for style in STYLES}, "openai_gptoss": None,
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2"), "think"),
}  # fmt: skip


class ReasoningSplit(NamedTuple):
    """New text, divided."""

    reasoning: str = ""
    content: str = ""


class Phase(Enum):
    """The part of an output that is being read."""

    START = "nothing but blanks so far"
    OPENED = "right behind the opening mark"
    INSIDE = "in the thinking"
    CLOSED = "right behind the closing mark"
    SAID = "in the answer"


class ReasoningSplitter:
    """Splits one output, fed in pieces. Thinking can only begin it; blank lines around the marks belong to neither."""

    def __init__(self, marks: ReasoningMarks, inside: bool = False) -> None:
        """`inside`: the prompt has opened the thinking already."""
        self.marks = marks
        self.start = marks.start
        self.end = marks.end
        self.inside = inside
        self._phase = Phase.OPENED if inside else Phase.START
        self._held = ""
        self._label = marks.label

    def feed(self, text: str) -> ReasoningSplit:
        """What is certain now; what may be part of a mark is held back."""
        self._held += text
        reasoning = content = ""
        while True:
            phase = self._phase
            if phase is Phase.INSIDE:
                reasoning += self._take_thought()
            elif phase is Phase.SAID:
                content, self._held = content + self._held, ""
            else:
                self._leave(phase)
            if self._phase is phase:
                return ReasoningSplit(reasoning, content)

    def finish(self) -> ReasoningSplit:
        """What was held back; the beginning of a label is nothing."""
        text, self._held = self._held, ""
        if self._phase is Phase.OPENED:
            return ReasoningSplit()
        return ReasoningSplit(reasoning=text) if self._phase is Phase.INSIDE else ReasoningSplit(content=text)

    def _leave(self, phase: Phase) -> None:
        """Skip blanks and marks once it is certain what they are."""
        if phase is not Phase.START:
            self._held = self._held.lstrip("\n")
            if phase is Phase.OPENED and self._label:
                if self._held != self._label and self._label.startswith(self._held):
                    return
                self._held, self._label = self._held.removeprefix(self._label).lstrip("\n"), ""
            if self._held:
                self._phase = Phase.INSIDE if phase is Phase.OPENED else Phase.SAID
            return
        stripped = self._held.lstrip()
        if stripped.startswith(self.start):
            self._held, self._phase = stripped.removeprefix(self.start), Phase.OPENED
        elif not self.start.startswith(stripped):
            self._phase = Phase.SAID

    def _take_thought(self) -> str:
        thought, mark, rest = self._held.partition(self.end)
        if mark:
            self._held, self._phase = rest, Phase.CLOSED
            return thought.rstrip("\n")
        certain = self._held[: len(self._held) - held_back(self._held, self.end)].rstrip("\n")
        self._held = self._held[len(certain) :]
        return certain


def held_back(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` without completing it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def reasoning_style(parser: str, template: str | None) -> ReasoningMarks | None:
    """The marks of a model's reasoning, by option or found in its chat template; None if the model does not reason.

    Raises ConfigError for an unknown parser.
    """
    if parser not in PARSERS:
        raise ConfigError(f"reasoning_parser must be one of {', '.join(PARSERS)}; got {parser!r}")
    if parser == "auto":
        return next((marks for marks in STYLES.values() if marks.end in (template or "")), None)
    style = PARSERS[parser]
    return STYLES[style] if style else None


def starts_inside(prompt: str, marks: ReasoningMarks, said: str | None = None) -> bool:
    """Whether an answer begins in thinking: a rendered prompt ends with its opening, or it continues what was `said`.

    Elsewhere a prompt may mention marks: users write about them.
    """
    if said is not None:
        return said.lstrip().startswith(marks.start) and marks.end not in said
    return prompt.rstrip().endswith((marks.start, (marks.start + marks.label).rstrip()))


def may_think(prompt: str, marks: ReasoningMarks) -> bool:
    """Whether the answer to a rendered prompt may begin with thinking: the template has not closed it at the end."""
    return not prompt.rstrip().endswith(marks.end)
