"""GGUF models for tests, written by the gguf package from small transformers models as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from forerun.weights.gguf_names import gguf_name

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Rows of whole blocks of 256."""


def permuted(matrix: Tensor, num_heads: int) -> Tensor:
    """Rows as the converter stores them for `llama` (convert_hf_to_gguf.py, LlamaModel.permute)."""
    shape = matrix.shape
    return matrix.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys the converter writes for every decoder."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The vocabulary that `factory.write_tokenizer` put into a folder."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    names = sorted(vocab, key=lambda name: vocab[name])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([3 if name in ("<pad>", "<s>", "</s>") else 1 for name in names])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")


def stored(name: str, tensor: Tensor, quantized: str) -> tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]:
    """Bytes of a tensor: vectors as F32, matrices as `quantized`."""
    kind = gguf.GGMLQuantizationType[quantized if tensor.dim() > 1 else "F32"]
    if kind.name in ("Q4_K", "Q6_K"):
        from forerun.quant.gguf_encode import encode_rows

        return encode_rows(kind.name, tensor).numpy(), kind
    return gguf.quants.quantize(tensor.numpy(), kind), kind


def write_model(
    path: Path, folder: Path, model: Any, arch: str, types: str | dict[str, str] = "F32", **vectors: list[float]
) -> dict[str, Tensor]:
    """Write a transformers model; returns what its tensors are worth after quantization, by Hugging Face's names.

    types: of all matrices, or by the end of their GGUF names with "" for the others. vectors: tensors beside them.
    """
    writer = gguf.GGUFWriter(path, arch)
    add_config(writer, model.config)
    add_tokenizer(writer, folder)
    types = {"": types} if isinstance(types, str) else types
    worth: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        own = gguf_name(name)
        quantized = next(kind for end, kind in types.items() if own.removesuffix(".weight").endswith(end))
        data, kind = stored(own, tensor, quantized)
        worth[name] = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(data, kind)))
        if arch == "llama" and (".attn_q." in own or ".attn_k." in own):
            heads = model.config.num_attention_heads if ".attn_q." in own else model.config.num_key_value_heads
            data, kind = stored(own, permuted(tensor, heads), quantized)
        writer.add_tensor(own, data, raw_dtype=kind)
    for name, values in vectors.items():
        writer.add_tensor(f"{name}.weight", np.array(values, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return worth
