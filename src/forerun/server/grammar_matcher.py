"""Computes which tokens may follow a text under a grammar, and which text must, in a process for each request.

Knows: xgrammar's matchers, and the budget of processor time a request has for its masks. Does not know: requests,
compiling. A mask depends on the prefix alone; everything kept only saves time. If a mask takes longer than the
budget, the kernel ends the process.
"""

from __future__ import annotations

import array
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np
import xgrammar

from forerun.server.grammar_messages import ALL, ASK, FORCED, SOME, common_prefix
from forerun.server.json_limits import StringLimit
from forerun.server.json_strings import Longest

MAX_CURSORS = 8  # matcher states kept for one request (its samples, its drafts)
BURST_S = 1.0  # CPU time a request may take for one mask, or for several that exceed what each one earns
EARN_S = 0.02  # CPU time that each mask adds to the budget
LEAST_S = 0.001  # a timer of 0 seconds would switch it off
QUICK_S = 0.005  # a mask that takes longer is all that is computed: where texts match in many ways, none is forced
MAX_FORCED = 256  # bytes of forced text sent at once, more than the tokens that are drafted in a step


@dataclass(slots=True)
class _MatcherCursor:
    """A matcher and the tokens it has read."""

    matcher: Any
    tokens: list[int]
    strange: frozenset[int]  # tokens without text: the library would print a warning for them

    def move(self, tokens: Sequence[int]) -> bool:
        """Go to the state after `tokens` from the common prefix; False if the grammar forbids them."""
        common = common_prefix(self.tokens, tokens)
        if common < len(self.tokens):
            self.matcher.rollback(len(self.tokens) - common)
            del self.tokens[common:]
        for token in tokens[common:]:
            if self.matcher.is_terminated() or token in self.strange or not self.matcher.accept_token(token):
                return False
            self.tokens.append(token)
        return True


class Matcher:
    """The masks of one request."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, vocabulary: Sequence[bytes], stop_token_ids: Sequence[int],
        longest: Longest | None = None,
    ) -> None:  # fmt: skip
        """`longest`: the limit on string lengths; the text is JSON then."""
        self._compiled = compiled
        self._num_words = (len(vocabulary) + 31) // 32
        self._strings = StringLimit(vocabulary, longest) if longest is not None else None
        self._stop = _bits_of(stop_token_ids, self._num_words)
        special = compiled.tokenizer_info.special_token_ids
        self._strange = frozenset(special) - frozenset(stop_token_ids)
        self._vocabulary = vocabulary
        self._cursors: list[_MatcherCursor] = []  # the last used comes last
        self._ahead: tuple[list[int], bytes] = [], b""  # a prefix, and the text that was forced after it

    def allowed(self, prefix: Sequence[int]) -> bytes | None:
        """A bit for each token that may follow; None if all may, and after a prefix that the grammar forbids."""
        cursor = self._nearest(prefix)
        if not cursor.move(prefix):
            return None
        if cursor.matcher.is_terminated():
            return self._stop
        bits = self._fill(cursor.matcher)
        return bits if self._strings is None else self._strings.within(prefix, bits)

    def forced(self, prefix: Sequence[int]) -> bytes:
        """The text that alone may follow a prefix `allowed` was just asked for, as UTF-8; b"" where there is a choice.

        What is left of a text known to be forced is not looked for again: long ones take time in proportion.
        """
        cursor = self._cursors[-1]
        if len(cursor.tokens) < len(prefix) or cursor.matcher.is_terminated():
            return b""
        before, text = self._ahead
        if prefix[: len(before)] == before:
            said = b"".join([self._vocabulary[token] for token in prefix[len(before) :]])
            text = text[len(said) :] if text.startswith(said) else b""
        else:
            text = b""
        self._ahead = list(prefix), text or _jump(cursor.matcher)
        return self._ahead[1]

    def _fill(self, matcher: Any) -> bytes | None:
        words = np.full(self._num_words, -1, np.int32)
        return words.tobytes() if matcher.fill_next_token_bitmask(words) else None

    def _nearest(self, prefix: Sequence[int]) -> _MatcherCursor:
        """The cursor nearest to `prefix`; a new one if rolling back would cost more."""
        best = max(self._cursors, key=lambda c: common_prefix(c.tokens, prefix), default=None)
        shared = common_prefix(best.tokens, prefix) if best else 0
        if best is None or (shared < min(len(best.tokens), len(prefix)) // 2 and len(self._cursors) < MAX_CURSORS):
            best = _MatcherCursor(xgrammar.GrammarMatcher(self._compiled), [], self._strange)
        else:
            self._cursors.remove(best)
        self._cursors.append(best)
        return best


def serve(channel: socket.socket, matcher: Matcher) -> None:
    """Answer prefixes with masks until the other side is gone."""
    tokens: list[int] = []
    left_s = BURST_S
    with channel.makefile("rb") as asked:
        while len(head := asked.read(ASK.size)) == ASK.size:
            num_kept, num_new = ASK.unpack(head)
            tokens[num_kept:] = array.array("I", asked.read(4 * num_new))
            started = process_time()
            signal.setitimer(signal.ITIMER_PROF, max(left_s, LEAST_S))  # SIGPROF ends a process without a handler
            bits = matcher.allowed(tokens)
            is_quick = process_time() - started < QUICK_S
            forced = matcher.forced(tokens)[:MAX_FORCED] if bits is not None and is_quick else b""
            signal.setitimer(signal.ITIMER_PROF, 0)
            left_s = min(BURST_S, left_s - (process_time() - started) + EARN_S)
            channel.sendall((ALL if bits is None else SOME + bits) + FORCED.pack(len(forced)) + forced)


def _jump(matcher: Any) -> bytes:
    try:
        return str(matcher.find_jump_forward_string()).encode()
    except UnicodeError:  # it ends, or begins, inside a character
        return b""


def _bits_of(token_ids: Sequence[int], num_words: int) -> bytes:
    packed = bytearray(4 * num_words)
    for token in token_ids:
        packed[token // 8] |= 1 << token % 8
    return bytes(packed)
