"""Step-3.5-Flash, and the text of Step-3.7-Flash: layers with a window have more query heads and a rope of their own; a
sigmoid weighs each head's output; experts by corrected sigmoids and a shared one, with bounded gates in some layers;
norms stored less 1.

Lists with an entry a layer go on behind the last layer, for the modules that draft (`num_nextn_predict_layers`).
Source: transformers modeling_step3p7.py and configuration_step3p7.py; the published modeling_step3p5.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.ops import ACTIVATIONS, Routing
from forerun.models.blocks import ExpertsShape, LayerShape
from forerun.models.families.mixtral import MAX_EXPERTS
from forerun.models.family import ExpertNames, Family, TensorNames, num_hidden_layers
from forerun.models.fields import Fields, what_is_wrong, words
from forerun.models.layer_types import LAYER_TYPES

OWN_FIELDS = words(
    "layer_types sliding_window attention_other_setting num_nextn_predict_layers moe_layers_enum moe_num_experts "
    "moe_top_k moe_intermediate_size share_expert_dim moe_router_scaling_factor swiglu_limits swiglu_limits_shared "
    "need_fp32_gate max_seq_len moe_layer_offset moe_every_n_layer share_expert_dims"
)
OTHER_SETTING = words("attention_type num_attention_heads num_attention_groups head_dim true_head_dim")
ONLY = {
    "attention_bias": False,
    "att_impl_type": "GQA",
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "sink": False,
}
BOUNDS = tuple(int(name.removeprefix("silu_within_")) for name in ACTIVATIONS if name.startswith("silu_within_"))


def _respelled(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ropes by the type of layers in place of a base and a share for each layer, and scaling for some types."""
    types = raw.get("layer_types")
    if not isinstance(types, list) or raw.get("rope_parameters"):
        return raw
    bases, shares = raw.get("rope_theta"), raw.get("partial_rotary_factors") or [1.0] * len(types)
    scaling, scaled = raw.get("rope_scaling") or {}, raw.get("yarn_only_types") or ("full_attention",)
    bases = bases if isinstance(bases, list) else [bases] * len(types)
    if not isinstance(shares, list) or min(len(bases), len(shares)) < len(types):
        raise CheckpointError(
            "config.json: rope_theta and partial_rotary_factors must have an entry for each one of layer_types; "
            "correct the file"
        )
    if any(raw.get("use_rope_layers") or ()):
        raise UnsupportedError("config.json: use_rope_layers: forerun rotates the heads of all layers of this family")
    ropes = dict[str, Any]()
    for kind, base, share in zip(types, bases, shares, strict=False):
        rope = {"rope_theta": base, "partial_rotary_factor": share, **(scaling if kind in scaled else {})}
        if ropes.setdefault(kind, rope) != rope:
            raise UnsupportedError(
                f"config.json: rope_theta and partial_rotary_factors differ among layers of type {kind}; supported is "
                "one rope for each type"
            )
    read = words("rope_theta partial_rotary_factors rope_scaling yarn_only_types use_rope_layers")
    return {**{name: value for name, value in raw.items() if name not in read}, "rope_parameters": ropes}


def _num_with_modules(fields: Fields) -> int:
    """Layers, those of modules that draft among them."""
    return num_hidden_layers(fields) + fields.integer("num_nextn_predict_layers", default=0, minimum=0, maximum=64)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """By types, of which there may be some for modules that draft."""
    types = fields.texts("layer_types") or ()
    possible = min(max(len(types), num_layers), _num_with_modules(fields))
    if (wrong := what_is_wrong(types, LAYER_TYPES, possible)) is not None:
        raise UnsupportedError(
            f"config.json: layer_types must name {num_layers} layers, and may go on for modules that draft, each one "
            f"of {', '.join(LAYER_TYPES)}; got {wrong}"
        )
    window = fields.integer("sliding_window", default=0, minimum=0)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _shapes(fields: Fields, shape: LayerShape, windows: tuple[int, ...]) -> tuple[LayerShape, ...]:
    fields.expect("num_key_value_heads", shape.heads.num_kv)  # the other name of num_attention_groups
    own = fields.section("attention_other_setting", OTHER_SETTING)
    own.expect("attention_type", "sliding_attention")
    for name in ("head_dim", "true_head_dim"):
        own.expect(name, shape.heads.head_dim)
    heads = shape.heads._replace(
        num_q=own.integer("num_attention_heads", default=shape.heads.num_q),
        num_kv=own.integer("num_attention_groups", default=shape.heads.num_kv),
    )
    bounds = (_bounds(fields, name, len(windows)) for name in ("swiglu_limits_shared", "swiglu_limits"))
    return tuple(
        shape._replace(heads=heads if window else shape.heads, bound=bound, experts_bound=experts_bound)
        for window, bound, experts_bound in zip(windows, *bounds, strict=True)
    )


def _bounds(fields: Fields, name: str, num_layers: int) -> tuple[int, ...]:
    """The bound of each layer; entries that are missing or null are 0, which is none."""
    given = fields.get(name) or []
    if not isinstance(given, list) or not {entry or 0 for entry in given} <= {0, *BOUNDS}:
        raise UnsupportedError(
            f"config.json: {name} is {str(given)[:80]}; supported are {', '.join(map(str, BOUNDS))}, and 0 for none"
        )
    return tuple(int(entry or 0) for entry in (given + [0] * num_layers)[:num_layers])


def _experts(fields: Fields) -> ExpertsShape:
    for name, value in ONLY.items():
        fields.expect(name, value)
    num_experts, shared = fields.integer("moe_num_experts", maximum=MAX_EXPERTS), fields.integer("share_expert_dim")
    fields.expect("share_expert_dims", shared)
    layers = frozenset(range(_num_with_modules(fields)))
    return ExpertsShape(
        routing=Routing(
            num_experts,
            fields.integer("moe_top_k", maximum=num_experts),
            sigmoid=True,
            scale=fields.number("moe_router_scaling_factor"),
        ),
        ffn_size=fields.integer("moe_intermediate_size"),
        shared_size=shared,
        correction=True,
        dense=layers - _mixtures(fields),
    )


def _mixtures(fields: Fields) -> frozenset[int]:
    """Layers with experts: those listed in a text or a list, else all but the first three."""
    if fields.get("moe_layers_enum") is None:
        return frozenset(range(3, num_hidden_layers(fields)))
    if isinstance(fields.get("moe_layers_enum"), list):
        return frozenset(fields.integers("moe_layers_enum"))
    listed = fields.text("moe_layers_enum").split(",")
    if not all(number.strip().isdecimal() for number in listed):
        raise UnsupportedError(f"config.json: moe_layers_enum must list numbers of layers; got {str(listed)[:80]}")
    return frozenset(map(int, listed))


STEP3P5 = Family(
    model_type="step3p5",
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "moe_router_scaling_factor": 1.0,
    },
    fields=OWN_FIELDS | set(ONLY),
    names=TensorNames(
        experts=ExpertNames(
            expert="moe.experts.{index}",
            router="moe.gate",
            correction="moe.router_bias",
            shared="share_expert",
            stacked="moe",
            stacked_gate_up=("gate_proj.weight", "up_proj.weight"),
            stacked_down="down_proj.weight",
        )
    ),
    qk_norm="head",
    norm_offset=1.0,
    head_gates=True,
    kv_heads="num_attention_groups",
    partial_rotary=True,
    window_rope=True,
    respelled=_respelled,
    windows=_windows,
    shapes=_shapes,
    experts=_experts,
)
