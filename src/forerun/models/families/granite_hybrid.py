"""Granite 4 hybrid: Granite's multipliers, Mamba-2 in most layers, as a rule no rope; dense or with experts.

Source: transformers modeling_granitemoehybrid.py.
"""

from __future__ import annotations

from math import inf
from typing import Any

from forerun.errors import CheckpointError
from forerun.kernels.ops import Routing
from forerun.layers.rotary import RopeSpec
from forerun.models.blocks import ExpertsShape
from forerun.models.families.granite import SCALE_FIELDS, granite_scales
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import UNROTATED, Biases, ExpertNames, Family, TensorNames, intermediate_size
from forerun.models.fields import Fields, words
from forerun.models.recurrent_dims import MAX_TAPS, MambaDims, layers_of, mamba_heads

LAYER_KINDS = ("mamba", "attention")
NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # as transformers 5 writes them
MAMBA_FIELDS = words(
    "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_conv_bias "
    "mamba_proj_bias mamba_chunk_size time_step_limit time_step_min time_step_max time_step_floor"
)
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
NO_LIMITS = ([0.0, {"__float__": "Infinity"}], [0.0, 1e30])  # as transformers 5 and NVIDIA write infinity
EXPERT_FIELDS = words("num_local_experts num_experts_per_tok shared_intermediate_size")
OTHER_FIELDS = words("attention_bias layer_types position_embedding_type normalization_function init_method")


def expect_all_steps(fields: Fields) -> None:
    """Raises UnsupportedError if steps of Mamba-2 are limited; time_step_min and the like say how training began."""
    if fields.get("time_step_limit") not in NO_LIMITS:
        fields.expect("time_step_limit", [0.0, inf])


def mamba_dims(fields: Fields, layers: frozenset[int], size: int = 0, **others: Any) -> MambaDims:
    """Mamba-2 as Granite and Falcon spell it; `size` entries of all heads, 0: as `mamba_expand` says."""
    fields.expect("hidden_act", "silu")  # the convolution's, too
    fields.expect("mamba_proj_bias", False)
    expect_all_steps(fields)
    size = size or fields.integer("mamba_expand") * fields.integer("hidden_size")
    num_heads = fields.integer("mamba_n_heads")
    head_dim = size // num_heads if fields.get("mamba_d_head") == "auto" else fields.integer("mamba_d_head")
    if num_heads * head_dim != size:
        raise CheckpointError(
            f"config.json: {num_heads} heads (mamba_n_heads) of {head_dim} entries (mamba_d_head) are not the {size} "
            "that the other fields ask for; correct the file"
        )
    return MambaDims(
        heads=mamba_heads(num_heads, head_dim, fields.integer("mamba_n_groups"), fields.integer("mamba_d_state")),
        taps=fields.integer("mamba_d_conv", minimum=2, maximum=MAX_TAPS),
        layers=layers,
        conv_bias=fields.flag("mamba_conv_bias"),
        **others,
    )


def _mamba(fields: Fields, num_layers: int) -> MambaDims:
    fields.expect("normalization_function", "rmsnorm")
    given = fields.texts("layer_types") or ("mamba",) * num_layers
    kinds = tuple(NEW_NAMES.get(kind, kind) for kind in given)
    return mamba_dims(fields, layers_of(kinds, *LAYER_KINDS, num_layers))


def _ropes(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    kind = fields.text("position_embedding_type", default="nope")
    if kind != "nope":
        fields.expect("position_embedding_type", "rope")
    return (UNROTATED if kind == "nope" else rope,) * len(windows)


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def _ffn_size(fields: Fields) -> int:
    return fields.integer("shared_intermediate_size")


def _experts(fields: Fields) -> ExpertsShape | None:
    num_experts = fields.integer("num_local_experts", minimum=0, maximum=MAX_EXPERTS)
    if not num_experts:
        return None
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    shared = _ffn_size(fields)
    return ExpertsShape(routing=Routing(num_experts, top_k), ffn_size=intermediate_size(fields), shared_size=shared)


GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    defaults={
        **MAMBA_DEFAULTS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    fields=SCALE_FIELDS | MAMBA_FIELDS | EXPERT_FIELDS | OTHER_FIELDS | TRAINING_FIELDS,
    names=TensorNames(
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        experts=ExpertNames(
            gate_up=("input_linear",),
            down="output_linear",
            router="block_sparse_moe.router.layer",
            shared="shared_mlp",
            stacked="block_sparse_moe",
            stacked_gate_up=("input_linear.weight",),
            stacked_down="output_linear.weight",
        ),
    ),
    ffn_size=_ffn_size,
    biases=_biases,
    scales=granite_scales,
    ropes=_ropes,
    experts=_experts,
    recurrent=_mamba,
)
