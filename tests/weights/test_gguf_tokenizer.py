"""Tokenizers read from GGUF vocabularies against llama.cpp's golden tokenizations, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_config import ARCHITECTURES
from forerun.weights.gguf_file import GgufFile
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_pretokenizers import PRE_TOKENIZERS
from forerun.weights.gguf_tokenizer import read_tokenizer
from forerun.weights.gguf_vocabulary import tokenizer_metadata
from forerun.weights.gguf_write import Typed
from forerun.weights.tokenizer import Tokenizer
from tests.support.shared import shared_data
from tests.weights import makers

VOCABULARIES = ("llama-spm", "phi-3", "gpt-2", "deepseek-llm", "deepseek-coder", "falcon", "mpt", "refact", "starcoder")
# Architecture -> the pre-tokenizer its converter writes, for the model published last where there are several; or the
# kind of its tokenizer, which has none.
WRITTEN = {
    "llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "phi3": "llama", "qwen2moe": "qwen2", "qwen3moe": "qwen2",
    "deepseek2": "glm4", "gpt-oss": "gpt-4o", "glm4moe": "glm4", "minimax-m2": "minimax-m2", "gemma4": "gemma4",
    "llama4": "llama4", "deepseek32": "deepseek-v3", "step35": "deepseek-v3", "mimo2": "qwen2", "gemma2": "llama",
    "gemma3": "llama", "olmo2": "dbrx", "exaone4": "exaone4", "granite": "dbrx", "smollm3": "smaug-bpe",
    "mistral3": "tekken", "glm4": "glm4", "cohere2": "command-r", "qwen3next": "qwen2", "qwen35": "qwen35",
    "qwen35moe": "qwen35", "lfm2": "lfm2", "lfm2moe": "lfm2", "granitehybrid": "dbrx", "falcon-h1": "falcon-h1",
    "nemotron_h": "pixtral", "nemotron_h_moe": "pixtral", "kimi-linear": "kimi-k2",
}  # fmt: skip
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


def test_every_architecture_comes_with_a_tokenizer_that_is_read() -> None:
    assert set(WRITTEN) == set(ARCHITECTURES)
    assert set(WRITTEN.values()) <= {*PRE_TOKENIZERS, "llama", "gemma4"}


@pytest.mark.parametrize(
    ("name", "text", "cuts"),
    [
        (
            "kimi-k2",
            "Kimi是月之暗面的AI助手，HelloWorld中文's don't 12345\n\n x々〇 café中。\n",
            ["Kimi", "是月之暗面的", "AI", "助手", "，Hello", "World", "中文", "'s", " don't", " ", "123", "45", "\n\n",
             " x", "々〇", " café", "中", "。\n"],
        ),
        ("kimi-k2", "日本のカメラ 한국어x", ["日本", "のカメラ", " 한국어x"]),
        ("exaone4", "It's 2025年!", ["It", "'s", " 2025", "年", "!"]),
        ("kanana2", "It's 2025", ["It's", " ", "202", "5"]),
    ],
)  # fmt: skip
def test_where_texts_are_cut(name: str, text: str, cuts: list[str]) -> None:
    (pattern,) = PRE_TOKENIZERS[name].patterns
    splitter = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == cuts


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


def test_templates_for_tools_are_written_and_read(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    written = tokenizer_metadata(makers.save(makers.byte_level(), tmp_path, chat_template=templates), 400)
    assert written["tokenizer.chat_templates"] == ["tool_use"]
    values = {key: np.array(value.value) if isinstance(value, Typed) else value for key, value in written.items()}
    tokenizer = read_tokenizer(GGUFMetadata(tmp_path / "model.gguf", values))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("a", "b")
    alone = tokenizer_metadata(makers.save(makers.byte_level(), tmp_path, chat_template="a"), 400)
    assert [key for key in alone if "template" in key] == ["tokenizer.chat_template"]


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
