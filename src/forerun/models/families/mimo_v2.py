"""MiMo-V2-Flash: layers with a window have sinks, more heads of keys and a rope of their own; value heads are smaller
than those of keys; GLM-4.5's experts without a shared one.

One window and one shape more than there are layers is that of the module that drafts. `sliding_window_size` counts the
token itself, as in the published code and vLLM; transformers and SGLang see one token more (docs/log.md).
Source: transformers modeling_mimo_v2_flash.py; the published config.json, whose fields it does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.models.blocks import LayerShape
from forerun.models.families.deepseek_v3 import EXPERT_FIELDS, OTHER_FIELDS, sigmoid_experts
from forerun.models.family import Biases, Family, Scales, TensorNames
from forerun.models.fields import THROUGH_TRANSFORMERS, Fields, words
from forerun.models.layer_types import LAYER_TYPES, read_windows

OWN_FIELDS = words(
    "layer_types mlp_layer_types sliding_window attention_bias v_head_dim attention_value_scale "
    "swa_num_key_value_heads add_full_attention_sink_bias add_swa_attention_sink_bias moe_router_dtype"
)
ONLY = {"attention_projection_layout": "split", "hybrid_block_size": None}
MLP_TYPES = ("dense", "sparse")
SHARE = 0.334  # of each head that is rotated
BASES = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
VALUE_SCALE = 0.707  # where config.json has no such field; null is none (transformers)
SAME = {  # fields of layers with a window, and those they have to equal
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "sliding_window_size": "sliding_window",
    "attention_chunk_size": "sliding_window",
}


def _respelled(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Types of layers in place of zeros and ones, and ropes by these; fields that repeat others are left out."""
    renamed = {name: value for name, value in raw.items() if value is not None or name == "attention_value_scale"}
    if "layernorm_epsilon" in renamed:
        renamed["rms_norm_eps"] = renamed.pop("layernorm_epsilon")
    size = renamed.get("sliding_window_size")
    if isinstance(size, int) and renamed.get("sliding_window") == size + 1:  # transformers writes one more
        renamed["sliding_window"] = size
    for name, same in SAME.items():
        if renamed.pop(name, renamed.get(same)) != renamed.get(same):
            raise UnsupportedError(f"config.json: {name} is {raw[name]}, {same} {raw.get(same)}; they must be equal")
    for pattern, name, kinds in (
        ("hybrid_layer_pattern", "layer_types", LAYER_TYPES), ("moe_layer_freq", "mlp_layer_types", MLP_TYPES),
    ):  # fmt: skip
        given = renamed.pop(pattern, None)
        if given is None:
            continue
        if not isinstance(given, list) or not set(given) <= {0, 1}:
            raise UnsupportedError(f"config.json: {pattern} must hold a 0 or 1 for each layer, got {str(given)[:80]}")
        renamed[name] = [kinds[entry] for entry in given]
    return _with_ropes(renamed)


def _with_ropes(raw: dict[str, Any]) -> dict[str, Any]:
    """One for each type of layers; fields beside them say the same or are missing."""
    rope, scaling = raw.pop("rope_parameters", {}), raw.pop("rope_scaling", {})
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: rope_parameters must be an object, got {str(rope)[:80]}; correct the file")
    if scaling not in ({}, {"type": "default"}, {"rope_type": "default"}):
        raise UnsupportedError(
            f"config.json: rope_scaling is {str(scaling)[:80]}; forerun computes ropes of this family without scaling "
            f"only; {THROUGH_TRANSFORMERS}"
        )
    if any(isinstance(table, Mapping) for table in rope.values()):
        return {**_without_copies(raw, rope), "rope_parameters": rope}
    base, share = raw.pop("rope_theta", rope.get("rope_theta")), raw.pop("partial_rotary_factor", None)
    if base is None:
        raise CheckpointError("config.json lacks 'rope_theta'; copy the file again from where the model came from")
    share = rope.get("partial_rotary_factor", SHARE) if share is None else share
    same = {"rope_type": "default", "type": "default", "rope_theta": base, "partial_rotary_factor": share}
    if any(value != same.get(name) for name, value in rope.items()):
        raise UnsupportedError(f"config.json: rope_parameters {rope} differ from rope_theta and partial_rotary_factor")
    bases = {kind: raw.pop(field, base) for kind, field in BASES.items()}
    ropes = {kind: {"rope_theta": base, "partial_rotary_factor": share} for kind, base in bases.items()}
    return {**raw, "rope_parameters": ropes}


def _without_copies(raw: dict[str, Any], ropes: Mapping[str, Any]) -> dict[str, Any]:
    """Without the published fields of ropes, which transformers keeps beside those by type."""
    for kind, field in BASES.items():
        table = ropes.get(kind)
        base = table.get("rope_theta") if isinstance(table, Mapping) else None
        if raw.pop(field, base) != base:
            raise UnsupportedError(f"config.json: {field} differs from rope_parameters of {kind}, {table}")
    return raw


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return (*read_windows(fields, num_layers), fields.integer("sliding_window"))


def _shapes(fields: Fields, shape: LayerShape, windows: tuple[int, ...]) -> tuple[LayerShape, ...]:
    for name, value in ONLY.items():
        fields.expect(name, value)
    heads = shape.heads
    value_dim = fields.integer("v_head_dim", default=heads.head_dim, maximum=heads.head_dim)
    num_kv = fields.integer("swa_num_key_value_heads", default=2 * heads.num_kv)
    sinks = (fields.flag("add_full_attention_sink_bias"), fields.flag("add_swa_attention_sink_bias", default=True))
    full, own = (shape._replace(value_dim=value_dim, has_sinks=has_sinks) for has_sinks in sinks)
    own = own._replace(heads=heads._replace(num_kv=num_kv))
    return tuple(own if window else full for window in windows)


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias"))


def _scales(fields: Fields) -> Scales:
    """Of values, which is the same as of what attention gives: its output matrix has no bias."""
    return Scales(of_attention=fields.number("attention_value_scale", default=1.0))


MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": SHARE,
        "head_dim": 192,
        "v_head_dim": 128,
        "num_key_value_heads": 4,
        "sliding_window": 128,
        "attention_value_scale": VALUE_SCALE,
        "n_routed_experts": 256,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 2048,
    },
    fields=EXPERT_FIELDS | OTHER_FIELDS | OWN_FIELDS | set(ONLY),
    names=TensorNames(sinks="self_attn.attention_sink_bias"),
    sinks=True,
    partial_rotary=True,
    window_rope=True,
    respelled=_respelled,
    biases=_biases,
    windows=_windows,
    shapes=_shapes,
    scales=_scales,
    experts=sigmoid_experts,
)
