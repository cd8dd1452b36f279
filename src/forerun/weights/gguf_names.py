"""Tensor names: GGUF's and Hugging Face's, and which rows llama.cpp's converter reorders.

Knows: the names of the decoders forerun runs. Does not know: shapes, files or types.
Source: llama.cpp gguf-py/gguf/tensor_mapping.py and convert_hf_to_gguf.py (LlamaModel.permute).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_INNER = {
    "per_layer_input_gate": "inp_gate",  # this and the next are Gemma 4's
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router": "ffn_gate_inp",  # its scale
    "router.per_expert": "ffn_down_exps",  # likewise
    "router.proj": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # Phi-3 stores both in one
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.e_score_correction": "exp_probs_b",
    "mlp.gate.e_score_correction": "exp_probs_b",  # its "_bias" is a ".bias" in GGUF
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{part}_proj": f"ffn_{part}_shexp" for s in ("", "s") for part in ("gate", "up", "down")},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",  # newer files have the next two instead, names of llama.cpp's converter
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    **{name: f"nextn.{name}" for name in ("embed_tokens", "enorm", "hnorm", "eh_proj")},
    **{f"shared_head.{name}": f"nextn.shared_head_{name}" for name in ("head", "norm")},
}
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:[._](weight|bias|scale))?")  # without a kind in GGUF: weight
_BLOCK = re.compile(r"blk\.(\d+)\.(.+?)((?:\.(?:weight|bias|scale))?)")
_OUTWARD = {theirs: ours for ours, theirs in {**_OUTER, **_INNER}.items() if ours != "mlp.gate_up_proj"}
_BARE = ("ssm_a", "ssm_d")  # tensors of recurrent layers whose names end there
_REORDERED = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")


class ExpertPlace(NamedTuple):
    """A tensor of a file, or one expert's part of a tensor that stacks all experts."""

    name: str
    expert: int | None = None
    parts: int = 1  # matrices of one expert, one after the other in that tensor
    part: int = 0


def gguf_name(name: str) -> str:
    """GGUF's name for a tensor, from Hugging Face's name; a name without an equivalent stays as it is."""
    match = _LAYER.fullmatch(name)
    if match:
        own = f"blk.{match[1]}.{_INNER.get(match[2], match[2])}"
        return own if match[2] in _BARE else f"{own}.{match[3] or 'weight'}"
    module, _, kind = name.rpartition(".")
    return f"{_OUTER[module]}.{kind}" if module in _OUTER else name


def places(name: str) -> list[ExpertPlace]:
    """Where a file may keep a tensor, from Hugging Face's name.

    One of an expert stacked with all experts, stacked with gate and up in one tensor, or (early files) by itself.
    """
    match = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(match[2]) if match else None
    if match is None or expert is None or expert[2] not in _EXPERT_PARTS:
        own = gguf_name(name)
        others = own.replace(".ffn_norm.", ".post_attention_norm."), own.replace(".ffn_norm.weight", ".ffn_norm")
        return [ExpertPlace(own), *map(ExpertPlace, others)]  # the last one is Falcon-H1's
    block, index, part = f"blk.{match[1]}", int(expert[1]), _EXPERT_PARTS[expert[2]]
    found = [ExpertPlace(f"{block}.ffn_{part}_exps.{match[3]}", index)]
    if part != "down":
        found.append(ExpertPlace(f"{block}.ffn_gate_up_exps.{match[3]}", index, parts=2, part=int(part == "up")))
    return [*found, ExpertPlace(f"{block}.ffn_{part}.{index}.{match[3]}")]


def has_gguf_name(name: str) -> bool:
    """Whether GGUF has a name for a tensor, from Hugging Face's name."""
    match = _LAYER.fullmatch(name)
    return match[2] in _INNER if match else name.rpartition(".")[0] in _OUTER


def hugging_face_name(name: str) -> str:
    """A name that `gguf_name` turns into `name`: Hugging Face's where it has one."""
    match = _BLOCK.fullmatch(name)
    if match:
        return f"model.layers.{match[1]}.{_OUTWARD.get(match[2], match[2])}{match[3]}"
    module, _, kind = name.rpartition(".")
    return f"{_OUTWARD[module]}.{kind}" if module in _OUTWARD else name


def reordered_heads(name: str) -> str | None:
    """ "q" or "k" for GGUF names whose rows the converter reorders in the architecture `llama`, else None."""
    match = _REORDERED.fullmatch(name)
    return match[1] if match else None


def halves_from_pairs(num_rows: int, num_heads: int) -> Tensor:
    """Where each row of a matrix in Hugging Face's order lies in GGUF's -> [num_rows] int64.

    Hugging Face rotates entry i of a head together with i + D/2, llama.cpp 2i with 2i + 1.
    """
    pairs = torch.arange(num_rows).reshape(num_heads, -1, 2)  # [heads, D / 2, 2]
    return pairs.transpose(1, 2).reshape(-1)


def values_from_tiles(num_keys: int, num_values: int) -> Tensor:
    """Where each head of values lies in files that have the first of all heads of keys first -> [num_values] int64."""
    return torch.arange(num_values).view(-1, num_keys).T.reshape(-1)


def gates_from_keys(num_keys: int, num_values: int) -> Tensor:
    """Where each head's b, then each one's a, lies in files that have both of one head of keys after the other."""
    return torch.arange(2 * num_values).view(num_keys, 2, -1).transpose(0, 1).reshape(-1)


def pairs_from_halves(num_rows: int, num_heads: int) -> Tensor:
    """The inverse of `halves_from_pairs`, for writing -> [num_rows] int64."""
    halves = torch.arange(num_rows).reshape(num_heads, 2, -1)  # [heads, 2, D / 2]
    return halves.transpose(1, 2).reshape(-1)
