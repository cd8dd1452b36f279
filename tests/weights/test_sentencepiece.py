"""Sentencepiece models: the same ids as the sentencepiece library, and damage that is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import CheckpointError, ForerunError, UnsupportedError
from forerun.weights.sentencepiece import ModelType, PieceType, read_sentencepiece
from forerun.weights.tokenizer import Tokenizer
from tests.support.shared import shared_data
from tests.weights import makers

MODELS = ["llama2/tokenizer.model", "mistral/tokenizer.model.v1", "mistral/tokenizer.model.v3"]
SENTENCES = [
    "Once upon a time there was a café.",
    "  two  spaces ", "tabs\tand\nnewlines\n\n", "日本語とemoji 😀👩‍👩‍👧", "aaaaaaaaaaaaa",
    "def f(x):\n    return x ** 2  # square", "1234567890 3.14159", "ÀÉÎ ß µ ﬁ", "мама мыла раму", "",
]  # fmt: skip


def library(path: Path) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.mark.parametrize("name", MODELS)
def test_real_models(name: str, tmp_path: Path) -> None:
    path = shared_data("tokenizers") / name
    truth = library(path)
    (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == truth.vocab_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    for text in SENTENCES:
        assert tokenizer.encode(text, add_special_tokens=False) == truth.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a")[0] == 1
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.from_folder(tmp_path).encode("a")[0] != 1


@pytest.mark.parametrize(
    ("golden", "files", "model_type"),
    [
        ("llama-spm", {"llama2/tokenizer.model": "tokenizer.model"}, "llama"),
        ("gpt-2", {"gpt2/vocab.json": "vocab.json", "gpt2/merges.txt": "merges.txt"}, "gpt2"),
    ],
)
def test_golden_tokenizations_of_llama_cpp(golden: str, files: dict[str, str], model_type: str, tmp_path: Path) -> None:
    real = shared_data("tokenizers")
    for source, name in files.items():
        (tmp_path / name).write_bytes((real / source).read_bytes())
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    stem = real / "ggml-vocab" / f"ggml-vocab-{golden}.gguf"
    texts = Path(f"{stem}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):  # the last text is empty
        assert tokenizer.encode(text, add_special_tokens=False) == [int(word) for word in line.split()], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("trained")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES[:6] * 3 + makers.TEXTS),
        model_prefix=str(folder / "tokenizer"), vocab_size=360,
        model_type=request.param, byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return folder


def test_trained_models(trained: Path) -> None:
    truth = library(trained / "tokenizer.model")
    tokenizer = Tokenizer.from_folder(trained)
    vocabulary = read_sentencepiece(trained / "tokenizer.model")
    assert vocabulary.remove_extra_whitespaces and vocabulary.charsmap
    assert len(vocabulary.ids_of(PieceType.BYTE)) == 256
    for text in SENTENCES:
        assert tokenizer.encode(text, add_special_tokens=False) == truth.encode(text), (vocabulary.model_type, text)
    assert vocabulary.model_type in (ModelType.BPE, ModelType.UNIGRAM)


@pytest.mark.parametrize(
    "raw", [b"", b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"hello", b"\x0a\x02\x08\x01"]
)
def test_damage(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(CheckpointError, match="sentencepiece model"):
        Tokenizer.from_folder(tmp_path)


def test_unsupported_kind(tmp_path: Path) -> None:
    piece = b"\x0a\x03" + b"\x0a\x01a"
    (tmp_path / "tokenizer.model").write_bytes(piece + b"\x12\x02\x18\x03")
    with pytest.raises(UnsupportedError, match="type 3"):
        Tokenizer.from_folder(tmp_path)


def field(number: int, content: bytes) -> bytes:
    """Of a protocol buffer, up to 127 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.tuples(st.text(max_size=6), st.floats(width=32, allow_nan=False), st.sampled_from(PieceType)), min_size=1
    ),
    unknown=st.binary(max_size=20),
)
def test_all_pieces_come_back(tmp_path: Path, pieces: list[tuple[str, float, PieceType]], unknown: bytes) -> None:
    """Also between fields that nobody knows."""
    path = tmp_path / "made.model"
    messages = [
        field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]) + field(9, unknown)
        for text, score, kind in pieces
    ]
    path.write_bytes(field(7, unknown).join(field(1, message) for message in messages))
    found = read_sentencepiece(path)
    assert [*zip(found.pieces, found.scores, found.types, strict=True)] == pieces


def test_one_changed_byte(tmp_path: Path) -> None:
    """A small vocabulary with any byte changed gives a whole vocabulary or an error; most changes only another text."""
    piece = b"\x0a\x0c\x0a\x03abc\x15\x00\x00\x80\xbf\x18\x01"
    outcomes = set()
    for place in range(len(piece)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            path = tmp_path / "changed.model"
            path.write_bytes(piece[:place] + bytes([value]) + piece[place + 1 :])
            try:
                found = read_sentencepiece(path)
            except ForerunError as error:
                assert "changed.model" in str(error)
                outcomes.add("refused")
            else:
                assert len(found.pieces) == len(found.scores) == len(found.types) == 1
                outcomes.add(found.pieces[0])
    assert {"refused", "abc"} < outcomes
