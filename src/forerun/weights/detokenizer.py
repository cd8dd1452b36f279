"""IncrementalDetokenizer: token ids in, text out, never half a character.

Knows: how a stream of tokens becomes a stream of text. Does not know: requests or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

CONTEXT_TOKENS = 16  # tokens of the prompt that can still matter for the text after it


class TokenTexts(Protocol):
    """What a detokenizer asks of a tokenizer."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether a space at the very start of a text is dropped."""

    @property
    def has_token_bytes(self) -> bool:
        """Whether `token_bytes` is exact; if not, texts come from `decode_window`."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; b"" for special tokens and unknown ids."""

    def decode_window(self, token_ids: Sequence[int]) -> str:
        """The text of a few tokens by the library's own decoder."""


class IncrementalDetokenizer:
    """Turns one request's tokens into text as they come.

    The concatenation of all deltas, `finish` included, is the text of all tokens after the context. Bytes that are
    not UTF-8 become U+FFFD as soon as they cannot be completed.
    """

    def __init__(self, tokenizer: TokenTexts, context: Sequence[int] = ()) -> None:
        """`context`: the token ids before the first one fed (the prompt); its text is not repeated."""
        self._stream: _ByteStream | _WindowStream
        self._stream = _ByteStream(tokenizer) if tokenizer.has_token_bytes else _WindowStream(tokenizer)
        self._stream.skip(context)

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that has become certain."""
        return self._stream.feed(token_ids)

    def finish(self) -> str:
        """Whatever was held back; an unfinished character becomes U+FFFD."""
        return self._stream.finish()


class _ByteStream:
    """Exact: every token has its own bytes."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_leading_space

    def skip(self, context: Sequence[int]) -> None:
        self.feed(context[-CONTEXT_TOKENS:])
        self._at_start = self._at_start and not any(map(self._tokenizer.token_bytes, context))

    def feed(self, token_ids: Sequence[int]) -> str:
        raw = b"".join(map(self._tokenizer.token_bytes, token_ids))
        if self._at_start and raw:
            raw, self._at_start = raw.removeprefix(b" "), False
        return self._decoder.decode(raw)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For decoders whose text depends on neighbouring tokens: decode a short window with and without the new tokens.

    The window starts at a token whose text was emitted whole, so what a decoder does at the start of a text happens
    in both decodings and cancels. Text ending in U+FFFD is held back: it may be half a character.
    """

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_known = 0  # tokens of the window whose text was emitted
        self._known = ""

    def skip(self, context: Sequence[int]) -> None:
        self._window = list(context[-CONTEXT_TOKENS:])
        self._num_known = len(self._window)
        self._known = self._tokenizer.decode_window(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode_window(self._window)
        return "" if text.endswith("\ufffd") else self._advance(text)

    def _advance(self, text: str) -> str:
        delta = text[len(self._known) :]
        self._window = self._window[max(self._num_known - 1, 0) :]
        self._num_known = len(self._window)
        self._known = self._tokenizer.decode_window(self._window)
        return delta

    def finish(self) -> str:
        return self._advance(self._tokenizer.decode_window(self._window))
