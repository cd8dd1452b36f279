"""GGUF metadata of families with recurrent layers, in config.json's terms.

Knows: their keys, how files say which layers are recurrent, what llama.cpp assumes where they say nothing. Does not
know: the fields all decoders share (`gguf_config`).
Source: llama.cpp's converter and its readers of hyperparameters.
"""

from __future__ import annotations

from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_dense import SSM_KEYS, Reader, granite_scales
from forerun.weights.gguf_file import GgufModel
from forerun.weights.gguf_layers import layer_sizes, num_blocks
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_mixtures import (
    EXPERT_KEYS,
    LATENT_KEYS,
    QWEN_KEYS,
    SIGMOID_KEYS,
    expect_sigmoid,
    expert_counts,
    latent_fields,
    sigmoid_fields,
)

# Rotated sections are for positions of pictures; those of text are the same in all.
_DELTA_KEYS = (
    f"{SSM_KEYS} full_attention_interval attention.recurrent_layers nextn_predict_layers rope.dimension_sections"
)


def _qwen3next(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {"model_type": "qwen3_next", **_delta(metadata, "qwen3next"), **_experts(file, metadata, "qwen3next")}


def _qwen35(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text", **_delta(metadata, "qwen35")}


def _qwen35moe(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {"model_type": "qwen3_5_moe_text", **_delta(metadata, "qwen35moe"), **_experts(file, metadata, "qwen35moe")}


def _experts(file: GgufModel, metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    experts, used = expert_counts(file, metadata, arch)
    return {
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.integer(f"{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer(f"{arch}.expert_shared_feed_forward_length"),
    }


def _delta(metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """Gated delta nets. Blocks after the last layer are for drafting."""
    blocks = num_blocks(metadata, arch)
    num_layers = blocks - metadata.integer(f"{arch}.nextn_predict_layers", 0)
    interval = max(metadata.integer(f"{arch}.full_attention_interval", 4), 1)
    is_recurrent = [bool((layer + 1) % interval) for layer in range(num_layers)]
    if metadata.get(f"{arch}.attention.recurrent_layers") is not None:
        is_recurrent = metadata.numbers(f"{arch}.attention.recurrent_layers", blocks)[:num_layers]
    num_heads, head_dim = _heads(metadata, arch)
    return {
        "num_hidden_layers": num_layers,
        "layer_types": ["linear_attention" if value else "full_attention" for value in is_recurrent],
        "linear_conv_kernel_dim": metadata.integer(f"{arch}.ssm.conv_kernel"),
        "linear_num_key_heads": metadata.integer(f"{arch}.ssm.group_count"),
        "linear_key_head_dim": metadata.integer(f"{arch}.ssm.state_size"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": head_dim,
    }


def _heads(metadata: GGUFMetadata, arch: str) -> tuple[int, int]:
    """The number of heads of recurrent layers, and the size of their values."""
    size, heads = metadata.integer(f"{arch}.ssm.inner_size"), metadata.integer(f"{arch}.ssm.time_step_rank")
    if not heads or size % heads:
        raise CheckpointError(
            f"{metadata.path}: {arch}.ssm.inner_size {size} is not {heads} heads ({arch}.ssm.time_step_rank) of equal "
            "size; convert the model again"
        )
    return heads, size // heads


def _lfm2(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {**_convolutions(metadata, "lfm2"), "block_auto_adjust_ff_dim": False}


def _lfm2moe(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    experts, used = expert_counts(file, metadata, "lfm2moe")
    expect_sigmoid(metadata, "lfm2moe")
    return {
        **_convolutions(metadata, "lfm2moe"),
        "model_type": "lfm2_moe",
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.integer("lfm2moe.expert_feed_forward_length"),
        "num_dense_layers": metadata.integer("lfm2moe.leading_dense_block_count"),
        "use_expert_bias": any(".exp_probs_b." in name for name in file.tensors),
    }


def _convolutions(metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    return {
        "norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.integer(f"{arch}.shortconv.l_cache"),
        "layer_types": _kinds(metadata, arch, "conv", "full_attention"),
    }


def _kinds(metadata: GGUFMetadata, arch: str, recurrent: str, attends: str) -> list[str]:
    """What each layer is: those without heads of keys do not attend."""
    return [attends if heads else recurrent for heads in layer_sizes(metadata, arch, "attention.head_count_kv")]


def _mamba(file: GgufModel, metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """Mamba-2 as Granite and Falcon spell it."""
    num_heads, head_dim = _heads(metadata, arch)
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": metadata.integer(f"{arch}.ssm.group_count"),
        "mamba_d_state": metadata.integer(f"{arch}.ssm.state_size"),
        "mamba_d_conv": metadata.integer(f"{arch}.ssm.conv_kernel"),
        "mamba_conv_bias": _has_conv_bias(file),
    }


def _has_conv_bias(file: GgufModel) -> bool:
    return any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)


def _granitehybrid(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    arch = "granitehybrid"
    size, hidden = metadata.integer(f"{arch}.ssm.inner_size"), metadata.integer(f"{arch}.embedding_length")
    experts = expert_counts(file, metadata, arch) if metadata.get(f"{arch}.expert_count") else (0, 0)
    dense_size = metadata.integer(f"{arch}.feed_forward_length")
    rotates = metadata.flag(f"{arch}.rope.scaling.finetuned", True)  # llama.cpp's switch for it
    return {
        "model_type": "granitemoehybrid",
        **granite_scales(metadata, arch),
        **_mamba(file, metadata, arch),
        "mamba_expand": size // max(hidden, 1),
        "layer_types": _kinds(metadata, arch, "mamba", "attention"),
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "shared_intermediate_size": metadata.integer(f"{arch}.expert_shared_feed_forward_length", dense_size),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
    }


def _falcon_h1(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Files have weights that are multiplied with the multipliers, which is why none is stored."""
    if "output.weight" not in file.tensors:
        raise UnsupportedError(
            f"{metadata.path} has no output.weight, and its table is multiplied for inputs; how the output layer "
            "differs is not stored: load the model from its safetensors"
        )
    return {
        "model_type": "falcon_h1",
        **_mamba(file, metadata, "falcon-h1"),
        "mamba_d_ssm": metadata.integer("falcon-h1.ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,  # what llama.cpp computes
    }


def _kimi_linear(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Files do not say how experts are weighed and grouped: as Kimi-Linear's published ones."""
    arch = "kimi-linear"
    latents = latent_fields(metadata, arch)
    expect_sigmoid(metadata, arch)
    return {
        "model_type": "kimi_linear",
        **latents,
        **sigmoid_fields(file, metadata, arch),
        "norm_topk_prob": metadata.flag(f"{arch}.expert_weights_norm", True),
        "n_group": metadata.integer(f"{arch}.expert_group_count", 1),
        "topk_group": metadata.integer(f"{arch}.expert_group_used_count", 1),
        "layer_types": _kinds(metadata, arch, "linear_attention", "full_attention"),
        "linear_num_heads": latents["num_key_value_heads"],
        "linear_head_dim": metadata.integer(f"{arch}.kda.head_dim"),
        "linear_conv_kernel_dim": metadata.integer(f"{arch}.ssm.conv_kernel"),
    }


def _nemotron_h_moe(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Nemotron-H whose feed-forward parts are mixtures. Blocks after the last layer are for drafting."""
    arch = "nemotron_h_moe"
    expect_sigmoid(metadata, arch)
    fields = _nemotron_h(file, metadata, arch, "moe")
    num_layers = num_blocks(metadata, arch) - metadata.integer(f"{arch}.nextn_predict_layers", 0)
    latent = metadata.integer(f"{arch}.moe_latent_size", 0)
    groups = metadata.integer(f"{arch}.expert_group_count", 1)
    return {
        **fields,
        **sigmoid_fields(file, metadata, arch),
        "layers_block_type": fields["layers_block_type"][:num_layers],
        "moe_shared_expert_intermediate_size": metadata.integer(f"{arch}.expert_shared_feed_forward_length"),
        "moe_latent_size": latent or None,
        "n_group": groups,
        "topk_group": metadata.integer(f"{arch}.expert_group_used_count", 1 if groups == 1 else None),
        "norm_topk_prob": metadata.flag(f"{arch}.expert_weights_norm", True),
    }


def _nemotron_h(
    file: GgufModel, metadata: GGUFMetadata, arch: str = "nemotron_h", feed_forward: str = "mlp"
) -> dict[str, Any]:  # fmt: skip
    num_heads, head_dim = _heads(metadata, arch)
    mixers = _kinds(metadata, arch, "linear_attention", "full_attention")
    widths = layer_sizes(metadata, arch, "feed_forward_length")
    return {
        "model_type": "nemotron_h",
        "layers_block_type": [feed_forward if width else mixer for mixer, width in zip(mixers, widths, strict=True)],
        "layer_norm_epsilon": metadata.number(
            f"{arch}.attention.layer_norm_rms_epsilon", metadata.get(f"{arch}.attention.layer_norm_epsilon")
        ),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "n_groups": metadata.integer(f"{arch}.ssm.group_count"),
        "ssm_state_size": metadata.integer(f"{arch}.ssm.state_size"),
        "conv_kernel": metadata.integer(f"{arch}.ssm.conv_kernel"),
        "use_conv_bias": _has_conv_bias(file),
        "partial_rotary_factor": 1.0,  # of rope, which there is none of
    }


_GRANITE_KEYS = (
    f"{SSM_KEYS} {EXPERT_KEYS} expert_shared_feed_forward_length embedding_scale residual_scale logit_scale "
    "attention.scale"
)
_LFM2MOE_KEYS = (
    f"{EXPERT_KEYS} shortconv.l_cache expert_feed_forward_length leading_dense_block_count expert_gating_func"
)
_NEMOTRON_KEYS = (
    f"{SSM_KEYS} {SIGMOID_KEYS} attention.layer_norm_epsilon expert_shared_feed_forward_length moe_latent_size "
    "nextn_predict_layers"
)
# Architecture -> the keys it has beyond the common ones, and what they say.
RECURRENT: dict[str, tuple[str, Reader]] = {
    "qwen3next": (f"{_DELTA_KEYS} {QWEN_KEYS}", _qwen3next),
    "qwen35": (_DELTA_KEYS, _qwen35),
    "qwen35moe": (f"{_DELTA_KEYS} {QWEN_KEYS}", _qwen35moe),
    "lfm2": ("shortconv.l_cache", _lfm2),
    "lfm2moe": (_LFM2MOE_KEYS, _lfm2moe),
    "granitehybrid": (_GRANITE_KEYS, _granitehybrid),
    "falcon-h1": (SSM_KEYS, _falcon_h1),
    "nemotron_h": (f"{SSM_KEYS} attention.layer_norm_epsilon", _nemotron_h),
    "nemotron_h_moe": (_NEMOTRON_KEYS, _nemotron_h_moe),
    "kimi-linear": (f"{LATENT_KEYS} ssm.conv_kernel kda.head_dim", _kimi_linear),
}
