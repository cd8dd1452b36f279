"""GGUF metadata of mixtures of experts and of DeepSeek's attention over latents, in config.json's terms.

Knows: the keys of Mixtral (llama with experts), qwen2moe, qwen3moe, gpt-oss, glm4moe, minimax-m2, llama4, deepseek2 and
deepseek32, and what llama.cpp assumes about each. Does not know: the fields all decoders share (`gguf_config`).
Source: llama.cpp convert_hf_to_gguf.py and llama-model.cpp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_file import GgufModel
from forerun.weights.gguf_metadata import GGUFMetadata

EXPERT_KEYS = "expert_count expert_used_count"
QWEN_KEYS = f"{EXPERT_KEYS} expert_feed_forward_length expert_shared_feed_forward_length"
SIGMOID_KEYS = (
    f"{EXPERT_KEYS} expert_feed_forward_length expert_shared_count expert_weights_scale expert_weights_norm "
    "expert_gating_func expert_group_count expert_group_used_count leading_dense_block_count"
)
GLM_KEYS = f"{SIGMOID_KEYS} nextn_predict_layers"
LATENT_KEYS = (
    f"{SIGMOID_KEYS} attention.q_lora_rank attention.kv_lora_rank attention.key_length_mla attention.value_length_mla "
    "rope.scaling.yarn_log_multiplier"
)
LLAMA4_KEYS = f"{EXPERT_KEYS} expert_feed_forward_length interleave_moe_layer_step"
_MAVERICK = 128  # experts of the Llama 4 that does not normalise queries and keys
DEEPSEEK_KEYS = f"{LATENT_KEYS} nextn_predict_layers"
DEEPSEEK32 = "deepseek32"
DEEPSEEK32_KEYS = f"{DEEPSEEK_KEYS} attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k"
_SIGMOID = 2  # a value of expert_gating_func
# (blocks, experts) -> (groups, groups used), for models published before files stored it: DeepSeek-V3, Moonlight, Kimi
# K2
_GROUPS = {(61, 256): (8, 4), (27, 64): (1, 1), (61, 384): (1, 1)}


def mixtral_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of a file of the architecture llama with experts (Mixtral)."""
    experts, used = expert_counts(file, metadata, "llama")
    return {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}


