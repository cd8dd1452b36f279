"""When a request ends, and which of the accepted tokens it keeps.

Knows: stop tokens, stop strings, lengths, the text so far. Does not know: how tokens were chosen. Tokens are looked
at one by one, so a stop in the middle of accepted drafts cuts exactly where plain decoding would have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """The text of one request, and what ends it."""

    request: Request
    detokenizer: Detokenizer
    text: str = ""

    def take(self, tokens: Sequence[int]) -> int:
        """Append accepted tokens to the request up to the one that ends it; how many were taken."""
        for count, token in enumerate(tokens, 1):
            self.request.token_ids.append(token)
            if self._ends(token):
                return count
        return len(tokens)

    def _ends(self, token: int) -> bool:
        """Set the finish reason if the token ends the request. A stop token's own text is shown only if asked for."""
        request = self.request
        enough = request.num_output >= request.params.min_tokens
        if enough and token in request.stop_token_ids:
            if request.params.include_stop_str_in_output:
                self.text += self.detokenizer.feed([token])
            self.text += self.detokenizer.finish()
            request.finish_reason, request.stop_reason = "stop", token
        elif not self._completes_stop(token) and request.num_remaining <= 0:
            self.text += self.detokenizer.finish()
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _completes_stop(self, token: int) -> bool:
        """Append the token's text; whether that completes a stop string, which then ends text and request."""
        before = len(self.text)
        self.text += self.detokenizer.feed([token])
        found = _first_stop(self.text, self.request.params.stop, before)
        if found is None or self.request.num_output < self.request.params.min_tokens:
            return False
        start, stop = found
        self.text = self.text[: start + len(stop) if self.request.params.include_stop_str_in_output else start]
        self.request.finish_reason, self.request.stop_reason = "stop", stop
        return True

    def visible(self) -> str:
        """The text that may be shown now: while the request runs, no beginning of a stop string at its end."""
        if self.request.finish_reason is not None:
            return self.text
        held = max((_overlap(self.text, stop) for stop in self.request.params.stop), default=0)
        return self.text[: len(self.text) - held]


def _first_stop(text: str, stops: Sequence[str], before: int) -> tuple[int, str] | None:
    """The earliest stop string that ends after character `before` -> (where it starts, which)."""
    hits = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
    return min(((start, stop) for start, stop in hits if start >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
