"""Corpus files: what is written is what is mapped, bounded in size; others' files and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.errors import ConfigError, DataError, VocabularyError
from forerun.weights.corpus import ALIGN, BYTES_PER_TOKEN, END_MARK, MAGIC, open_corpus, write_corpus
from tests.weights import makers

TEXTS = ([5, 6, 7, 8], [9], [5, 6, 9, 9, 9])


def test_a_corpus_is_mapped_as_it_was_written(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "c", makers.byte_level()
    size = write_corpus(path, TEXTS, tokenizer, "m", 1 << 20)
    corpus = open_corpus(str(path), tokenizer)
    whole = [token for text in TEXTS for token in (*text, END_MARK)]
    assert corpus.tokens.tolist() == whole and isinstance(corpus.tokens, np.memmap)
    assert corpus.order.tolist() == sorted(range(len(whole)), key=lambda start: whole[start:])
    assert size == (3, len(whole), 0, path.stat().st_size)
    assert not corpus.tokens.flags.writeable and [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(("room", "kept"), [(13, (3, 0)), (12, (3, 1)), (7, (2, 1)), (6, (1, 2)), (3, (1, 3))])
def test_a_corpus_is_no_larger_than_allowed(room: int, kept: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "c"
    most = ALIGN + BYTES_PER_TOKEN * room + 3
    size = write_corpus(path, TEXTS, makers.byte_level(), "m", most)
    assert (size.num_texts, size.num_left_out) == kept
    assert path.stat().st_size <= most and size.num_tokens <= room


def test_a_corpus_without_text_or_room_is_refused(tmp_path: Path) -> None:
    for texts, most in (([], 1 << 20), ([[]], 1 << 20), (TEXTS, ALIGN + 15), (TEXTS, 10)):
        with pytest.raises(DataError, match="no text for a corpus of at most"):
            write_corpus(tmp_path / "c", texts, makers.byte_level(), "m", most)
    with pytest.raises(DataError, match="cannot write"):
        write_corpus(tmp_path / "missing" / "c", TEXTS, makers.byte_level(), "m", 1 << 20)


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_corpus(path, TEXTS, makers.byte_level(), "some/model", 1 << 20)
    with pytest.raises(VocabularyError, match="the tokens of another tokenizer, that of some/model"):
        open_corpus(str(path), makers.wordpiece())


def with_header(header: bytes) -> bytes:
    return (MAGIC + len(header).to_bytes(4, "little") + header).ljust(ALIGN, b"\0")


def test_writing_does_not_touch_others_files_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "c.part"
    other.write_text("of another process")
    write_corpus(tmp_path / "c", TEXTS, makers.byte_level(), "m", 1 << 20)
    whole = (tmp_path / "c").read_bytes()

    def full(tokens: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("forerun.weights.corpus.suffix_order", full)
    with pytest.raises(DataError, match="no space left"):
        write_corpus(tmp_path / "c", TEXTS, makers.byte_level(), "m", 1 << 20)
    assert (tmp_path / "c").read_bytes() == whole and other.read_text() == "of another process"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "c.part"]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "c", makers.byte_level()
    with pytest.raises(ConfigError, match="cannot read the corpus"):
        open_corpus(str(path), tokenizer)
    write_corpus(path, TEXTS, tokenizer, "m", 1 << 20)
    whole = path.read_bytes()
    for damaged, said in (
        (b"", "is no corpus"), (b"text", "is no corpus"), (whole[:30], "is no corpus"),
        (whole.replace(b'"version": 1', b'"version": 9'), "version 9"),
        (with_header(b'{"version": 1, "num_tokens": Infinity}'), "is no corpus"),
        (with_header(b"[" * 4000), "is no corpus"),
        (whole[:-4], "bytes instead of"), (whole + b"x", "bytes instead of"),
    ):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=said):
            open_corpus(str(path), tokenizer)