def qwen_fields(file: GgufModel, metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """Fields of qwen2moe and qwen3moe. Files do not store norm_topk_prob: it is true for Qwen3, false for Qwen2."""
    experts, used = expert_counts(file, metadata, arch)
    fields: dict[str, Any] = {
        "model_type": "qwen2_moe" if arch == "qwen2moe" else "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": used,
        "moe_intermediate_size": _inner_size(file, metadata, f"{arch}.expert_feed_forward_length", "ffn_down_exps"),
        "norm_topk_prob": arch == "qwen3moe",
    }
    has_bias = "blk.0.attn_q.bias" in file.tensors
    if arch == "qwen3moe":
        return {**fields, "attention_bias": has_bias}
    shared = _inner_size(file, metadata, f"{arch}.expert_shared_feed_forward_length", "ffn_down_shexp")
    return {**fields, "qkv_bias": has_bias, "shared_expert_intermediate_size": shared}


def gpt_oss_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of gpt-oss, of whose layers every second one has the window."""
    experts, used = expert_counts(file, metadata, "gpt-oss")
    return {
        "model_type": "gpt_oss",
        "intermediate_size": _inner_size(file, metadata, "gpt-oss.expert_feed_forward_length", "ffn_down_exps"),
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "sliding_window": metadata.integer("gpt-oss.attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def deepseek_fields(file: GgufModel, metadata: GGUFMetadata, arch: str = "deepseek2") -> dict[str, Any]:
    """Fields of deepseek2 files like DeepSeek-V3, which store keys and values by head or as one latent for all.

    The last blocks may be layers for drafting (GLM-4.7-Flash).
    """
    number = partial(_integer, metadata, arch=arch)
    _refuse_softmax(metadata, arch)
    experts = sigmoid_fields(file, metadata, arch)
    groups, used_groups = _groups(metadata, experts["n_routed_experts"], arch)
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": number("block_count") - number("nextn_predict_layers", 0),
        **latent_fields(metadata, arch),
        **experts,
        "n_group": groups,
        "topk_group": used_groups,
        "norm_topk_prob": metadata.flag(f"{arch}.expert_weights_norm", False),
    }


def deepseek32_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of DeepSeek-V3.2, which has an indexer."""
    return {
        **deepseek_fields(file, metadata, DEEPSEEK32),
        "model_type": "deepseek_v32",
        "index_topk": metadata.integer(f"{DEEPSEEK32}.attention.indexer.top_k"),
    }


def latent_fields(metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """Attention over latents, stored by head or as one latent for all."""
    number = partial(_integer, metadata, arch=arch)
    is_joined = f"{arch}.attention.key_length_mla" in metadata  # key_length is then that of the latent
    key, value = (f"attention.{name}_length{'_mla' if is_joined else ''}" for name in ("key", "value"))
    rope = number("rope.dimension_count")
    return {
        "num_key_value_heads": number("attention.head_count"),
        "q_lora_rank": number("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": number(key) - rope,
        "v_head_dim": number(value),
    }


def sigmoid_fields(file: GgufModel, metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """Experts chosen by sigmoids, but for their groups."""
    number, (experts, used) = partial(_integer, metadata, arch=arch), expert_counts(file, metadata, arch)
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": used,
        "n_shared_experts": number("expert_shared_count", 0),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "first_k_dense_replace": number("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number(f"{arch}.expert_weights_scale", 1.0),
    }


def minimax_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of minimax-m2."""
    experts, used = expert_counts(file, metadata, "minimax-m2")
    expect_sigmoid(metadata, "minimax-m2")
    inner = _inner_size(file, metadata, "minimax-m2.expert_feed_forward_length", "ffn_down_exps")
    return {
        "model_type": "minimax_m2",
        "intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": used,
    }


def glm_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of glm4moe, of whose blocks the last ones may be layers for drafting."""
    number = partial(_integer, metadata, arch="glm4moe")
    expect_sigmoid(metadata, "glm4moe")
    return {
        "model_type": "glm4_moe",
        "num_hidden_layers": number("block_count") - number("nextn_predict_layers", 0),
        **sigmoid_fields(file, metadata, "glm4moe"),
        "n_group": number("expert_group_count", 1),
        "topk_group": number("expert_group_used_count", 1),
        "norm_topk_prob": metadata.flag("glm4moe.expert_weights_norm", False),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def latent_yarn(metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """yarn's mscale and mscale_all_dim in deepseek2; llama.cpp supports only models in which both are equal."""
    key = f"{arch}.rope.scaling.yarn_log_multiplier"
    if key not in metadata:
        raise UnsupportedError(
            f"{metadata.path} has a rope scaling of type 'yarn' without {key}, so that the scale of its attention is "
            "not known; convert the model again with a current llama.cpp"
        )
    mscale = round(10.0 * metadata.number(key), 6)  # stored as a tenth
    return {"mscale": mscale, "mscale_all_dim": mscale}


def _integer(metadata: GGUFMetadata, key: str, default: int | None = None, *, arch: str) -> int:
    return metadata.integer(f"{arch}.{key}", default)


def llama4_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of llama4, of whose layers every fourth does not rotate and sees everything, as llama.cpp has it."""
    experts, used = expert_counts(file, metadata, "llama4")
    if metadata.get("llama4.attention.sliding_window") is not None:
        raise UnsupportedError(
            f"{metadata.path} sets llama4.attention.sliding_window, as files of MobileLLM do; supported are files of "
            "Llama 4, which do not: load the model from its safetensors"
        )
    return {
        "model_type": "llama4_text",
        "intermediate_size": metadata.integer("llama4.expert_feed_forward_length"),
        "intermediate_size_mlp": metadata.integer("llama4.feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "interleave_moe_layer_step": metadata.integer("llama4.interleave_moe_layer_step"),
        "use_qk_norm": experts != _MAVERICK,
    }


def expect_sigmoid(metadata: GGUFMetadata, arch: str) -> None:
    """Raise UnsupportedError if experts are chosen by something else."""
    key = f"{arch}.expert_gating_func"
    if metadata.integer(key, _SIGMOID) != _SIGMOID:
        raise UnsupportedError(f"{metadata.path}: {key} must be {_SIGMOID} (sigmoid); load the model's safetensors")


def expert_counts(file: GgufModel, metadata: GGUFMetadata, arch: str) -> tuple[int, int]:
    """The number of experts, and how many a row uses."""
    experts = metadata.integer(f"{arch}.expert_count")
    for name, tensor in file.tensors.items():
        dimensions = {"bias": 2, "scale": 1}.get(name.rpartition(".")[2], 3)
        if "_exps." in name and (len(tensor.shape) != dimensions or tensor.shape[0] != experts):
            raise CheckpointError(
                f"{file.path}: {name} has shape {list(tensor.shape)}, but {arch}.expert_count is {experts}; convert "
                "the model again"
            )
    return experts, metadata.integer(f"{arch}.expert_used_count")


def _inner_size(file: GgufModel, metadata: GGUFMetadata, key: str, down: str) -> int:
    """An expert's intermediate size: from the key, else from its matrices, since early files lack the key."""
    found = next((tensor.shape[-1] for name, tensor in file.tensors.items() if f".{down}." in name), None)
    return metadata.integer(key, found)


def _refuse_softmax(metadata: GGUFMetadata, arch: str) -> None:
    if metadata.integer(f"{arch}.expert_gating_func", 0) != _SIGMOID:
        raise UnsupportedError(
            f"{metadata.path} is a model like DeepSeek-V2, whose experts are chosen by softmax; forerun runs "
            f"{arch} files of DeepSeek-V3's kind (expert_gating_func 2, sigmoid); load this one from its safetensors"
        )


def _groups(metadata: GGUFMetadata, experts: int, arch: str) -> tuple[int, int]:
    """The number of groups of experts, and how many of them a row may use."""
    if f"{arch}.expert_group_count" in metadata:
        groups, used = (metadata.integer(f"{arch}.expert_group_{key}") for key in ("count", "used_count"))
        return groups, used
    known = _GROUPS.get((metadata.integer(f"{arch}.block_count"), experts))
    if known is None:
        raise UnsupportedError(
            f"{metadata.path} does not say in how many groups its {experts} experts are "
            f"({arch}.expert_group_count); convert the model again with a current llama.cpp"
        )
    return known
