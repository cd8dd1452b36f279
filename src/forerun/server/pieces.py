"""A chat answer's stream as a sequence of items: reasoning, text or a call, one after the other.

Knows: deltas of chat completions. Does not know: the APIs whose events are made from it, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Kind = Literal["reasoning", "text", "call"]


class TextPiece(NamedTuple):
    """New text of an item; `call_id` and `name` belong to calls, `logprobs` to text."""

    kind: Kind
    begins: bool
    text: str
    call_id: str = ""
    name: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()


class Pieces:
    """Divides one sample's deltas into pieces."""

    def __init__(self, end_of_reasoning: str | None) -> None:
        """`end_of_reasoning`: the mark behind the thinking, if any; log-probabilities up to it are dropped."""
        self._mark = end_of_reasoning
        self._current: tuple[Kind, int] | None = None
        self._logprobs: list[dict[str, Any]] = []  # of text that has not arrived yet

    def take(self, choice: dict[str, Any]) -> Iterator[TextPiece]:
        """The pieces of a chunk's choice."""
        delta = choice["delta"]
        self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
        if delta.get("reasoning_content"):
            yield TextPiece("reasoning", self._begins("reasoning"), delta["reasoning_content"])
        if delta.get("content"):
            yield self._text(delta["content"])
        for call in delta.get("tool_calls") or ():
            self._logprobs.clear()
            function = call["function"]
            begins = self._begins("call", call["index"])
            yield TextPiece(
                "call", begins, function.get("arguments") or "", call.get("id", ""), function.get("name", "")
            )

    def finish(self) -> Iterator[TextPiece]:
        """Log-probabilities of tokens that added no text, the end among them."""
        if self._logprobs and self._current is not None and self._current[0] == "text":
            yield self._text("")

    def _text(self, text: str) -> TextPiece:
        entries, self._logprobs = self._logprobs, []
        marks = [place for place, entry in enumerate(entries) if entry["token"] == self._mark]
        own = entries[marks[-1] + 1 if marks else 0 :]
        is_behind_call = self._current is not None and self._current[0] == "call"
        while is_behind_call and text in "".join([entry["token"] for entry in own[1:]]):
            own = own[1:]  # the call's: one step may bring its end and the beginning of a text
        return TextPiece("text", self._begins("text"), text, logprobs=tuple(own))

    def _begins(self, kind: Kind, number: int = 0) -> bool:
        before, self._current = self._current, (kind, number)
        return before != self._current
