"""When a request ends, and which of the accepted tokens it keeps.

Knows: stop tokens, stop strings, lengths, the text so far. Does not know: how tokens were chosen. Tokens are checked
one by one, so a stop in the middle of accepted drafts ends the text exactly where plain decoding would have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from forerun.core import Request


class Detokenizer(Protocol):
    """Turns tokens into text piece by piece."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text these tokens add; never half a character."""

    def finish(self) -> str:
        """What is still held back, once no more tokens come."""


@dataclass(slots=True)
class OutputText:
    """The text of one request, and what ends it. Without stop strings tokens are spelled when the text is wanted."""

    request: Request
    detokenizer: Detokenizer
    text: str = ""
    _unspelled: list[int] = field(default_factory=list)  # tokens behind the text
    _matched: list[int] = field(default_factory=list)  # by stop string: how many of its first characters end the text

    def __post_init__(self) -> None:
        self._matched = [0] * len(self.request.params.stop)

    def take(self, tokens: Sequence[int]) -> int:
        """Append accepted tokens to the request up to the one that ends it -> how many were taken."""
        request = self.request
        is_short = len(request.token_ids) + len(tokens) < request.max_len
        if is_short and not self._matched and request.stop_token_ids.isdisjoint(tokens):
            request.token_ids.extend(tokens)
            self._unspelled.extend(tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            self.request.token_ids.append(token)
            if self._ends(token):
                return count
        return len(tokens)

    def _ends(self, token: int) -> bool:
        """Set the finish reason if the token ends the request. A stop token's own text is shown only if asked for."""
        request = self.request
        if token in request.stop_token_ids and request.num_output >= request.params.min_tokens:
            if request.params.include_stop_str_in_output:
                self._unspelled.append(token)
            self._finish()
            request.finish_reason, request.stop_reason = "stop", token
        elif not self._completes_stop(token) and request.num_remaining <= 0:
            self._finish()
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _finish(self) -> None:
        self._spell()
        self.text += self.detokenizer.finish()

    def _spell(self) -> None:
        if self._unspelled:
            self.text += self.detokenizer.feed(self._unspelled)
            self._unspelled.clear()

    def _completes_stop(self, token: int) -> bool:
        """Append the token's text; returns whether that completes a stop string and so ends the request."""
        if not self._matched:
            self._unspelled.append(token)
            return False
        found = self._read(self.detokenizer.feed([token]))
        if found is None or self.request.num_output < self.request.params.min_tokens:
            return False
        start, stop = found
        self.text = self.text[: start + len(stop) if self.request.params.include_stop_str_in_output else start]
        self.request.finish_reason, self.request.stop_reason = "stop", stop
        return True

    def _read(self, piece: str) -> tuple[int, str] | None:
        """Append a piece of text -> start and text of the earliest stop string that ends in it, if any."""
        before, hits = len(self.text), []
        self.text += piece
        for number, stop in enumerate(self.request.params.stop):
            self._matched[number], end = _match(stop, self._matched[number], piece)
            hits += [] if end is None else [(before + end - len(stop), stop)]
        return min(hits, default=None)

    def visible(self) -> str:
        """The text that may be shown now: while the request runs, without the beginning of a stop string at its end."""
        self._spell()
        if self.request.finish_reason is not None:
            return self.text
        return self.text[: len(self.text) - max(self._matched, default=0)]


def _match(stop: str, matched: int, piece: str) -> tuple[int, int | None]:
    """Continue matching after a text that ends with the first `matched` characters of `stop` (Knuth-Morris-Pratt).

    -> how many first characters of `stop` (not all) the text ends with now; where in `piece` the first match ends.
    """
    borders, end = _borders(stop), None
    for position, character in enumerate(piece, 1):
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        if matched == len(stop):
            end = position if end is None else end
            matched = borders[-1]
    return matched, end


@lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """For every prefix of `text`, the length of its longest proper suffix that is also its prefix."""
    borders, length = [0], 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length - 1]
        length += text[length] == character
        borders.append(length)
    return tuple(borders)
