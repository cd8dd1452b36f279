"""GGUF metadata of dense families beyond Llama, in config.json's terms.

Knows: their keys, and what llama.cpp assumes where a file says nothing. Does not know: the fields all decoders share
(`gguf_config`).
Source: llama.cpp convert_hf_to_gguf.py and llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.errors import UnsupportedError
from forerun.weights.gguf_file import GgufModel
from forerun.weights.gguf_metadata import GGUFMetadata

Reader = Callable[[GgufModel, GGUFMetadata], dict[str, Any]]
_WIDE_GEMMAS = {46, 62}  # blocks of the 27B models, whose scores are scaled by hidden_size / heads
MISTRAL3 = "mistral3"
_PATTERN = "attention.sliding_window_pattern"  # which layers have a window; not in every file
_TYPES = ("full_attention", "sliding_attention")
_WINDOW_PATTERN = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "exaone4": 4, "cohere2": 4}  # each such layer has no window


def _window(metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    window = metadata.integer(f"{arch}.attention.sliding_window", 0)
    found = {"sliding_window": window or None, "sliding_window_pattern": _WINDOW_PATTERN[arch]}
    if metadata.get(f"{arch}.{_PATTERN}") is None:
        return found
    has_window = metadata.numbers(f"{arch}.{_PATTERN}", metadata.integer(f"{arch}.block_count"))
    return {**found, "layer_types": [_TYPES[bool(value)] for value in has_window]}


def _has_bias(file: GgufModel) -> bool:
    return "blk.0.attn_q.bias" in file.tensors


def _gemma(arch: str, metadata: GGUFMetadata) -> dict[str, Any]:
    heads = metadata.integer(f"{arch}.attention.head_count")
    size = metadata.integer(f"{arch}.embedding_length") // heads
    if metadata.integer(f"{arch}.block_count") not in _WIDE_GEMMAS:
        size = metadata.integer(f"{arch}.attention.key_length", size)
    caps = {f"{name}_logit_softcapping": metadata.get(f"{arch}.{name}_logit_softcapping") for name in ("attn", "final")}
    return {"query_pre_attn_scalar": size, **caps, **_window(metadata, arch)}


def _gemma2(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    fields = _gemma("gemma2", metadata)
    return {name: value for name, value in fields.items() if value is not None}  # the family's own values


def _gemma3(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    local = metadata.number("gemma3.rope.freq_base_swa", 10000.0)
    return {"model_type": "gemma3_text", **_gemma("gemma3", metadata), "rope_local_base_freq": local}


def _olmo2(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    bias = {"attention_bias": _has_bias(file)}
    window = _window(metadata, "olmo2")
    if not window["sliding_window"]:
        return bias
    local = metadata.number("olmo2.rope.freq_base_swa", metadata.number("olmo2.rope.freq_base", 10000.0))
    return {"model_type": "olmo3", **bias, **window, "rope_local_base_freq": local}


def _exaone4(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return _window(metadata, "exaone4")


def granite_scales(metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """The multipliers of Granite's families."""

    def number(key: str) -> float:
        return metadata.number(f"{arch}.{key}", 0.0)

    head_dim = max(metadata.integer(f"{arch}.embedding_length"), 1) / metadata.integer(f"{arch}.attention.head_count")
    return {
        "embedding_multiplier": number("embedding_scale") or 1.0,  # llama.cpp: 0 is no scale
        "residual_multiplier": number("residual_scale") or 1.0,
        "attention_multiplier": number("attention.scale") or head_dim**-0.5,
        "logits_scaling": number("logit_scale") or 1.0,
    }


def _granite(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Files of Granite 4 without recurrent layers (micro, 1b, 350m) have the keys of those with some, too."""
    if not metadata.flag("granite.rope.scaling.finetuned", True):  # llama.cpp's switch for rope
        raise UnsupportedError(
            f"{metadata.path} says that the model does not rotate (granite.rope.scaling.finetuned false); supported "
            "are files of the architecture granite that do: load the model from its safetensors"
        )
    dense_size = metadata.integer("granite.feed_forward_length")
    return {
        "attention_bias": _has_bias(file),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "intermediate_size": metadata.integer("granite.expert_shared_feed_forward_length", dense_size),
        **granite_scales(metadata, "granite"),
    }


def _smollm3(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {"attention_bias": _has_bias(file)}  # every fourth layer does not rotate


def _glm4(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {"attention_bias": _has_bias(file)}


def _cohere2(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    return {
        "attention_bias": _has_bias(file),
        "logit_scale": metadata.number("cohere2.logit_scale"),
        "layer_norm_eps": metadata.number("cohere2.attention.layer_norm_epsilon"),
        **_window(metadata, "cohere2"),
    }


def _mistral3(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Mistral Small 3 and Ministral 3; the queries of the latter grow beyond the original context of its rope."""
    grows = bool(metadata.number(f"{MISTRAL3}.attention.temperature_scale", 0.0))
    if grows and metadata.text(f"{MISTRAL3}.rope.scaling.type", "none") != "yarn":
        raise UnsupportedError(
            f"{metadata.path} sets {MISTRAL3}.attention.temperature_scale without a rope scaling of type yarn, so that "
            "it is not known from where queries grow; load the model from its safetensors"
        )
    return {"model_type": "ministral3" if grows else "mistral", "sliding_window": None}


SSM_KEYS = "ssm.conv_kernel ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count"
_GRANITE_KEYS = (  # those of recurrent layers and of shared experts mean nothing without such
    f"embedding_scale residual_scale logit_scale attention.scale expert_shared_feed_forward_length {SSM_KEYS}"
)
_GEMMA_KEYS = "attn_logit_softcapping final_logit_softcapping rope.freq_base_swa"
# Architecture -> the keys it has beyond the common ones, and what they say.
DENSE: dict[str, tuple[str, Reader]] = {
    "gemma2": (_GEMMA_KEYS, _gemma2),
    "gemma3": (_GEMMA_KEYS, _gemma3),
    "olmo2": (f"{_PATTERN} rope.freq_base_swa rope.scaling.yarn_attn_factor", _olmo2),
    "exaone4": (_PATTERN, _exaone4),
    "granite": (_GRANITE_KEYS, _granite),
    "smollm3": ("", _smollm3),
    MISTRAL3: ("attention.temperature_scale rope.scaling.yarn_log_multiplier", _mistral3),
    "glm4": ("", _glm4),
    "cohere2": ("logit_scale attention.layer_norm_epsilon", _cohere2),
}
