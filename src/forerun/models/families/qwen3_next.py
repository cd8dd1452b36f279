"""Qwen3-Next: three gated delta nets to one layer of gated attention; Qwen2-MoE's experts; norms stored less 1.

Source: transformers modeling_qwen3_next.py.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.errors import CheckpointError
from forerun.kernels.recurrent_ops import DeltaHeads
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import TRAINING_FIELDS
from forerun.models.families.qwen2_moe import EXPERT_FIELDS, qwen_experts
from forerun.models.family import Biases, DeltaNames, ExpertNames, Family, TensorNames
from forerun.models.fields import Fields, words
from forerun.models.recurrent_dims import MAX_TAPS, DeltaDims, layers_of

LAYER_KINDS = ("linear_attention", "full_attention")
DELTA_FIELDS = words(
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
    "layer_types full_attention_interval attention_bias"
)
DELTA_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}


def delta_biases(fields: Fields) -> Biases:
    """Attention has biases where `attention_bias` says so; delta nets have none."""
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def delta_dims(fields: Fields, num_layers: int) -> DeltaDims:
    """The gated delta nets; which layers these are is said by `layer_types` or `full_attention_interval`."""
    fields.expect("hidden_act", "silu")  # the convolution's, too
    num_keys, num_values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    if num_values % num_keys:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {num_values} is not a multiple of linear_num_key_heads {num_keys}; "
            "correct the file"
        )
    sizes = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    taps = fields.integer("linear_conv_kernel_dim", minimum=2, maximum=MAX_TAPS)
    return DeltaDims(
        heads=DeltaHeads(num_keys, num_values, *sizes), taps=taps, layers=_delta_layers(fields, num_layers)
    )


def _delta_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    kinds = fields.texts("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval")
        kinds = tuple(LAYER_KINDS[(layer + 1) % interval == 0] for layer in range(num_layers))
    return layers_of(kinds, *LAYER_KINDS, num_layers)


def shared_experts(fields: Fields) -> ExpertsShape:
    """Qwen's experts and one for all rows, weighed by a sigmoid of its own."""
    shared = fields.integer("shared_expert_intermediate_size")
    return replace(qwen_experts(fields), shared_size=shared, shared_gate=True)


def _experts(fields: Fields) -> ExpertsShape | None:
    return None if fields.get("num_experts") == 0 else shared_experts(fields)


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    defaults={
        **DELTA_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    fields=DELTA_FIELDS
    | EXPERT_FIELDS
    | TRAINING_FIELDS
    | words("shared_expert_intermediate_size num_nextn_predict_layers"),
    names=TensorNames(
        experts=ExpertNames(shared="mlp.shared_expert"),
        delta=DeltaNames(project=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
    ),
    qk_norm="head",
    gated_attention=True,
    norm_offset=1.0,
    partial_rotary=True,
    biases=delta_biases,
    experts=_experts,
    recurrent=delta_dims,
)
