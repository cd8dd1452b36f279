"""GGUF models for tests, written by the gguf package from small transformers models as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.weights.gguf_names import gguf_name

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Rows of whole blocks of 256."""


# Norms of families whose names mean other places than Llama's.
BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GEMMA = {**BEHIND, "pre_feedforward_layernorm": "ffn_norm"}
NORMS = {
    "gemma2": GEMMA, "gemma3": GEMMA, "olmo2": BEHIND, "exaone4": BEHIND,
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}  # fmt: skip
PERMUTED = ("llama", "mistral3", "granite", "smollm3")


def add_special(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """The keys of dense families beyond Llama."""
    if arch in ("gemma2", "gemma3", "olmo2", "exaone4", "cohere2") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if arch in ("olmo2", "exaone4") and getattr(config, "sliding_window", None):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    if arch == "mistral3" and config.model_type == "ministral3":
        _add_yarn(writer, config.rope_parameters)
        writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
        writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])
    if arch == "cohere2":
        writer.add_logit_scale(config.logit_scale)
        writer.add_layer_norm_eps(config.layer_norm_eps)


def own_name(name: str, arch: str) -> str:
    """The converter's name for a tensor."""
    for ours, theirs in NORMS.get(arch, {}).items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return gguf_name(name)


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
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "phi3" or (getattr(config, "sliding_window", None) and config.model_type == "mistral"):
        writer.add_sliding_window(config.sliding_window or 0)


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
    if kind.name == "IQ2_XS":
        return iq2_xs(tensor.numpy()), kind
    return gguf.quants.quantize(tensor.numpy(), kind), kind


