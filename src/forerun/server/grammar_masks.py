"""The masks of one request, computed in another process: asked for early, waited for briefly.

Knows: how prefixes are asked for and masks come back, and which masks have come. Does not know: grammars, the engine's
steps. A mask depends on the prefix alone, not on when it arrives.
"""

from __future__ import annotations

import array
import codecs
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

from forerun.core import TokenBits
from forerun.errors import GrammarError
from forerun.server.grammar_messages import ALL, ASK, FORCED, common_prefix
from forerun.server.structured import GrammarSpec

MAX_MASKS = 256  # prefixes whose masks are kept
MAX_ASKED = 64  # prefixes asked for and not answered
MAX_ASKED_BYTES = 64 << 10  # of those questions: less than a socket's buffer, so that asking never blocks
PATIENCE_S = 5.0  # for a mask that the request needs before it can continue
Prefix = tuple[int, ...]
Spell = Callable[[Sequence[int], str], Sequence[int]]  # (known tokens, text behind them) -> the text's tokens


class _Known(NamedTuple):
    """What came back for a prefix."""

    allowed: TokenBits | None
    forced: bytes  # the text that alone may follow, or its beginning


class PrefixMask:
    """The AsyncGrammarMask of one request, and a ForcingMask. Used by one thread."""

    def __init__(self, channel: socket.socket, vocab_size: int, spell: Spell, spec: GrammarSpec | None = None) -> None:
        """`channel`: a socket to the process that serves this request (see grammar_matcher); `spec`: of its grammar."""
        self.spec = spec
        self._channel = channel
        self._spell = spell
        self._num_bytes = (vocab_size + 31) // 32 * 4
        self._known: OrderedDict[Prefix, _Known] = OrderedDict()
        self._asked: deque[tuple[Prefix, int]] = deque()  # in order, with the bytes of each question
        self._asked_bytes = 0
        self._last: Prefix = ()  # the last prefix asked for
        self._spelled: tuple[Prefix | None, Sequence[int]] = None, ()  # what was forced last
        self._arrived = bytearray()  # of an answer that is not complete
        self._gone = False

    def __del__(self) -> None:
        self._channel.close()  # the process then ends

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBits | None:
        """Tokens that may follow; all after a prefix that the grammar forbids, which no choice leads to.

        Raises GrammarError if the mask takes too long.
        """
        prefix = tuple(output_token_ids)
        if not self.ready(prefix, PATIENCE_S):
            raise GrammarError(_TOO_SLOW)
        return self._known[prefix].allowed

    def forced(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        """Tokens of the text that alone may follow; () where there is a choice, or nothing has arrived."""
        prefix = tuple(output_token_ids)
        known = self._known.get(prefix)
        if known is None or not known.forced:
            return ()
        if prefix != self._spelled[0]:  # a step asks twice
            text = _whole_characters(known.forced)
            self._spelled = prefix, self._spell(output_token_ids, text) if text else ()
        return self._spelled[1]

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        """Whether the mask has arrived, waiting at most `wait_s` for it; asks for it if that has not been done.

        Raises GrammarError if it will never come.
        """
        prefix, give_up = tuple(output_token_ids), monotonic() + wait_s
        if prefix in self._known:  # what has arrived stays true, whatever becomes of the process
            return True
        self._receive(0.0)
        while prefix not in self._known:
            self._ask(prefix)
            left_s = give_up - monotonic()
            self._receive(max(left_s, 0.0))
            if left_s <= 0 and prefix not in self._known:
                return False
        return True

    def _ask(self, prefix: Prefix) -> None:
        """Ask for a mask, unless it was asked for or too many answers are outstanding."""
        if len(self._asked) >= MAX_ASKED or any(prefix == asked for asked, _ in self._asked):
            return
        num_kept = common_prefix(self._last, prefix)
        question = ASK.pack(num_kept, len(prefix) - num_kept) + array.array("I", prefix[num_kept:]).tobytes()
        if self._asked and self._asked_bytes + len(question) > MAX_ASKED_BYTES:
            return
        self._channel.settimeout(PATIENCE_S)
        try:
            self._channel.sendall(question)
        except OSError:
            self._gone = True
            return
        self._asked.append((prefix, len(question)))
        self._asked_bytes += len(question)
        self._last = prefix

    def _receive(self, wait_s: float) -> None:
        """Read the answers that have arrived, waiting up to `wait_s` for the first."""
        if self._gone:
            raise GrammarError(_TOO_SLOW)
        if not self._asked:
            return
        self._channel.settimeout(wait_s)
        try:
            data = self._channel.recv(1 << 20)
        except (BlockingIOError, TimeoutError):
            return
        except OSError:
            data = b""
        self._gone = not data
        self._arrived += data
        while self._asked and self._take():
            pass

    def _take(self) -> bool:
        """Take the next answer if it is complete; returns whether it was."""
        end = 1 if self._arrived[:1] == ALL else 1 + self._num_bytes
        start = end + FORCED.size  # of the forced text
        if len(self._arrived) < start:
            return False
        stop = start + FORCED.unpack_from(self._arrived, end)[0]
        if len(self._arrived) < stop:
            return False
        prefix, asked_bytes = self._asked.popleft()
        self._asked_bytes -= asked_bytes
        bits = TokenBits(bytes(self._arrived[1:end])) if end > 1 else None
        self._known[prefix] = _Known(bits, bytes(self._arrived[start:stop]))
        del self._arrived[:stop]
        if len(self._known) > MAX_MASKS:
            self._known.popitem(last=False)
        return True


def _whole_characters(raw: bytes) -> str:
    """The text, but for a last character that is cut; "" where it begins inside of one."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return ""


_TOO_SLOW = (
    "this grammar takes too long to apply: masks of its tokens took more than a second of processor time, or too "
    "much memory, because the same text can be matched in too many ways; make the grammar simpler"
)


class AfterThinking:
    """A mask for models that may think first: it applies after the thinking, if any, else from the first token.

    It ends where a call begins instead of the text that the grammar describes.
    """

    def __init__(
        self, inner: PrefixMask, start_id: int | None, *marks: Sequence[int], call_id: int | None = None
    ) -> None:
        """`start_id`: the token that opens the thinking; None: it is open or, without `marks`, there is none.

        `marks`: the tokens that end it; of several marks the last, once the others have come, whatever is between.
        `call_id`: the token that opens a call; None: none may come.
        """
        self.inner = inner
        self.start_id = start_id
        self.marks = [list(mark) for mark in marks]
        self.call_id = call_id

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int] | TokenBits | None:
        """All tokens while the model thinks, and in a call; else the inner mask of the tokens since the thinking."""
        said = self._said(output_token_ids)
        if said is None:
            return None
        bits, opening = self.inner.allowed(said), self._opening(output_token_ids, said)
        return _with_tokens(bits, opening) if opening and bits is not None else bits

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        """See PrefixMask."""
        said = self._said(output_token_ids)
        return said is None or self.inner.ready(said, wait_s)

    def forced(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        """Nothing while the model thinks or calls, or may begin to."""
        said = self._said(output_token_ids)
        return () if said is None or self._opening(output_token_ids, said) else self.inner.forced(said)

    def _said(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """The tokens after the thinking; None while the model thinks, and once they begin a call."""
        rest: list[int] | None = list(tokens)
        if self.start_id is None or (tokens and tokens[0] == self.start_id):
            for mark in self.marks:
                rest = None if rest is None else _behind(mark, rest)
        return None if rest and rest[0] == self.call_id else rest

    def _opening(self, tokens: Sequence[int], said: Sequence[int]) -> list[int]:
        """The tokens that may open the thinking, or a call, here."""
        opening = (None if tokens else self.start_id, None if said else self.call_id)
        return [token for token in opening if token is not None]


def _with_tokens(bits: TokenBits, tokens: Sequence[int]) -> TokenBits:
    packed = bytearray(bits.packed)
    for token in tokens:
        packed[token // 8] |= 1 << token % 8
    return TokenBits(bytes(packed))


def _behind(mark: list[int], tokens: list[int]) -> list[int] | None:
    """The tokens behind the first place of `mark`; None if it is not there."""
    places = (at + len(mark) for at, token in enumerate(tokens)
              if token == mark[0] and tokens[at : at + len(mark)] == mark)  # fmt: skip
    place = next(places, None)
    return None if place is None else tokens[place:]
