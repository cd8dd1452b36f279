"""Streaming: what comes piece by piece is what comes at once, and never half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.weights.detokenizer import IncrementalDetokenizer
from forerun.weights.tokenizer import Tokenizer
from tests.weights import makers

BYTES, PIECES, WORDS = makers.byte_level(), makers.sentencepiece(), makers.wordpiece()
EXACT = {"bytes": BYTES, "pieces": PIECES}
ALL = {**EXACT, "words": WORDS}
many = settings(max_examples=150, deadline=None)


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)


def stream(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, context)
    return [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.finish()]


def test_which_tokenizers_stream_exactly() -> None:
    assert BYTES.has_token_bytes and PIECES.has_token_bytes and not WORDS.has_token_bytes
    assert PIECES.strips_leading_space and not BYTES.strips_leading_space


@many
@given(st.data(), st.sampled_from(sorted(ALL)))
def test_deltas_join_to_the_whole(data: st.DataObject, name: str) -> None:
    tokenizer = ALL[name]
    ids = data.draw(ids_of(tokenizer))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@many
@given(st.data(), st.sampled_from(sorted(EXACT)))
def test_deltas_do_not_depend_on_how_tokens_come(data: st.DataObject, name: str) -> None:
    ids = data.draw(ids_of(EXACT[name]))
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(EXACT[name])
    text = detokenizer.feed(ids[:cut]) + detokenizer.feed(ids[cut:]) + detokenizer.finish()
    assert text == EXACT[name].decode(ids)


@many
@given(st.text(max_size=30), st.sampled_from(sorted(EXACT)))
def test_texts_come_back(text: str, name: str) -> None:
    tokenizer = EXACT[name]
    text = text.replace("\u2581", "_")  # sentencepiece spells spaces so
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in stream(tokenizer, ids)) or "\ufffd" in text
    assert tokenizer.decode_window(ids) == text  # the library agrees


@many
@given(st.data(), st.sampled_from(sorted(EXACT)))
def test_context_continues_a_text(data: st.DataObject, name: str) -> None:
    tokenizer = EXACT[name]
    ids = data.draw(ids_of(tokenizer))
    cut = data.draw(st.integers(0, len(ids)))
    whole = IncrementalDetokenizer(tokenizer)
    before = whole.feed(ids[:cut])
    after = "".join(stream(tokenizer, ids[cut:], ids[:cut]))
    assert before + after == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", EXACT.values(), ids=EXACT)
def test_characters_come_whole(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, tokenizer.encode("x😀y", add_special_tokens=False))
    assert "".join(deltas) == "x😀y"
    assert all(len(delta) <= 2 and "\ufffd" not in delta for delta in deltas)


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    ids = PIECES.encode("x😀", add_special_tokens=False)[:-1]
    assert stream(PIECES, ids)[-1] == "\ufffd"


def test_sentencepiece_keeps_the_space_after_a_prompt() -> None:
    prompt, word = PIECES.encode("a"), PIECES.encode("the", add_special_tokens=False)
    assert stream(PIECES, word) == ["the", ""]
    assert stream(PIECES, word, prompt) == [" the", ""]
    assert stream(PIECES, word, [1]) == ["the", ""]  # the start token alone is no text


def test_words_get_spaces_between_them() -> None:
    ids = WORDS.encode("the there a.")
    assert stream(WORDS, ids[1:], ids[:1])[0] == " there"
