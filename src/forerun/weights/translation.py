"""Two tokenizers over one text: a request's text in a draft model's tokens, and drafted text in the target's.

Knows: both tokenizers, which of their tokens stand for the same bytes, where in a text tokens begin and end. Does not
know: models, requests, how drafts are drawn or verified.

Nothing here has to be right for the output to be: a wrong token is a draft that is not accepted. What is kept in every
case is that texts of any bytes can be followed, and that a step costs no more for a long text than for a short one.

**Special tokens.** One that the draft's tokenizer has by the same name becomes that token, starts and ends of texts
become its own; all others are left out. Written out as text their names would be strings that the draft model never
read, and that it would go on to imitate.

Source: drafts as text are SLEM of Timor et al., arXiv 2502.05202; that the vocabularies' common tokens share the noise
of the coupled rule is forerun's own.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from forerun.errors import VocabularyError
from forerun.weights.decoders import BYTE_TOKEN
from forerun.weights.tokenizer import Tokenizer

WINDOW: Final = 12  # draft tokens at the end of a text that are tokenized again with what follows them
TAIL: Final = 8  # known tokens that drafted text is tokenized behind
NOTHING: Final = -1  # what a special token without a counterpart becomes
_PROBES: Final = ("The quick Brown fox", "a  b", "one\ntwo", "Caf\u00e9 \u00dcn\u00efted")


class InTarget(NamedTuple):
    """Drafted text in the target's tokens."""

    tokens: list[int]
    last: list[int]  # of each token: the drafted token, counted from 0, with which its text is complete
    is_whole: list[bool]  # whether the text of that drafted token is the token's very text

    def add(self, token: int, last: int, is_whole: bool) -> None:
        """One more token."""
        self.tokens.append(token)
        self.last.append(last)
        self.is_whole.append(is_whole)


