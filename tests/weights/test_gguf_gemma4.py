"""GGUF files of Gemma 4, and of Granite 4 without recurrent layers, written by llama.cpp's own converter.

fixtures/gguf/NAME.gguf is what `convert_hf_to_gguf.py FOLDER --outtype f32 --outfile NAME.gguf` (llama.cpp of
llama-cpp-python 0.3.36) made of the folder that `save` writes; of Granite, with `layer_types` as published files have
them and a `get_vocab_base_pre` that was made to answer "gpt-2".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.errors import CheckpointError, ModelError, UnsupportedError
from forerun.kernels.select import select_kernels
from forerun.models.loader import load_model, read_config
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from tests.models import factory
from tests.models.factory import GEMMA4, GEMMA4_EXPERTS, Runner

gguf = pytest.importorskip("gguf")
from tests.weights import gguf_makers as makers  # noqa: E402

TOKENS = [3, 17, 40, 8, 25, 61, 9, 33, 50, 12, 77, 4, 5, 81, 30, 22]
FIXTURES = Path(__file__).parent / "fixtures" / "gguf"
VOCAB = 330
SIZES = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", {**GEMMA4, **SIZES}),
    "gemma4-experts": ("gemma4_text", {**GEMMA4_EXPERTS, **SIZES, "num_key_value_heads": 2}),
    "granite4-dense": (
        "granitemoehybrid",
        {
            **factory.GRANITE_HYBRID, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2,
            "position_embedding_type": "rope",
        },
    ),
}  # fmt: skip
PIECES = [
    "\u2581",
    *"abcdefghijklmnopqrstuvwxyz.,\n",
    "th",
    "the",
    "\u2581the",
    "in",
    "\n\n",
    "\u2581\u2581",
    "ing",
    "an",
]
MERGES = ["t h", "th e", "\u2581 the", "i n", "\n \n", "\u2581 \u2581", "in g", "a n"]


def save(case: str, folder: Path) -> Path:
    """The model as a folder."""
    model_type, fields = CASES[case]
    factory.save_checkpoint(factory.random_hf_model(model_type, fields), folder)
    if case.startswith("gemma4"):
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Gemma's kind: pieces with merges, bytes for what is no piece."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    names += [f"<unused{index}>" for index in range(VOCAB - len(names))]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(bpe)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    made.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, **roles}
    settings["additional_special_tokens"] = special[4:]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def logits(path: Path, activations: str = "auto") -> Tensor:
    kernels = select_kernels("auto", threads=1, activations=activations)
    return Runner(load_model(path, kernels).model, 40).span(TOKENS).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_safetensors(case: str, tmp_path: Path) -> None:
    assert torch.equal(logits(FIXTURES / f"{case}.gguf"), logits(save(case, tmp_path / "folder")))


def test_texts_are_cut_as_by_the_tokenizer_beside_safetensors(tmp_path: Path) -> None:
    folder = save("gemma4", tmp_path)
    found, expected = (
        load_model(path, factory.make_kernels()).tokenizer for path in (FIXTURES / "gemma4.gguf", folder)
    )
    for text in ("", "the thing, in an  inn.\n\n\nNaïve 漢字 the", "<|turn>the<turn|>\n", " the ", "\n \n\n"):
        ids = found.encode(text)
        assert ids == [2, *expected.encode(text, add_special_tokens=False)], text
        assert found.decode(ids) == expected.decode(ids)
    assert found.bos_token_id == 2 and set(found.eos_token_ids) == {1, 5}  # <eos> and <turn|>


def test_it_answers_as_from_safetensors(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = []
    for path in (FIXTURES / "gemma4.gguf", save("gemma4", tmp_path)):
        llm = LLM(str(path), drafter="suffix", adaptive=False, threads=1)
        answers.append([output.outputs[0].token_ids for output in llm.generate([TOKENS, TOKENS[:5]], params)])
    assert answers[0] == answers[1]


def test_quantized_matrices_and_tables_are_what_they_stand_for(tmp_path: Path) -> None:
    kinds = {"token_embd": "Q8_0", "attn_q": "Q8_0", "ffn_down": "Q8_0", "inp_gate": "Q8_0", "": "F32"}
    kinds = {"per_layer_token_embd": "F32", **kinds}  # whose rows are no whole blocks
    path, plain = changed("gemma4", tmp_path), tmp_path / "plain.gguf"
    plain.write_bytes(path.read_bytes())
    makers.write_again(path, types=kinds)
    quantized = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in gguf.GGUFReader(plain, "r+").tensors:
        worth = quantized[tensor.name]
        values = gguf.quants.dequantize(np.array(worth.data), worth.tensor_type)
        tensor.data[...] = values.reshape(tensor.data.shape)
    found, expected = (logits(each, "float32") for each in (path, plain))
    assert torch.equal(found, expected) and not torch.equal(found, logits(FIXTURES / "gemma4.gguf"))


def changed(case: str, tmp_path: Path, add: Any = bool) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes((FIXTURES / f"{case}.gguf").read_bytes())
    makers.write_again(path, add)
    return path


REFUSED: dict[str, tuple[str, Any, type[ModelError], str]] = {
    "other values": ("gemma4", lambda w: w.add_value_length_swa(8), UnsupportedError, "keys of 16 and values of 8"),
    "part turned": ("gemma4", lambda w: w.add_rope_dimension_count_swa(8), UnsupportedError, "of which 8 are rotated"),
    "widths": (
        "gemma4", lambda w: w.add_feed_forward_length([32, 32, 32, 64, 64, 96]), UnsupportedError, "several sizes",
    ),
    "heads": (
        "gemma4-experts", lambda w: w.add_head_count_kv([2, 1, 4, 1]), CheckpointError, "in all layers with a window"
    ),
    "expert sizes": (
        "gemma4-experts", lambda w: w.add_array("gemma4.expert_feed_forward_length", [20, 20, 20, 24]), CheckpointError,
        "same in all",
    ),
    "negative": ("gemma4", lambda w: w.add_feed_forward_length([32, 32, 32, 64, 64, -1]), CheckpointError, "whole"),
    "unknown": ("gemma4", lambda w: w.add_attention_scale(2.0), UnsupportedError, "gemma4.attention.scale = 2.0"),
    "granite": ("granite4-dense", lambda w: w.add_rope_scaling_finetuned(False), UnsupportedError, "does not rotate"),
    "granite layers": ("granite4-dense", lambda w: w.add_head_count_kv([2, 1]), UnsupportedError, "several sizes"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    name, add, error, says = REFUSED[case]
    with pytest.raises(error, match=says):
        read_config(changed(name, tmp_path, add))


def test_frequencies_are_used_or_not(tmp_path: Path) -> None:
    config = read_config(FIXTURES / "gemma4.gguf")
    assert config is not None and config.rope.kind == "proportional" and config.rope.num_turned == 3
    path = changed("gemma4", tmp_path)
    [factors] = [tensor for tensor in gguf.GGUFReader(path, "r+").tensors if tensor.name == "rope_freqs.weight"]
    factors.data[1] = np.float32(2.0)
    del factors
    with pytest.raises(UnsupportedError, match="holds other divisors"):
        read_config(path)


def test_layers_without_values_have_keys_as_values() -> None:
    config = read_config(FIXTURES / "gemma4-experts.gguf")
    assert config is not None and config.experts is not None and config.experts.beside_dense
    assert [shape.keys_are_values for shape in config.shapes] == [False, True, False, True]
    assert [(shape.heads.num_kv, shape.heads.head_dim) for shape in config.shapes] == [(2, 16), (1, 32)] * 2
    assert "blk.1.attn_v.weight" not in {name for name, *_ in GgufCheckpoint.open(FIXTURES / "gemma4.gguf").stored()}
