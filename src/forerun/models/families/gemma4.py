"""Gemma 4 (text): Gemma 3's order of norms, stored whole; layers without a window have larger heads and few of them
with keys; the last layers read the keys and values of earlier ones; parts of each token for every layer; experts beside
a dense part; a factor at the end of each layer.

Source: transformers modeling_gemma4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.errors import UnsupportedError
from forerun.kernels.ops import HeadLayout, Routing
from forerun.models.blocks import ExpertsShape, LayerShape, PerLayerSizes
from forerun.models.families.gemma2 import GEMMA_NAMES, cap, gemma_biases, rounded_root
from forerun.models.families.mixtral import MAX_EXPERTS
from forerun.models.family import ExpertNames, Family, Scales
from forerun.models.fields import Fields, words
from forerun.models.layer_types import TYPE_FIELDS, read_windows

OWN_FIELDS = words(
    "final_logit_softcapping attention_bias hidden_activation global_head_dim num_global_key_value_heads "
    "attention_k_eq_v num_kv_shared_layers use_double_wide_mlp hidden_size_per_layer_input per_layer_config "
    "vocab_size_per_layer_input enable_moe_block num_experts top_k_experts moe_intermediate_size "
    "use_bidirectional_attention hidden_act"
)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """By types; the last layer never has one."""
    return (*read_windows(fields, num_layers)[:-1], 0)


def _shapes(fields: Fields, shape: LayerShape, windows: tuple[int, ...]) -> tuple[LayerShape, ...]:
    if fields.get("use_bidirectional_attention") not in (None, "vision"):  # which is said of images
        raise UnsupportedError("config.json: use_bidirectional_attention: forerun computes causal attention only")
    num_shared = fields.integer("num_kv_shared_layers", default=0, minimum=0, maximum=len(windows) - 1)
    first, ffn_size = len(windows) - num_shared, shape.ffn_size
    wide = ffn_size * (2 if fields.flag("use_double_wide_mlp") else 1)
    shapes = []
    for index, window in enumerate(windows):
        kv_layer = _last_alike(windows, first, index) if index >= first else None
        heads = _heads(fields, shape, index, window)
        is_one = fields.flag("attention_k_eq_v") and not window
        shapes.append(LayerShape(heads, ffn_size if kv_layer is None else wide, kv_layer, is_one))
    return tuple(shapes)


def _last_alike(windows: tuple[int, ...], first: int, layer: int) -> int:
    """The last layer below `first` that has a window if `layer` has one."""
    alike = [index for index in range(first) if bool(windows[index]) == bool(windows[layer])]
    if not alike:
        raise UnsupportedError(
            f"config.json: num_kv_shared_layers leaves no layer of the type of layer {layer} whose keys and values it "
            "could read; correct the file"
        )
    return alike[-1]


def _heads(fields: Fields, shape: LayerShape, layer: int, window: int) -> HeadLayout:
    """By the fields of published files, or by `per_layer_config`, which transformers writes."""
    heads = shape.heads
    given = fields.get("per_layer_config")
    if given is None:
        if window:
            return heads
        num_kv = fields.integer("num_global_key_value_heads", default=heads.num_kv)
        size = fields.integer("global_head_dim")
        return heads._replace(head_dim=size, num_kv=num_kv if fields.flag("attention_k_eq_v") else heads.num_kv)
    by_layer = _by_layer(given)
    own = None if by_layer is None else by_layer.get(layer, {})
    if not isinstance(own, Mapping) or set(own) - {"head_dim", "num_key_value_heads"} or (window and own):
        raise UnsupportedError(
            "config.json: per_layer_config may give layers without a window another head_dim and num_key_value_heads; "
            f"got {str(given)[:80]}"
        )
    own_fields = Fields(own, {}, where="config.json's per_layer_config")
    return heads._replace(
        head_dim=own_fields.integer("head_dim", default=heads.head_dim),
        num_kv=own_fields.integer("num_key_value_heads", default=heads.num_kv),
    )


def _by_layer(given: Any) -> dict[int, Any] | None:
    """By the layer's number, which transformers pads with zeros; None if it does not map numbers."""
    try:
        return {int(key): value for key, value in given.items()} if isinstance(given, Mapping) else None
    except ValueError:
        return None


def _per_layer(fields: Fields) -> PerLayerSizes | None:
    size, vocab_size = fields.integer("hidden_size_per_layer_input", minimum=0), fields.integer("vocab_size")
    if not size:
        return None
    own = fields.integer("vocab_size_per_layer_input", minimum=vocab_size)
    return PerLayerSizes(own, size)


def _experts(fields: Fields) -> ExpertsShape | None:
    if not fields.flag("enable_moe_block"):
        return None
    num_experts = fields.integer("num_experts", maximum=MAX_EXPERTS)
    top_k = fields.integer("top_k_experts", maximum=num_experts)
    ffn_size = fields.integer("moe_intermediate_size")
    return ExpertsShape(routing=Routing(num_experts, top_k), ffn_size=ffn_size, beside_dense=True)


def _scales(fields: Fields) -> Scales:
    return Scales(
        embedding=rounded_root(fields, fields.integer("hidden_size")),
        per_layer=rounded_root(fields, fields.integer("hidden_size_per_layer_input", minimum=0)),
        attention=1.0,
        logits_cap=cap(fields, "final_logit_softcapping"),
    )


GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    },
    fields=TYPE_FIELDS | OWN_FIELDS,
    names=replace(GEMMA_NAMES, scale="layer_scalar", experts=ExpertNames(router="router.proj", stacked="experts")),
    qk_norm="head",
    value_norms=True,
    activation="hidden_activation",
    window_rope=True,
    rope_kinds=("default", "proportional"),
    biases=gemma_biases,
    windows=_windows,
    scales=_scales,
    experts=_experts,
    shapes=_shapes,
    per_layer=_per_layer,
)
