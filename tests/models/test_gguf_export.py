"""A folder written as GGUF is the same model: configuration, bits, tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.core import SamplingParams
from forerun.errors import CheckpointError, ConfigError, UnsupportedError
from forerun.llm import LLM
from forerun.models.gguf_export import export_gguf
from forerun.models.loader import load_model, read_config
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer
from tests.models import factory
from tests.models.factory import Runner
from tests.support.stories import stories260k
from tests.weights.makers import TEXTS

TOKENS = [3, 17, 40, 8, 25, 61, 9, 33, 50, 12, 77, 4]
CASES = (
    "llama",
    "llama-tied-biased",
    "llama-linear",
    "llama-yarn",
    "llama3",
    "mistral-window",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "phi3-window",
    "phi3-longrope",
)
WITHOUT_FORMULA = ("llama3", "phi3-longrope")  # divisors of frequencies went through float32


def logits(path: Path) -> torch.Tensor:
    return Runner(load_model(path, factory.make_kernels()).model, 40).span(TOKENS).logits


@pytest.mark.parametrize("case", CASES)
def test_every_family_keeps_its_bits(case: str, tmp_path: Path) -> None:
    folder = factory.make_checkpoint(case, tmp_path / "folder")
    path = export_gguf(folder, tmp_path / "m.gguf", "F32")
    found, expected = logits(path), logits(folder)
    assert torch.equal(found, expected) or (case in WITHOUT_FORMULA and torch.allclose(found, expected, atol=1e-5))
    ours, theirs = read_config(path), read_config(folder)
    assert ours is not None and theirs is not None
    assert (ours.max_position, ours.windows, ours.heads) == (theirs.max_position, theirs.windows, theirs.heads)


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_0", "Q4_K_M", "F16"])
def test_mixes_stay_close(mix: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    folder = factory.save_checkpoint(factory.random_hf_model("qwen2", sizes), tmp_path / "folder")
    path = export_gguf(folder, tmp_path / "m.gguf", mix)
    found, expected = logits(path), logits(folder)
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < {"F16": 0.003, "Q8_0": 0.1, "Q4_K_M": 0.6, "Q4_0": 0.8}[mix]
    assert path.stat().st_size < sum(p.stat().st_size for p in folder.glob("*.safetensors")) * 0.6


def test_the_embedded_model_writes_the_same_text(tmp_path: Path) -> None:
    folder = resolve_model("mini-draft")
    path = export_gguf(folder, tmp_path / "m.gguf", "BF16")
    theirs, ours = Tokenizer.from_folder(folder), load_model(path, factory.make_kernels()).tokenizer
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    assert ours.eos_token_ids == theirs.eos_token_ids and ours.chat_template == theirs.chat_template
    params = SamplingParams(temperature=0.0, max_tokens=12)
    texts = [LLM(str(name), max_model_len=64).generate(["The"], params)[0].outputs[0].text for name in (path, folder)]
    assert texts[0] == texts[1] and texts[0]


def test_sentencepiece_tokens_survive(tmp_path: Path) -> None:
    folder = stories260k(tmp_path / "folder")
    path = export_gguf(folder, tmp_path / "m.gguf", "F32")
    theirs, ours = Tokenizer.from_folder(folder), load_model(path, factory.make_kernels()).tokenizer
    texts = [*TEXTS, "Once upon a time there was a little girl named Lily.", "", " "]
    assert [ours.encode(text) for text in texts] == [theirs.encode(text) for text in texts]
    assert torch.equal(logits(path), logits(folder))


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    dynamic = factory.make_checkpoint("llama-dynamic", tmp_path / "dynamic")
    with pytest.raises(UnsupportedError, match="no keys for a dynamic rope"):
        export_gguf(dynamic, tmp_path / "m.gguf", "F32")
    windows = factory.make_checkpoint("qwen2-windows", tmp_path / "windows")
    with pytest.raises(UnsupportedError, match="no keys for the sliding windows of this qwen2 model"):
        export_gguf(windows, tmp_path / "m.gguf", "F32")
    plain = factory.make_checkpoint("llama", tmp_path / "plain")
    with pytest.raises(ConfigError, match="no mix of types 'Q5'"):
        export_gguf(plain, tmp_path / "m.gguf", "Q5")
    content = json.loads((plain / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (plain / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="for which llama.cpp has no name"):
        export_gguf(plain, tmp_path / "m.gguf", "F32")
    assert not (tmp_path / "m.gguf").exists()


def test_an_output_layer_that_config_json_calls_tied_is_kept(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    path = export_gguf(folder, tmp_path / "m.gguf", "F32")
    assert torch.equal(logits(path), logits(folder))


def test_tensors_without_a_name_are_refused(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.extra.weight": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"has a tensor .*extra.weight, for which forerun knows no GGUF name"):
        export_gguf(folder, tmp_path / "m.gguf", "F32")


def test_values_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    model = factory.random_hf_model("llama")
    model.lm_head.weight.data[0, 0] = 1e6
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    with pytest.raises(CheckpointError, match="lm_head.weight has entries that F16 cannot hold"):
        export_gguf(folder, tmp_path / "m.gguf", "F16")
