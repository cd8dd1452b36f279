"""GGUF metadata of Gemma 4, in config.json's terms.

Knows: its keys, what a file's tensors say that no key does. Does not know: the fields all decoders share
(`gguf_config`).
Source: llama.cpp conversion/gemma.py and src/models/gemma4.cpp.
"""

from __future__ import annotations

from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_file import GgufModel
from forerun.weights.gguf_layers import layer_values, num_blocks
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_mixtures import EXPERT_KEYS, expert_counts

_ARCH = "gemma4"
_PATTERN = "attention.sliding_window_pattern"
GEMMA4_KEYS = (
    f"{EXPERT_KEYS} {_PATTERN} attention.shared_kv_layers attention.key_length_swa attention.value_length_swa "
    "embedding_length_per_layer_input expert_feed_forward_length final_logit_softcapping rope.freq_base_swa "
    "rope.dimension_count_swa"
)


def gemma4_fields(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of gemma4. Heads and feed-forward parts may differ by layer; a layer without attn_v has keys as values."""
    has_window = metadata.numbers(f"{_ARCH}.{_PATTERN}", num_blocks(metadata, _ARCH))
    full = [layer for layer, value in enumerate(has_window) if not value]
    num_shared = metadata.integer(f"{_ARCH}.attention.shared_kv_layers", 0)
    return {
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention" if value else "full_attention" for value in has_window],
        "sliding_window": metadata.integer(f"{_ARCH}.attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        **_heads(metadata, has_window, full),
        **_widths(metadata, len(has_window) - num_shared),
        "attention_k_eq_v": any(_lacks_values(file, layer) for layer in full),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "final_logit_softcapping": metadata.get(f"{_ARCH}.final_logit_softcapping"),
        "rope_local_base_freq": metadata.number(f"{_ARCH}.rope.freq_base_swa", 10000.0),
        **_per_layer(file, metadata),
        **_experts(file, metadata),
    }


def _lacks_values(file: GgufModel, layer: int) -> bool:
    names = (f"blk.{layer}.attn_{part}.weight" for part in "kv")
    return [name in file.tensors for name in names] == [True, False]


def _heads(metadata: GGUFMetadata, has_window: list[Any], full: list[int]) -> dict[str, Any]:
    """Those of layers with a window, and what the others have instead."""
    counts = layer_values(metadata, _ARCH, "attention.head_count_kv")
    sizes = [metadata.integer(f"{_ARCH}.attention.{name}_length_swa") for name in ("key", "value")]
    turned = metadata.integer(f"{_ARCH}.rope.dimension_count_swa", sizes[0])
    if {*sizes, turned} != {sizes[0]}:
        raise UnsupportedError(
            f"{metadata.path}: keys of {sizes[0]} and values of {sizes[1]} entries in layers with a window, of which "
            f"{turned} are rotated; supported are heads of one size that are rotated as a whole"
        )
    in_windows = {count for count, value in zip(counts, has_window, strict=True) if value}
    if len(in_windows) > 1:
        raise metadata.wrong(f"{_ARCH}.attention.head_count_kv", "the same in all layers with a window")
    own_size = metadata.integer(f"{_ARCH}.attention.key_length")
    return {
        "head_dim": sizes[0],
        "num_key_value_heads": in_windows.pop() if in_windows else counts[0],
        "per_layer_config": {str(i): {"head_dim": own_size, "num_key_value_heads": counts[i]} for i in full},
    }


def _widths(metadata: GGUFMetadata, num_own: int) -> dict[str, Any]:
    """Layers that read others' keys and values may have feed-forward parts twice as wide."""
    widths = layer_values(metadata, _ARCH, "feed_forward_length")
    own, shared = set(widths[:num_own]), set(widths[num_own:])
    if len(own) != 1 or shared - {width * factor for width in own for factor in (1, 2)} or len(shared) > 1:
        raise UnsupportedError(
            f"{metadata.path}: {_ARCH}.feed_forward_length has several sizes; supported is one, and its double in all "
            "layers that read others' keys and values"
        )
    [width] = own
    return {"intermediate_size": width, "use_double_wide_mlp": shared == {2 * width}}


def _per_layer(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    size = metadata.integer(f"{_ARCH}.embedding_length_per_layer_input", 0)
    if not size:
        return {"hidden_size_per_layer_input": 0}
    if (table := file.tensors.get("per_layer_token_embd.weight")) is None:
        raise CheckpointError(f"{file.path} has no tensor per_layer_token_embd.weight; the file is incomplete")
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": table.shape[0]}


def _experts(file: GgufModel, metadata: GGUFMetadata) -> dict[str, Any]:
    if not metadata.get(f"{_ARCH}.expert_count"):
        return {}
    experts, used = expert_counts(file, metadata, _ARCH)
    [*sizes] = set(layer_values(metadata, _ARCH, "expert_feed_forward_length"))
    if len(sizes) != 1:
        raise metadata.wrong(f"{_ARCH}.expert_feed_forward_length", "the same in all layers")
    return {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": used,
        "moe_intermediate_size": sizes[0],
    }