def iq2_xs(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Blocks of the grid's nearest points, each of which has an even number of signs."""
    quants = gguf.quants.IQ2_XS
    quants.init_grid()
    grid = np.reshape(quants.grid, quants.grid_shape)  # [512, 8]
    x = matrix.astype(np.float32).reshape(-1, 256)
    largest = np.abs(x).reshape(len(x), 16, 16).max(axis=2)  # [b, 16]
    unit = (largest.max(axis=1, keepdims=True) * 8 / 43 / 31).astype(np.float16)  # an eighth of it is counted
    safe = np.maximum(unit.astype(np.float32), 1e-7) / 8
    counts = np.clip(np.round((largest / 43 / safe - 1) / 2), 0, 15).astype(np.uint8)  # [b, 16]
    scaled = (np.abs(x).reshape(len(x), 16, 16) / (safe * (2 * counts + 1))[:, :, None]).reshape(-1, 8)
    points = np.argmin((grid * grid).sum(axis=1) - 2 * scaled @ grid.T, axis=1).reshape(-1, 32)  # [b, 32]
    signs = np.packbits(x.reshape(-1, 8)[:, :7] < 0, axis=1, bitorder="little").reshape(-1, 32)  # the eighth follows
    words = (points | signs.astype(np.uint16) << 9).astype("<u2")
    blocks = (unit.view(np.uint8), words.view(np.uint8), counts[:, 0::2] | counts[:, 1::2] << 4)
    return np.concatenate(blocks, axis=1).reshape(len(matrix), -1)


def write_model(
    path: Path, folder: Path, model: Any, arch: str, types: str | dict[str, str] = "F32", **vectors: list[float]
) -> dict[str, Tensor]:
    """Write a transformers model; returns what its tensors are worth after quantization, by Hugging Face's names.

    types: of all matrices, or by the end of their GGUF names with "" for the others. vectors: tensors beside them.
    """
    writer = gguf.GGUFWriter(path, arch)
    add_config(writer, model.config)
    add_special(writer, arch, model.config)
    add_tokenizer(writer, folder)
    types = {"": types} if isinstance(types, str) else types
    worth: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        own = own_name(name, arch)
        quantized = next(kind for end, kind in types.items() if own.removesuffix(".weight").endswith(end))
        data, kind = stored(own, tensor, quantized)
        worth[name] = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(data, kind)))
        if arch in ("gemma2", "gemma3") and "norm" in name:
            data, kind = stored(own, tensor + 1, quantized)
        if arch in PERMUTED and (".attn_q." in own or ".attn_k." in own):
            heads = model.config.num_attention_heads if ".attn_q." in own else model.config.num_key_value_heads
            data, kind = stored(own, permuted(tensor, heads), quantized)
        writer.add_tensor(own, data, raw_dtype=kind)
    for name, values in vectors.items():
        writer.add_tensor(f"{name}.weight", np.array(values, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return worth


def write_again(
    path: Path, add: Callable[[gguf.GGUFWriter], object] = bool, types: dict[str, str] | None = None
) -> None:
    """Write a file again with more keys, or with its F32 matrices in other types, by the end of their names."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    add(writer)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if types is not None:
            wanted = next(value for end, value in types.items() if tensor.name.removesuffix(".weight").endswith(end))
            data, kind = stored(tensor.name, torch.from_numpy(np.array(data)), wanted)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    path.with_suffix(".new").rename(path)


# -- mixtures of experts ---------------------------------------------------------------------------------------------


def add_mixture(writer: gguf.GGUFWriter, config: Any, is_split: bool) -> None:
    """The keys the converter writes for mixtures of experts; is_split: deepseek2 as newer converters write it."""
    is_deepseek = config.model_type in ("deepseek_v3", "deepseek_v32", "glm4_moe_lite")
    counts = ("n_routed_experts", "num_local_experts", "num_experts")
    writer.add_expert_count(next(getattr(config, name) for name in counts if hasattr(config, name)))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        is_only = config.model_type in ("gpt_oss", "minimax_m2", "llama4_text")  # without dense layers, or other fields
        writer.add_expert_feed_forward_length(config.intermediate_size if is_only else config.moe_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        _add_yarn(writer, config.rope_parameters)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if is_deepseek or config.model_type == "glm4_moe":
        _add_sigmoid(writer, config)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_feed_forward_length(config.intermediate_size_mlp)
    if config.model_type == "glm4_moe":
        writer.add_nextn_predict_layers(0)
    if is_deepseek:
        _add_deepseek(writer, config, is_split)


def _add_sigmoid(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_deepseek(writer: gguf.GGUFWriter, config: Any, is_split: bool) -> None:
    head, latent = (size + config.qk_rope_head_dim for size in (config.qk_nope_head_dim, config.kv_lora_rank))
    writer.add_head_count_kv(1 if is_split else config.num_attention_heads)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(latent if is_split else head)
    writer.add_value_length(config.kv_lora_rank if is_split else config.v_head_dim)
    if is_split:
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_nextn_predict_layers(0)
    if writer.arch == "deepseek32":
        for key, value in (("head_count", 2), ("key_length", 16), ("top_k", getattr(config, "index_topk", 128))):
            writer.add_uint32(f"deepseek32.attention.indexer.{key}", value)
    if config.rope_parameters["rope_type"] == "yarn":
        _add_yarn(writer, config.rope_parameters)
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _add_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def converted(tensors: dict[str, Tensor], config: Any, is_split: bool) -> dict[str, Tensor]:
    """Published tensors of a mixture as the converter looks up their names: experts stacked, heads apart."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", []).append((int(expert[2]), tensor))
        elif config.model_type in ("gpt_oss", "llama4_text") and ".experts." in name:
            found |= _transposed_experts(name, tensor, config.model_type == "gpt_oss")
        elif name.endswith("kv_b_proj.weight") and is_split:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
            found[name.replace("kv_b", "v_b")] = values.contiguous()
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    stacked = {name: torch.stack([tensor for _, tensor in sorted(parts)]) for name, parts in stacks.items()}
    return {**found, **stacked}


def _transposed_experts(name: str, tensor: Tensor, alternate: bool) -> dict[str, Tensor]:
    """Matrices and biases of all experts, by outputs, gate and up apart; alternate: their rows do."""
    is_bias, kind = name.endswith("_bias"), "bias" if name.endswith("_bias") else "weight"
    tensor, module = tensor if is_bias else tensor.transpose(1, 2), name.removesuffix("_bias")
    if not module.endswith("gate_up_proj"):
        return {f"{module}.{kind}": tensor.contiguous()}
    names = (module.replace("gate_up", part) for part in ("gate", "up"))
    parts = (tensor[:, 0::2], tensor[:, 1::2]) if alternate else tensor.chunk(2, dim=1)
    return {f"{own}.{kind}": part.contiguous() for own, part in zip(names, parts, strict=True)}


def write_mixture(
    path: Path, folder: Path, config: Any, arch: str, kind: str | dict[str, str] = "F32", is_split: bool = True,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict, **keys: Any,
) -> Path:  # fmt: skip
    """Write the mixture in `folder` under the gguf package's own names; `change` sees the tensors by these.

    kind: of all matrices, or by the end of their names with "" for the others. keys: instead of those of the
    converter, by the end of their names; None leaves one out.
    """
    # The package is older than deepseek32, and than modules in files of deepseek2; glm-dsa has the same names.
    kin = "glm-dsa" if arch in ("deepseek2", "deepseek32") else arch
    model = next(known for known, name in gguf.MODEL_ARCH_NAMES.items() if name == kin)
    names = gguf.get_tensor_name_map(model, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    add_config(writer, config)
    add_tokenizer(writer, folder)
    add_mixture(writer, config, is_split)
    for key, value in keys.items():
        found = next(name for name in writer.kv_data[0] if name.endswith(key))
        if value is None:
            del writer.kv_data[0][found]
        else:
            writer.kv_data[0][found].value = value
    stored_tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    found_tensors: dict[str, Tensor] = {}
    for name, tensor in converted(stored_tensors, config, is_split).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        own = f"{own}.weight" if own is not None and own.endswith("sinks") else own
        assert own is not None, name
        if arch == "llama" and (".attn_q." in own or ".attn_k." in own):
            tensor = permuted(tensor, config.num_attention_heads if ".attn_q." in own else config.num_key_value_heads)
        found_tensors[own] = tensor.squeeze() if own.endswith("inp_shexp.weight") else tensor
    kinds = kind if isinstance(kind, dict) else {"": kind}
    for own, tensor in change(found_tensors).items():
        is_kept = tensor.dim() == 1 or "ffn_gate_inp" in own  # what the converter never quantizes
        wanted = next(value for end, value in kinds.items() if own.removesuffix(".weight").endswith(end))
        data, stored_kind = stored(own, tensor, "F32" if is_kept else wanted)
        writer.add_tensor(own, data, raw_dtype=stored_kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path
