"""Tokenizers read from GGUF vocabularies against llama.cpp's golden tokenizations, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_file import GgufFile
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_tokenizer import read_tokenizer
from forerun.weights.tokenizer import Tokenizer
from tests.support.shared import shared_data

VOCABULARIES = ("llama-spm", "phi-3", "gpt-2", "deepseek-llm", "deepseek-coder", "falcon", "mpt", "refact", "starcoder")
SEPARATOR = "\n__ggml_vocab_test__\n"


def vocabulary(name: str, ending: str = "") -> Path:
    """A vocabulary of llama.cpp, or with `.inp` and `.out` the texts it was tried on and their tokens."""
    return shared_data(f"tokenizers/ggml-vocab/ggml-vocab-{name}.gguf{ending}")


def opened(path: Path) -> GGUFMetadata:
    return GGUFMetadata(path, GgufFile.open(path).metadata)


def golden(name: str) -> list[tuple[str, list[int]]]:
    texts = vocabulary(name, ".inp").read_text(encoding="utf-8").split(SEPARATOR)
    lines = vocabulary(name, ".out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=False)]


@pytest.fixture(scope="module", params=VOCABULARIES)
def known(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    return request.param, read_tokenizer(opened(vocabulary(request.param)))


def test_golden_tokenizations(known: tuple[str, Tokenizer]) -> None:
    name, tokenizer = known
    cases = golden(name)
    assert len(cases) > 40
    wrong = [(text, tokenizer.encode(text, add_special_tokens=False), ids) for text, ids in cases]
    assert [case for case in wrong if case[1] != case[2]] == []


def test_golden_texts_come_back(known: tuple[str, Tokenizer]) -> None:
    _, tokenizer = known
    for text, ids in golden(known[0]):
        assert tokenizer.decode(ids) == text


def test_special_tokens_and_templates_of_the_file() -> None:
    phi = read_tokenizer(opened(vocabulary("phi-3")))
    assert phi.encode("Hello")[0] == phi.bos_token_id == 1
    assert phi.eos_token_ids[0] == 32000 and phi.token_id("<|end|>") in phi.eos_token_ids
    chat = phi.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat[:3] == [1, phi.token_id("<|user|>"), phi.encode("Hi", add_special_tokens=False)[0]]  # "\n" swallowed
    gpt2 = read_tokenizer(opened(vocabulary("gpt-2")))
    assert gpt2.encode("Hello<|endoftext|>") == [15496, 50256] and gpt2.chat_template is None
    deepseek = read_tokenizer(opened(vocabulary("deepseek-llm")))
    assert deepseek.encode("Hello")[0] == 100000 and deepseek.eos_token_ids == (100001,)


def metadata(**changes: Any) -> GGUFMetadata:
    """A byte-level vocabulary of two letters, a merge and an end token."""
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": ["a", "b", "ab", "<end>"],
        "token_type": np.array([1, 1, 1, 3], dtype=np.int32),
        "merges": ["a b"],
        "eos_token_id": 3,
        **changes,
    }
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    return GGUFMetadata(Path("model.gguf"), named)


def test_a_small_vocabulary() -> None:
    tokenizer = read_tokenizer(metadata())
    assert tokenizer.encode("abba<end>") == [2, 1, 0, 3] and tokenizer.eos_token_ids == (3,)
    assert tokenizer.decode([2, 1, 3]) == "abb"
    framed = read_tokenizer(metadata(add_bos_token=True, bos_token_id=0, add_eos_token=True))
    assert framed.encode("b") == [0, 1, 3] and framed.encode("b", add_special_tokens=False) == [1]


def test_what_ends_an_answer_of_gpt_oss() -> None:
    """Its <|end|> stands between reasoning and answer."""
    names = ["a", "b", "ab", "<|return|>", "<|end|>", "<|call|>"]
    kinds = np.array([1, 1, 1, 3, 3, 3], dtype=np.int32)
    assert read_tokenizer(metadata(tokens=names, token_type=kinds)).eos_token_ids == (3, 5)
    assert read_tokenizer(metadata(tokens=names, token_type=kinds, eot_token_id=4)).eos_token_ids == (3, 5)
    assert read_tokenizer(metadata(tokens=names[:5], token_type=kinds[:5])).eos_token_ids == (3, 4)
    gemma = read_tokenizer(metadata(tokens=[*names[:3], "<eos>", "<turn|>", "<|tool_response>"], token_type=kinds))
    assert gemma.eos_token_ids == (3, 4, 5)


def test_tokens_the_file_names_twice_or_not_at_all() -> None:
    tokenizer = read_tokenizer(metadata(tokens=["a", "b", "ab", "a"], token_type=None, eos_token_id=2**32 - 1))
    assert tokenizer.encode("aab") == [0, 2] and tokenizer.eos_token_ids == () and tokenizer.vocab_size == 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedError, "kind 'bert'; supported are gpt2, llama"),
        ({"pre": "klingon"}, UnsupportedError, "pre-tokenizer 'klingon'; forerun knows llama-bpe"),
        ({"pre": None}, UnsupportedError, "no tokenizer.ggml.pre"),
        ({"tokens": None}, CheckpointError, "lacks the key tokenizer.ggml.tokens"),
        ({"tokens": []}, CheckpointError, "tokenizer.ggml.tokens is empty"),
        ({"tokens": np.arange(4)}, CheckpointError, "tokenizer.ggml.tokens must be a list of texts, got 4 values"),
        ({"token_type": np.array([1, 1])}, CheckpointError, "must be a list of 4 numbers, got 2 values"),
        ({"merges": None}, CheckpointError, "lacks the key tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, CheckpointError, "'ab' in tokenizer.ggml.merges is not two pieces"),
        ({"merges": ["a c"]}, CheckpointError, "tokens and merges do not fit together"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id must be a token id, got 'x'"),
        ({"add_bos_token": True}, CheckpointError, "asks for a bos token around texts but names none"),
        ({"add_bos_token": 1}, CheckpointError, "must be true or false, got 1"),
        ({"model": "llama"}, CheckpointError, "tokenizer.ggml.scores must be a list of 4 numbers"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_tokenizer(metadata(**changes))
