"""Shows which drafter guessed which part of a text.

Knows: colours, and how tokens become pieces of the visible text. Does not know: engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from forerun.core import CompletionOutput

LOOKED_UP, BY_MODEL, OTHER = "green", "cyan", "magenta"


class DraftedPiece(NamedTuple):
    """A piece of visible text and the drafter it came from ("": the target chose it without a draft)."""

    text: str
    source: str


class DraftedText:
    """Cuts a growing answer into pieces by drafter."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
        from forerun.weights.detokenizer import IncrementalDetokenizer

        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._num_tokens = 0
        self._shown = 0  # characters handed out
        self._waiting: list[tuple[int, str]] = []  # lengths of pieces not handed out yet

    def take(self, output: CompletionOutput) -> list[DraftedPiece]:
        """The pieces that became visible since the last call."""
        for index in range(self._num_tokens, len(output.token_ids)):
            text = self._detokenizer.feed([output.token_ids[index]])
            self._waiting.append((len(text), output.token_sources[index]))
        self._num_tokens = len(output.token_ids)
        pieces = list(self._visible(output.text))
        if output.finish_reason is not None and self._shown < len(output.text):
            pieces.append(DraftedPiece(output.text[self._shown :], ""))
            self._shown = len(output.text)
        return pieces

    def _visible(self, text: str) -> Iterable[DraftedPiece]:
        """Complete pieces within the visible text, whose end may be held back for a stop string."""
        while self._waiting and self._shown + self._waiting[0][0] <= len(text):
            length, source = self._waiting.pop(0)
            if length:
                yield DraftedPiece(text[self._shown : self._shown + length], source)
            self._shown += length


def _style(source: str) -> str:
    """The colour of a drafter's tokens, by what it drafts with."""
    from forerun.drafters.registry import all_specs

    spec = all_specs().get(source)
    return OTHER if spec is None else BY_MODEL if spec.model else LOOKED_UP


def render(pieces: Sequence[DraftedPiece], marked: bool) -> Text:
    """Pieces as coloured text; `marked` puts accepted runs in square brackets instead."""
    result = Text()
    for run in _runs(pieces):
        if marked and run.source:
            result.append(f"[{run.text}]")
        else:
            result.append(run.text, _style(run.source) if run.source else None)
    return result


def _runs(pieces: Sequence[DraftedPiece]) -> Iterable[DraftedPiece]:
    """Neighbouring pieces of one drafter joined."""
    run = DraftedPiece("", "")
    for piece in pieces:
        if piece.source == run.source:
            run = DraftedPiece(run.text + piece.text, run.source)
        else:
            if run.text:
                yield run
            run = piece
    if run.text:
        yield run


def has_colour(console: Console) -> bool:
    """Whether the terminal shows colours; where it does not, accepted drafts are put in brackets."""
    return console.color_system is not None and not console.no_color


def legend(sources: Iterable[str], marked: bool) -> Text:
    """What the colours, or brackets, mean."""
    if marked:
        return Text("[in brackets]: drafted and accepted")
    named = [Text(name, _style(name)) for name in dict.fromkeys(sources) if name]
    return Text("drafted by ").append_text(Text(", ").join(named)) if named else Text("nothing was drafted")