def is_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Whether the same ids mean the same texts in both."""
    return target.vocabulary() == draft.vocabulary()


def check_translatable(tokenizer: Tokenizer, name: str, role: str) -> None:
    """Raise VocabularyError for a tokenizer whose tokens do not give texts back, between unequal vocabularies.

    name: of the model; role: what the model is, for the message.
    """
    advice = "choose a draft model with the target's tokenizer, or another drafter"
    first = "target and draft have different vocabularies, so drafts are handed over as text; but the tokenizer of"
    if not tokenizer.has_token_bytes:
        raise VocabularyError(
            f"{first} the {role} {name} has tokens without a text of their own (their spaces depend on neighbours): "
            f"{advice}"
        )
    for probe in _PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False)
        found = b"".join(map(tokenizer.token_bytes, ids))
        is_unknown = any(not tokenizer.token_bytes(token_id) for token_id in ids)  # a character without a token
        if not is_unknown and found.removeprefix(b" ") != probe.encode():
            got = found.decode("utf-8", "replace")
            raise VocabularyError(f"{first} the {role} {name} makes {got!r} of {probe!r}: {advice}")


class Translation:
    """How texts get from a target's tokens to a draft's and back.

    `num_columns` and `columns` number the draft's tokens so that those which are one token of the target's have that
    one's number: noise by column then is the target's noise. All others come behind the target's vocabulary.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, vocab_size: int, draft_vocab_size: int) -> None:
        """The sizes are the models', whose logits may have more entries than there are tokens, or fewer."""
        self.target, self.draft = target, draft
        self.specials = self._counterparts(draft_vocab_size)
        self._vocab_size, self._draft_vocab_size = vocab_size, draft_vocab_size
        first = target.encode("a", add_special_tokens=False)[:1]
        self._adds_space = any(target.token_bytes(token).startswith(b" ") for token in first)

    def _counterparts(self, draft_vocab_size: int) -> dict[int, int]:
        """Every special token of the target's -> the draft's, or NOTHING."""
        target, draft = self.target, self.draft
        end = next(iter(draft.eos_token_ids), None)
        roles: dict[int, int | None] = dict.fromkeys(target.eos_token_ids, end)
        if target.bos_token_id is not None:
            roles[target.bos_token_id] = draft.bos_token_id
        found, of_draft = {}, draft.special_ids
        for token in target.special_ids:
            named = draft.token_id(target.special_text(token))
            own = named if named in of_draft else roles.get(token)
            found[token] = own if own is not None and own < draft_vocab_size else NOTHING
        return found

    @cached_property
    def _drafted_specials(self) -> dict[int, int]:
        """The draft's special tokens -> the target's; of several ends of texts the first that the model names."""
        found: dict[int, int] = {}
        for token in (*self.target.eos_token_ids, *sorted(self.specials)):
            if token < self._vocab_size and (own := self.specials.get(token, NOTHING)) != NOTHING:
                found.setdefault(own, token)
        return found

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """The target's token for a text; a byte token only where there is no other."""
        target = self.target
        ids = sorted(target.vocabulary().items(), key=lambda item: (bool(BYTE_TOKEN.fullmatch(item[0])), item[1]))
        found: dict[bytes, int] = {}
        for _, token in ids:
            if token < self._vocab_size and (raw := target.token_bytes(token)):
                found.setdefault(raw, token)
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)

    @cached_property
    def columns(self) -> list[int]:
        """Of every entry of the draft's logits its column, no two the same."""
        found, behind = [NOTHING] * self._draft_vocab_size, self._vocab_size
        free = dict(self._by_bytes)
        for token in range(self._draft_vocab_size):
            raw = self.draft.token_bytes(token)
            found[token] = free.pop(raw, NOTHING) if raw else self._drafted_specials.get(token, NOTHING)
        for token, column in enumerate(found):
            if column == NOTHING:
                found[token], behind = behind, behind + 1
        return found

    @cached_property
    def num_columns(self) -> int:
        """One more than the largest column."""
        return self._vocab_size + self._draft_vocab_size - self.num_common

    @cached_property
    def _common(self) -> frozenset[int]:
        """The target's tokens that the draft has, too."""
        return frozenset(column for column in self.columns if column < self._vocab_size)

    @property
    def num_common(self) -> int:
        """How many tokens both have."""
        return len(self._common)

    def in_target(self, known: Sequence[int], drafted: Sequence[int]) -> InTarget:
        """The target's tokens for drafted tokens, behind its known ones, whose ends decide how they are cut.

        A token that is not whole may still merge with what follows: the text is drafted no further. Ends before a
        drafted special token, and before bytes that are not UTF-8.
        """
        before, held = self._tail(known)
        told = InTarget([], [], [])
        said, bounds = self._text_of(drafted)
        if not said.startswith(held):
            return told
        said, bounds = said[len(held) :], [bound - len(held) for bound in bounds]
        self._cut(before + held, said, bounds, drafted, told)
        is_all = not said or (bool(told.last) and told.last[-1] == len(bounds) - 1)
        if is_all and len(bounds) < len(drafted) and drafted[len(bounds)] in self._drafted_specials:
            told.add(self._drafted_specials[drafted[len(bounds)]], len(bounds), is_whole=True)
        return told

    def _tail(self, known: Sequence[int]) -> tuple[bytes, bytes]:
        """The last of the known text, and the bytes behind it that are not a whole character yet."""
        raw = b""
        for token in reversed(known[-TAIL:]):
            if token in self.specials:
                break
            raw = self.target.token_bytes(token) + raw
        if not raw and self._adds_space:
            return b"\n", b""  # text that begins nowhere gets a space of its own
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(raw)
        held = decoder.getstate()[0]
        raw = raw[: len(raw) - len(held)]
        while True:
            try:
                raw.decode()
                return raw, held
            except UnicodeDecodeError as error:
                raw = raw[error.end :]

    def _text_of(self, drafted: Sequence[int]) -> tuple[bytes, list[int]]:
        """The bytes of drafted tokens up to the first without any, and where each ends."""
        raw, bounds = b"", []
        for token in drafted:
            piece = self.draft.token_bytes(token)
            if not piece:
                break
            raw += piece
            bounds.append(len(raw))
        return raw, bounds

    def _cut(self, before: bytes, said: bytes, bounds: Sequence[int], drafted: Sequence[int], told: InTarget) -> None:
        """Tokenize what was said behind the text before it, and keep what lies behind that."""
        raw = before + said
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            text = raw[: error.start].decode()
        ids = self.target.encode(text, add_special_tokens=False)
        pieces = [self.target.token_bytes(token) for token in ids]
        end = -1 if b"".join(pieces) == b" " + text.encode() else 0  # a space that stands for the start of a text
        for token, piece in zip(ids, pieces, strict=True):
            start, end = end, end + len(piece)
            if start == end or end > len(raw):  # no text: an unknown character, or the name of a special token
                return
            if end <= len(before):
                continue
            # a token that began in the known text cannot be said any more; its rest can, in other tokens
            if start < len(before):
                start, parts = len(before), list(self._parts(raw, len(before), end))
            else:
                parts = self._as_drafted(token, start - len(before), end - len(before), bounds, drafted)
                parts = [(part, len(before) + part_end) for part, part_end in parts]
            for part, part_end in parts:
                last = bisect_left(bounds, part_end - len(before))
                if part >= self._vocab_size or last >= len(bounds):
                    return
                begin = len(before) + (bounds[last - 1] if last else 0)
                told.add(part, last, is_whole=(start, part_end) == (begin, len(before) + bounds[last]))
                start = part_end
            if start != end:
                return

    def _as_drafted(
        self, token: int, start: int, end: int, bounds: Sequence[int], drafted: Sequence[int]
    ) -> list[tuple[int, int]]:
        """A token from `start` to `end`, or the several that the draft said it in although it has the one, too."""
        first, last = bisect_left(bounds, start + 1), bisect_left(bounds, end)
        is_cut_alike = (bounds[first - 1] if first else 0) == start and bounds[last] == end
        own = [self.columns[one] for one in drafted[first : last + 1]]
        if not is_cut_alike or token not in self._common or max(own) >= self._vocab_size:
            return [(token, end)]
        return list(zip(own, bounds[first : last + 1], strict=True))

    def _parts(self, raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The longest tokens that fit, one after the other -> each and its end; stops where none does."""
        while start < end:
            lengths = range(min(self._longest, end - start), 0, -1)
            length = next((n for n in lengths if raw[start : start + n] in self._by_bytes), 0)
            if length == 0:
                return
            start += length
            yield self._by_bytes[raw[start - length : start]], start


class Transcript:
    """A text in the draft's tokens, kept up with the target's.

    `ids` is changed in place: new text may merge with the last tokens of the old, of which as many as WINDOW are
    tokenized again; those before, `num_settled`, stay as they are.
    """

    def __init__(self, translation: Translation) -> None:
        self.ids = list(translation.draft.start_ids)
        self.num_settled = len(self.ids)
        self._translation = translation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = translation.target.strips_leading_space
        self._places = [(0, 0)] * len(self.ids)  # of every token: its first character, and the one after its last
        self._num_fixed = len(self.ids)  # tokens up to the last special one
        self._length = 0  # characters
        self._tail, self._tail_start = "", 0  # the text from the first settled token on

    @property
    def num_final(self) -> int:
        """Leading tokens that no further text can change: `num_settled`, and all but the last WINDOW."""
        return max(self.num_settled, len(self.ids) - WINDOW)

    def extend(self, token_ids: Sequence[int]) -> int:
        """The target's text goes on with these tokens -> how many of `ids` stayed as they were."""
        kept, raw = len(self.ids), bytearray()
        specials, bytes_of = self._translation.specials, self._translation.target.token_bytes
        for token in token_ids:
            own = specials.get(token)
            if own is None:
                raw += bytes_of(token)
            elif own != NOTHING:
                kept = min(kept, self._append(self._decoded(bytes(raw), is_end=True)))
                raw.clear()
                self._append_special(token, own)
        return min(kept, self._append(self._decoded(bytes(raw))))

    def _decoded(self, raw: bytes, is_end: bool = False) -> str:
        if self._at_start and raw:
            raw, self._at_start = raw.removeprefix(b" "), False
        return self._decoder.decode(raw, final=is_end)

    def _append_special(self, token: int, own: int) -> None:
        is_first = self._length == 0 and len(self.ids) == len(self._translation.draft.start_ids)
        if not (
            is_first and token == self._translation.target.bos_token_id
        ):  # how texts begin is the draft's own affair
            self._extend([own], [(self._length, self._length)])
        self._num_fixed = self.num_settled = len(self.ids)
        self._tail, self._tail_start = "", self._length

    def _append(self, text: str) -> int:
        """Tokenize the end of the old text again, with the new one -> how many tokens stayed."""
        if not text:
            return len(self.ids)
        first = self.num_final
        while not self._is_clean(first):
            first += 1
        start = self._start(first)
        self._tail, self._tail_start = self._tail[start - self._tail_start :] + text, start
        found, places = self._translation.draft.encode_with_places(self._tail)
        places = [(start + begin, start + end) for begin, end in places]
        old, new = self._joint(first, places)
        while old < len(self.ids) and new < len(found) and self.ids[old] == found[new]:
            old, new = old + 1, new + 1
        del self.ids[old:], self._places[old:]
        self._extend(found[new:], places[new:])
        self._length += len(text)
        self.num_settled = first
        return old

    def _extend(self, ids: Sequence[int], places: Sequence[tuple[int, int]]) -> None:
        self.ids += ids
        self._places += places

    def _joint(self, first: int, places: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Where the old tokens, from `first` on, are left for new ones: at the first place where both are cut.

        Not at the very first: a tokenizer may put a space before what it takes to be the start of a text.
        """
        if first == self._num_fixed:
            return first, 0
        cuts = {places[i][0]: i for i in range(len(places) - 1, 0, -1) if places[i - 1][1] <= places[i][0]}
        for old in range(first + 1, len(self.ids) + 1):
            new = cuts.get(self._start(old))
            if new is not None and self._is_clean(old):
                return old, new
        return first, 0

    def _start(self, index: int) -> int:
        """The first character of a token, or of what is to come."""
        return self._places[index][0] if index < len(self.ids) else self._length

    def _is_clean(self, index: int) -> bool:
        """Whether the text is cut before this token, and not inside a character."""
        return (
            index <= self._num_fixed or index >= len(self.ids) or self._places[index - 1][1] <= self._places[index][0]
        )
