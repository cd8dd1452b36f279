"""A text follows from one tokenizer's tokens into another's, and drafted text back, whatever its bytes are."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from forerun.errors import VocabularyError
from forerun.models.draft_models import check_tokenizers
from forerun.weights.tokenizer import Tokenizer
from forerun.weights.translation import NOTHING, WINDOW, Transcript, Translation, is_same_vocabulary
from tests.weights import makers

WORDS = [
    "Once upon a time there was another mother, the other brother.",
    "she sells seashells: 10 000 € 日本語 😀",
    "\n\tb",
]


def trained(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A byte-level BPE with other merges, other ids and other special tokens than `makers.byte_level`."""
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|end|>", "<|turn|>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS, trainer)
    return Tokenizer(backend, {"eos_token": "<|end|>"})


BYTES, PIECES, OTHER = makers.byte_level(), makers.sentencepiece(), trained()
PAIRS = {
    "bytes-other": (BYTES, OTHER),
    "other-bytes": (OTHER, BYTES),
    "bytes-pieces": (BYTES, PIECES),
    "pieces-bytes": (PIECES, BYTES),
    "pieces-other": (PIECES, OTHER),
}
many = settings(max_examples=100, deadline=None)


def between(name: str) -> Translation:
    target, draft = PAIRS[name]
    return Translation(target, draft, target.vocab_size, draft.vocab_size)


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def without_spaces(text: str) -> str:
    """Some tokenizers put a space before a text, or take a sign of their own for one."""
    return text.replace(" ", "").replace("\u2581", "")


def expected(translation: Translation, ids: Sequence[int]) -> str:
    """What the target's tokens say: bytes that are no character count as U+FFFD, the last ones may still become one."""
    text, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        ends = translation.specials.get(token, NOTHING) != NOTHING
        text += decoder.decode(translation.target.token_bytes(token), final=ends)
    return text


@many
@given(st.data(), st.sampled_from(sorted(PAIRS)))
def test_any_tokens_are_followed(data: st.DataObject, name: str) -> None:
    """Byte fragments, special tokens and ids without a token: the text stays, in however many steps it comes."""
    translation = between(name)
    target, draft = translation.target, translation.draft
    ids = data.draw(st.lists(st.integers(0, target.vocab_size + 2), max_size=60))
    wanted = expected(translation, ids)
    assume(not any(draft.special_text(token) in wanted for token in draft.special_ids))
    transcript, at = Transcript(translation), 0
    while at < len(ids):
        before, settled = list(transcript.ids), transcript.num_settled
        step = data.draw(st.integers(1, 9))
        kept = transcript.extend(ids[at : at + step])
        at += step
        assert transcript.ids[:kept] == before[:kept] and kept <= len(before)
        assert settled <= min(kept, transcript.num_settled) and transcript.num_settled <= len(transcript.ids)
    assert without_spaces(text_of(draft, transcript.ids)) == without_spaces(wanted)


def noted(encode: Callable[[str], Any], lengths: list[int], text: str) -> Any:
    lengths.append(len(text))
    return encode(text)


@pytest.mark.parametrize("name", sorted(PAIRS))
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_text_ends_as_it_is_tokenized_whole(name: str, step: int) -> None:
    """Merges with later text are found, in every kind of text, and with hardly more than the new text tokenized."""
    translation = between(name)
    target, draft = translation.target, translation.draft
    for text in (*makers.TEXTS, *WORDS, "def  f(x):\n    return x\n\n\n" * 5, "a" * 50, "the other mother. " * 20):
        transcript, ids = Transcript(translation), target.encode(text)
        lengths = list[int]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft, "encode_with_places", partial(noted, draft.encode_with_places, lengths))
            for at in range(0, len(ids), step):
                transcript.extend(ids[at : at + step])
        assert transcript.ids == draft.encode(text)
        most = max(len(draft.token_bytes(token)) for token in transcript.ids)
        assert max(lengths) <= (WINDOW + 4) * max(most, 4) + 12 * step


def test_special_tokens() -> None:
    """Those with the same name stay, ends become ends, others are left out, and a start is said once."""
    target, draft = BYTES, OTHER  # <s> and </s>; <|end|>, <|turn|> and </s>
    translation = Translation(target, draft, target.vocab_size, draft.vocab_size)
    start, end = target.token_id("<s>"), target.token_id("</s>")
    assert start is not None and end is not None
    assert translation.specials == {start: NOTHING, end: draft.token_id("</s>")}
    transcript = Transcript(translation)
    transcript.extend([start, *target.encode("one two", False), end, *target.encode("three", False)])
    assert transcript.ids == [*draft.encode("one two"), draft.token_id("</s>"), *draft.encode("three")]
    back = Translation(draft, target, draft.vocab_size, target.vocab_size)
    assert back.specials == {0: end, 1: NOTHING, 2: end}  # <|end|> ends texts, </s> has the name

    pieces = Translation(PIECES, PIECES, PIECES.vocab_size, PIECES.vocab_size)
    transcript = Transcript(pieces)
    assert transcript.ids == [1]
    transcript.extend(PIECES.encode("the bee"))
    assert transcript.ids == PIECES.encode("the bee")


