"""Shows an answer: its thoughts apart from what it says, and which drafter guessed which part.

Knows: colours, and how tokens become pieces of the visible text. Does not know: engines, how models mark thoughts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from forerun.core import CompletionOutput, SamplingParams

LOOKED_UP, BY_MODEL, OTHER = "green", "cyan", "magenta"
THOUGHT = "dim"


class DraftedPiece(NamedTuple):
    """A piece of visible text and the drafter it came from ("": the target chose it without a draft)."""

    text: str
    source: str
    is_thought: bool = False


def shown_params(tokenizer: Any, params: SamplingParams) -> SamplingParams:
    """With the special tokens that mark thoughts in the text, so that `DraftedText` can tell thoughts."""
    from forerun.server.thoughts import needs_special_tokens

    return replace(params, skip_special_tokens=False) if needs_special_tokens(tokenizer) else params


class DraftedText:
    """Cuts a growing answer into pieces by drafter.

    of_chat: its prompt is of the chat template, and it was asked for with `shown_params`; thoughts are told then.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], of_chat: bool = False) -> None:
        from forerun.weights.detokenizer import IncrementalDetokenizer

        self._thoughts: Any = None
        if of_chat:
            from forerun.server.thoughts import Thoughts, needs_special_tokens

            self._thoughts = Thoughts(tokenizer, prompt_token_ids)
            tokenizer = tokenizer.with_special_tokens() if needs_special_tokens(tokenizer) else tokenizer
        self._thought_last = False
        self.said = ""  # so far, without thoughts; of chats alone
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
        return pieces if self._thoughts is None else list(self._told(pieces, output.finish_reason is not None))

    def _told(self, pieces: Iterable[DraftedPiece], is_over: bool) -> Iterable[DraftedPiece]:
        """Without the marks of thoughts; an empty line is between these and the answer."""
        read = [(prose, piece.source) for piece in pieces for prose in self._thoughts.feed(piece.text)]
        read += [(prose, "") for prose in self._thoughts.finish()] if is_over else []
        for (text, is_thought), source in read:
            if self._thought_last and not is_thought:
                yield DraftedPiece("\n\n", "")
            self._thought_last = is_thought
            self.said += "" if is_thought else text
            yield DraftedPiece(text, source, is_thought)

    def rest(self) -> list[DraftedPiece]:
        """What is held back of an answer that was stopped."""
        return [] if self._thoughts is None else list(self._told([], True))

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
            result.append(run.text, _style(run.source) if run.source else THOUGHT if run.is_thought else None)
    return result


def write(pieces: Sequence[DraftedPiece], console: Console, show_drafts: bool, end: str = "") -> None:
    """Show pieces: thoughts dimmed on a terminal, and whatever was drafted in colours or brackets if asked for."""
    if show_drafts:
        console.print(render(pieces, not has_colour(console)), end=end, soft_wrap=True)
        return
    for piece in pieces:
        if piece.is_thought and has_colour(console):
            typer.secho(piece.text, nl=False, dim=True)
        else:
            typer.echo(piece.text, nl=False)
    typer.echo(end, nl=False)


def _runs(pieces: Sequence[DraftedPiece]) -> Iterable[DraftedPiece]:
    """Neighbouring pieces of one drafter joined."""
    run = DraftedPiece("", "")
    for piece in pieces:
        if piece[1:] == run[1:]:
            run = run._replace(text=run.text + piece.text)
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
