"""Sentencepiece models: the same ids as the sentencepiece library, and damage that is named."""

from __future__ import annotations

import json
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


def folder_with_added(folder: Path, texts: Any, decoder: Any) -> Path:
    """Llama 2's model with tokens of ChatML beside it."""
    path = shared_data("tokenizers/llama2/tokenizer.model")
    (folder / "tokenizer.model").write_bytes(path.read_bytes())
    (folder / "added_tokens.json").write_text(json.dumps(texts))
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_tokens_that_other_files_add(tmp_path: Path) -> None:
    plain = folder_with_added(tmp_path, {}, {})
    user = Tokenizer.from_folder(plain).encode("user", add_special_tokens=False)
    texts, decoder = {"<|im_start|>": 32001, "<|im_end|>": 32000}, {
        "0": {"content": "<unk>", "special": True},
        "32001": {"content": "<|im_start|>", "special": True, "rstrip": True, "normalized": False},
        "32005": {"content": "<tool>", "special": False, "lstrip": True},
    }  # fmt: skip
    tokenizer = Tokenizer.from_folder(folder_with_added(tmp_path, texts, {}))
    ids = tokenizer.encode("<|im_start|>user<|im_end|>")
    assert ids == [1, 32001, *user, 32000] and tokenizer.decode(ids) == "<|im_start|> user"
    assert 32000 in tokenizer.eos_token_ids and tokenizer.vocab_size == 32002
    tokenizer = Tokenizer.from_folder(folder_with_added(tmp_path, texts, decoder))
    assert tokenizer.encode("<|im_start|>   user <tool><|im_end|>") == [1, 32001, *user, 32005, 32000]
    assert tokenizer.decode([1, 32001, *user, 32005, 32000]) == "user<tool>"
    assert tokenizer.vocab_size == 32006 and tokenizer.token_text(32003) == "[PAD32003]"


@pytest.mark.parametrize(
    ("texts", "decoder", "said"),
    [
        ({"<x>": "many"}, {}, "many"),
        ({"<x>": -1}, {}, "got -1"),
        ({"<x>": 2**40}, {}, "from 0 to 1048575, got 1099511627776"),
        ({}, {"32000": "<x>"}, "mapping"),
        ({}, {"32000": {"special": True}}, "content"),
        ({}, [1], "items"),
    ],
)
def test_damaged_tokens_beside_a_model(texts: Any, decoder: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"added_tokens.json or added_tokens_decoder .*{said}"):
        Tokenizer.from_folder(folder_with_added(tmp_path, texts, decoder))


def test_pieces_of_users_as_in_gemma(tmp_path: Path) -> None:
    """Runs of spaces, and tags of HTML that are no start and end tokens."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES[:6] * 3 + makers.TEXTS), model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=360, model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
        add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=["▁▁", "▁▁▁", "<s>", "</s>", "\n\n"], bos_piece="<bos>", eos_piece="<eos>",
    )  # fmt: skip
    truth, bare = library(tmp_path / "tokenizer.model"), Tokenizer.from_folder(tmp_path)
    assert bare.special_tokens["bos_token"] is None and bare.start_ids == ()
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.start_ids == (1,) and tokenizer.eos_token_ids == (2,)
    for text in (*SENTENCES, "a   b  c\n\n<s>x</s>     y"):
        assert tokenizer.encode(text, add_special_tokens=False) == truth.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


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


def write_model(path: Path, normalizer: bytes, *pieces: tuple[str, float, PieceType]) -> None:
    """A unigram model of <unk> and these pieces; `normalizer`: fields of a NormalizerSpec."""
    messages = [
        field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
        for text, score, kind in (("<unk>", 0.0, PieceType.UNKNOWN), *pieces)
    ]
    path.write_bytes(b"".join(field(1, message) for message in messages) + field(3, normalizer))


def test_added_tokens_leave_unknown_characters_what_they_cost(tmp_path: Path) -> None:
    """In a unigram model a little more than the rarest piece: here x, which is no piece but begins one."""
    path, scores = tmp_path / "tokenizer.model", {"a": -8.0, "b": -15.0, "ab": -1.0, "xa": -20.0}
    write_model(path, b"\x18\x00\x20\x00", *((text, score, PieceType.NORMAL) for text, score in scores.items()))
    (tmp_path / "added_tokens.json").write_text('{"<x>": 5}')
    ids = Tokenizer.from_folder(tmp_path).encode("xab<x>", add_special_tokens=False)
    assert ids == [*library(path).encode("xab"), 5] == [0, 3, 5]


def test_spaces_of_users_stay_where_texts_begin_with_one(tmp_path: Path) -> None:
    path, scores = tmp_path / "tokenizer.model", {"\u2581": -3.0, "a": -4.0, "b": -5.0}
    normal = ((text, score, PieceType.NORMAL) for text, score in scores.items())
    write_model(path, b"\x18\x01\x20\x00", *normal, ("\u2581\u2581", 0.0, PieceType.USER_DEFINED))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("a  b", add_special_tokens=False)
    assert ids == library(path).encode("a  b") and tokenizer.decode(ids) == "a  b"


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