@many
@given(st.sampled_from([*makers.TEXTS, *WORDS, "the other mother 😀 there"]), st.data(), st.sampled_from(sorted(PAIRS)))
def test_drafted_text_comes_back(text: str, data: st.DataObject, name: str) -> None:
    """Wherever the known tokens end, inside a character too, what is drafted behind them is the text that follows."""
    translation = between(name)
    target, draft = translation.target, translation.draft
    ids = target.encode(text)
    cut = data.draw(st.integers(1, len(ids)))
    known = expected(translation, ids[:cut]).removeprefix(" " if target.strips_leading_space else "")
    assume(known or not target.strips_leading_space)  # before the first word a space may or may not be a token's
    follow = draft.encode(text[len(known) :], add_special_tokens=False)
    drafted = follow[: data.draw(st.integers(0, len(follow)))]
    told = translation.in_target(ids[:cut], drafted)
    if not name.endswith("pieces"):  # whose own tokens for a part of a text begin with a space
        goes_on, whole = (b"".join(map(target.token_bytes, part)) for part in (told.tokens, ids[cut:]))
        assert whole.startswith(goes_on) and (drafted != follow or goes_on == whole)
    assert told.last == sorted(told.last) and all(index < len(drafted) for index in told.last)
    for token, last, is_whole in zip(*told, strict=True):
        assert not is_whole or target.token_bytes(token) == draft.token_bytes(drafted[last])


@pytest.mark.parametrize("cut", range(1, 9))
def test_drafted_tokens_are_the_targets_own(cut: int) -> None:
    """With text that both cut alike at its end, all the target's tokens come back, the last one told to be whole."""
    translation = between("bytes-other")
    text = "the other mother, the other brother."
    ids = BYTES.encode(text)
    known = BYTES.decode(ids[:cut])
    drafted = OTHER.encode(text[len(known) :])
    told = translation.in_target(ids[:cut], drafted)
    assert told.tokens == ids[cut:]
    assert told.is_whole[-1] and told.last[-1] == len(drafted) - 1


def test_a_merge_with_known_text_is_said_in_parts() -> None:
    """What the target would have said in one token, had it not said its beginning, is said in what is left."""
    translation = between("bytes-other")
    the = BYTES.encode("the")
    assert len(the) == 1 and len(BYTES.encode("t")) == 1
    told = translation.in_target(BYTES.encode("t"), OTHER.encode("he"))
    assert text_of(BYTES, told.tokens) == "he" and told.is_whole[-1]


def test_what_the_draft_has_a_token_for_stays_as_it_was_said() -> None:
    """Two tokens, where both vocabularies have one for them: the draft meant two, and so may the target."""
    translation = between("bytes-other")
    ours, theirs = ({t.token_bytes(i): i for i in range(t.vocab_size)} for t in (BYTES, OTHER))
    pairs = [raw for raw in ours.keys() & theirs.keys() if len(raw) == 2 and raw.isalpha()]
    alone = [raw for raw in ours.keys() - theirs.keys() if len(raw) == 2 and raw.isalpha()]
    assert pairs and alone
    known = BYTES.encode("a\n")
    for raw in (*pairs, *alone):
        told = translation.in_target(known, [theirs[bytes([byte])] for byte in raw])
        assert told.tokens == ([ours[bytes([byte])] for byte in raw] if raw in pairs else [ours[raw]])
        assert told.is_whole == ([True, True] if raw in pairs else [False])


def test_ends_and_what_is_no_text() -> None:
    translation = between("bytes-other")
    known, end = BYTES.encode("a "), OTHER.token_id("</s>")
    turn = OTHER.token_id("<|turn|>")
    assert end is not None and turn is not None
    drafted = OTHER.encode("mother")
    assert translation.in_target(known, [*drafted, end, *drafted]).tokens[-1] == BYTES.token_id("</s>")
    told = translation.in_target(known, [*drafted, turn, *drafted])
    assert told == translation.in_target(known, drafted)
    assert translation.in_target(known, [OTHER.vocab_size + 5]).tokens == []
    byte = next(token for token in range(OTHER.vocab_size) if OTHER.token_bytes(token) == b"\xf0")
    assert translation.in_target(known, [*drafted, byte, byte]) == translation.in_target(known, drafted)
    assert translation.in_target(known, [end]).tokens == [BYTES.token_id("</s>")]


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_columns_are_common_tokens(name: str) -> None:
    target, draft = PAIRS[name]
    translation = Translation(target, draft, target.vocab_size + 7, draft.vocab_size + 9)  # padded logits
    columns = translation.columns
    assert len(set(columns)) == len(columns) == draft.vocab_size + 9 and max(columns) < translation.num_columns
    common = 0
    for token, column in enumerate(columns):
        if column < target.vocab_size + 7:
            common += 1
            assert draft.token_bytes(token) == target.token_bytes(column)
        else:
            assert column >= target.vocab_size + 7
    assert common == translation.num_common >= 40


def test_tokenizers_that_lose_text_are_refused() -> None:
    lower = trained(normalizer=normalizers.Lowercase())
    assert not is_same_vocabulary(BYTES, OTHER)
    check_tokenizers(BYTES, "target", OTHER, "draft")
    check_tokenizers(PIECES, "target", OTHER, "draft")
    with pytest.raises(VocabularyError, match="draft model small makes 'the quick brown fox' .*choose a draft model"):
        check_tokenizers(BYTES, "large", lower, "small")
    with pytest.raises(VocabularyError, match="target large has tokens without a text .*choose a draft model"):
        check_tokenizers(makers.wordpiece(), "large", BYTES, "small")
    check_tokenizers(lower, "large", trained(normalizer=normalizers.Lowercase()), "small")  # equal: ids are handed over
