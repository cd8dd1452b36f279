"""GGUF metadata of Step-3.5 and MiMo-V2, in config.json's terms.

Knows: their keys, and what a file's tensors say that no key does: which layers have experts and sinks. Does not know:
the fields all decoders share (`gguf_config`).
Source: llama.cpp conversion/step3.py and mimo.py, src/models/step35.cpp and mimo2.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forerun.weights.gguf_file import GgufModel
from forerun.weights.gguf_layers import layer_values, num_blocks
from forerun.weights.gguf_metadata import GGUFMetadata, share
from forerun.weights.gguf_mixtures import EXPERT_KEYS, expect_sigmoid, expert_counts

STEP, MIMO = "step35", "mimo2"
_KEYS = (
    f"{EXPERT_KEYS} attention.sliding_window_pattern expert_feed_forward_length expert_gating_func "
    "expert_weights_scale expert_weights_norm leading_dense_block_count nextn_predict_layers rope.freq_base_swa"
)
STEP_KEYS = (
    f"{_KEYS} expert_shared_feed_forward_length moe_every_n_layers rope.dimension_count_swa swiglu_clamp_exp "
    "swiglu_clamp_shexp"
)
MIMO_KEYS = f"{_KEYS} attention.value_scale expert_group_count expert_group_used_count expert_shared_count"
_TYPES = ("full_attention", "sliding_attention")


def step_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of step3p5, of whose blocks the last ones may be modules for drafting."""
    types, (experts, used) = _types(metadata, STEP), expert_counts(file, metadata, STEP)
    expect_sigmoid(metadata, STEP)
    size = metadata.integer(f"{STEP}.attention.key_length")
    (num_q, own_q), (num_kv, own_kv) = (
        _by_type(metadata, STEP, f"attention.{name}", types) for name in ("head_count", "head_count_kv")
    )
    turned = {
        _TYPES[0]: metadata.integer(f"{STEP}.rope.dimension_count", size // 2),
        _TYPES[1]: metadata.integer(f"{STEP}.rope.dimension_count_swa", size),
    }
    bases = dict(zip(_TYPES, _bases(metadata, STEP), strict=True))
    return {
        "model_type": "step3p5",
        "num_hidden_layers": len(types),
        "layer_types": types,
        "sliding_window": metadata.integer(f"{STEP}.attention.sliding_window"),
        "num_attention_heads": num_q,
        "num_attention_groups": num_kv,
        "num_key_value_heads": num_kv,
        "attention_other_setting": {
            "attention_type": _TYPES[1], "num_attention_heads": own_q, "num_attention_groups": own_kv, "head_dim": size,
        },
        "rope_theta": [bases[kind] for kind in types],
        "partial_rotary_factors": [share(turned[kind], size) for kind in types],
        "moe_layers_enum": list(_layers_with(file, "ffn_gate_inp.weight", len(types))),
        "moe_num_experts": experts,
        "moe_top_k": used,
        "moe_intermediate_size": metadata.integer(f"{STEP}.expert_feed_forward_length"),
        "share_expert_dim": metadata.integer(f"{STEP}.expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": metadata.number(f"{STEP}.expert_weights_scale", 1.0),
        "norm_expert_weight": metadata.flag(f"{STEP}.expert_weights_norm", True),
        "swiglu_limits": _bounds(metadata, "swiglu_clamp_exp", len(types)),
        "swiglu_limits_shared": _bounds(metadata, "swiglu_clamp_shexp", len(types)),
    }  # fmt: skip


def mimo_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of mimo_v2_flash; a file without the scale of values is older than the key, and of a model with 0.707."""
    types, (experts, used) = _types(metadata, MIMO), expert_counts(file, metadata, MIMO)
    expect_sigmoid(metadata, MIMO)
    size = metadata.integer(f"{MIMO}.attention.key_length")
    num_kv, own_kv = _by_type(metadata, MIMO, "attention.head_count_kv", types)
    with_experts, with_sinks = (
        set(_layers_with(file, name, len(types))) for name in ("ffn_gate_inp.weight", "attn_sinks.weight")
    )
    scale = metadata.get(f"{MIMO}.attention.value_scale")
    return {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": len(types),
        "layer_types": types,
        "mlp_layer_types": ["sparse" if layer in with_experts else "dense" for layer in range(len(types))],
        "sliding_window": metadata.integer(f"{MIMO}.attention.sliding_window"),
        "num_key_value_heads": num_kv,
        "swa_num_key_value_heads": own_kv,
        "v_head_dim": metadata.integer(f"{MIMO}.attention.value_length", size),
        "add_full_attention_sink_bias": any(types[layer] == _TYPES[0] for layer in with_sinks),
        "add_swa_attention_sink_bias": any(types[layer] == _TYPES[1] for layer in with_sinks),
        **({} if scale is None else {"attention_value_scale": metadata.number(f"{MIMO}.attention.value_scale")}),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "swa_rope_theta": _bases(metadata, MIMO)[1],
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.integer(f"{MIMO}.expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number(f"{MIMO}.expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag(f"{MIMO}.expert_weights_norm", True),
        "n_group": metadata.integer(f"{MIMO}.expert_group_count", 1),
        "topk_group": metadata.integer(f"{MIMO}.expert_group_used_count", 1),
    }


def _types(metadata: GGUFMetadata, arch: str) -> list[str]:
    """The type of each layer but those of modules for drafting."""
    num_modules, num_all = metadata.integer(f"{arch}.nextn_predict_layers", 0), num_blocks(metadata, arch)
    if not 0 <= num_modules < num_all:
        raise metadata.wrong(f"{arch}.nextn_predict_layers", f"below {num_all}, the number of blocks")
    pattern = metadata.numbers(f"{arch}.attention.sliding_window_pattern", num_all)
    return [_TYPES[bool(entry)] for entry in pattern[: num_all - num_modules]]


def _by_type(metadata: GGUFMetadata, arch: str, key: str, types: list[str]) -> tuple[int, int]:
    """A number of layers without a window, and of those with one; if there are none of a type, the other's."""
    values = layer_values(metadata, arch, key)
    found = [{value for value, kind in zip(values, types, strict=False) if kind == wanted} for wanted in _TYPES]
    if max(map(len, found)) > 1:
        raise metadata.wrong(f"{arch}.{key}", "the same in all layers with a window, and in all without one")
    full, own = (next(iter(sizes), values[0]) for sizes in found)
    return full, own


def _bases(metadata: GGUFMetadata, arch: str) -> tuple[float, float]:
    """The bases of rotations in layers without a window and with one."""
    base = metadata.number(f"{arch}.rope.freq_base", 10000.0)
    return base, metadata.number(f"{arch}.rope.freq_base_swa", base)


def _bounds(metadata: GGUFMetadata, key: str, num_layers: int) -> list[float]:
    """The bound of each layer's gates, 0 for none."""
    if f"{STEP}.{key}" not in metadata:
        return []
    return [float(bound) for bound in metadata.numbers(f"{STEP}.{key}", num_blocks(metadata, STEP))[:num_layers]]


def _layers_with(file: GgufModel, name: str, num_layers: int) -> Iterable[int]:
    return (layer for layer in range(num_layers) if f"blk.{layer}.{name}" in file.tensors)
