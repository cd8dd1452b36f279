"""Token ids of hard texts: other libraries' for real vocabularies, and those of the families' own classes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from forerun.weights.generation import GenerationConfig, end_ids
from forerun.weights.gguf_file import GgufFile
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_pretokenizers import PRE_TOKENIZERS
from forerun.weights.gguf_tokenizer import read_tokenizer
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer
from tests.support.shared import shared_data
from tests.weights.golden_tokens import GOLDEN, TEXTS, WITH_SPECIAL, digest

EVERY = (*TEXTS, *WITH_SPECIAL)
KNOWN = json.loads(GOLDEN.read_text())
# Classes of transformers, and what GGUF files call their way to cut texts
FAMILIES = {
    "qwen2": ("qwen2.tokenization_qwen2", "Qwen2Tokenizer"),
    "qwen35": ("qwen3_5.tokenization_qwen3_5", "Qwen3_5Tokenizer"),
    "gpt-2": ("gpt2.tokenization_gpt2", "GPT2Tokenizer"),
    "olmo": ("gpt_neox.tokenization_gpt_neox", "GPTNeoXTokenizer"),
    "mpt": ("gpt_neox.tokenization_gpt_neox", "GPTNeoXTokenizer"),
    "command-r": ("cohere.tokenization_cohere", "CohereTokenizer"),
}


def found(tokenizer: Tokenizer, texts: tuple[str, ...]) -> str:
    return digest(lambda text: tokenizer.encode(text, add_special_tokens=False), texts)


def vocabulary(name: str) -> Tokenizer:
    path = shared_data(f"tokenizers/ggml-vocab/ggml-vocab-{name}.gguf")
    return read_tokenizer(GGUFMetadata(path, GgufFile.open(path).metadata))


def test_the_embedded_model() -> None:
    assert found(Tokenizer.from_folder(resolve_model("mini")), EVERY) == KNOWN["mini"]


@pytest.mark.parametrize("name", [name for name in KNOWN if name.startswith(("llama2", "mistral"))])
def test_sentencepiece_models(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((shared_data("tokenizers") / name).read_bytes())
    assert found(Tokenizer.from_folder(tmp_path), TEXTS) == KNOWN[name]


def test_vocabularies_of_gguf_files() -> None:
    assert found(vocabulary("llama-spm"), TEXTS) == KNOWN["llama2/tokenizer.model"]
    assert found(vocabulary("phi-3"), TEXTS) == KNOWN["llama2/tokenizer.model"]
    assert found(vocabulary("gpt-2"), EVERY) == KNOWN["gpt2"]


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level vocabulary and its merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_the_families(family: str, trained: tuple[dict[str, int], Any], tmp_path: Path) -> None:
    module, name = FAMILIES[family]
    theirs = getattr(importlib.import_module(f"transformers.models.{module}"), name)(
        vocab=dict(trained[0]), merges=list(trained[1])
    )
    theirs.save_pretrained(tmp_path)
    names = sorted(theirs.get_vocab(), key=theirs.get_vocab().__getitem__)
    special = set(theirs.all_special_ids)
    ours = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": family,
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": np.array([3 if i in special else 1 for i in range(len(names))], dtype=np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in trained[1]],
    }
    folder, file = Tokenizer.from_folder(tmp_path), read_tokenizer(GGUFMetadata(tmp_path / "model.gguf", ours))
    for text in EVERY:
        expected = theirs.encode(text, add_special_tokens=False)
        assert folder.encode(text, add_special_tokens=False) == expected, text
        assert file.encode(text, add_special_tokens=False) == expected, text


def test_llama_3_cuts_texts_as_transformers_does() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    assert PRE_TOKENIZERS["llama-bpe"].patterns == (TikTokenConverter(vocab_file="none").pattern,)


def test_published_configurations_name_what_ends_a_text(tmp_path: Path) -> None:
    """config.json's ids where there is no generation_config.json, whose ids count alone where there is one."""
    files = sorted(shared_data("configs/hf").glob("*.config.json"))
    assert len(files) > 5
    for path in files:
        named = json.loads(path.read_text()).get("eos_token_id")
        (tmp_path / "config.json").write_bytes(path.read_bytes())
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        expected = tuple(named) if isinstance(named, list) else () if named is None else (named,)
        assert end_ids(tmp_path, GenerationConfig.beside(tmp_path)) == expected
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
        assert end_ids(tmp_path, GenerationConfig.beside(tmp_path)) == (7, 5)
