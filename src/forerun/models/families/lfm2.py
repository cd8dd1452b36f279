"""LFM2: short convolutions between gates, and some layers of attention; dense or with experts behind the first layers.

Source: transformers modeling_lfm2.py and modeling_lfm2_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import ExpertNames, Family, TensorNames, intermediate_size
from forerun.models.fields import Fields, words
from forerun.models.recurrent_dims import MAX_TAPS, ConvDims, layers_of

LAYER_KINDS = ("conv", "full_attention")
CONV_FIELDS = words("conv_bias conv_L_cache layer_types full_attn_idxs")
BLOCK_FIELDS = words("block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of")
# How weights began, and what transformers does not read either.
OTHER_FIELDS = words(
    "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
    "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc theta"
)
EXPERT_FIELDS = words(
    "num_experts num_experts_per_tok moe_intermediate_size num_dense_layers norm_topk_prob routed_scaling_factor "
    "use_expert_bias"
)


def _respelled(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`tie_embedding` is the older name of tie_word_embeddings and counts where a file has both."""
    tied = raw.get("tie_embedding", raw.get("tie_word_embeddings", True))
    return {**{name: value for name, value in raw.items() if name != "tie_embedding"}, "tie_word_embeddings": tied}


def _convolutions(fields: Fields, num_layers: int) -> ConvDims:
    fields.expect("hidden_act", "silu")
    fields.expect("conv_bias", False)
    kinds = fields.texts("layer_types")
    if kinds is None:
        attending = set(fields.integers("full_attn_idxs") or range(num_layers))
        kinds = tuple(LAYER_KINDS[layer in attending] for layer in range(num_layers))
    taps = fields.integer("conv_L_cache", minimum=2, maximum=MAX_TAPS)
    return ConvDims(taps=taps, layers=layers_of(kinds, *LAYER_KINDS, num_layers))


def _ffn_size(fields: Fields) -> int:
    """The stated size or, as the published ones ask for, two thirds of it times a factor, rounded up to a multiple."""
    stated = fields.integer("block_ff_dim") if fields.given("block_ff_dim") else intermediate_size(fields)
    if not fields.flag("block_auto_adjust_ff_dim"):
        return stated
    multiple = fields.integer("block_multiple_of")
    wanted = int(fields.number("block_ffn_dim_multiplier") * int(2 * stated / 3))
    return -(-wanted // multiple) * multiple


def _experts(fields: Fields) -> ExpertsShape:
    num_experts = fields.integer("num_experts", maximum=MAX_EXPERTS)
    return ExpertsShape(
        routing=Routing(
            num_experts,
            fields.integer("num_experts_per_tok", maximum=num_experts),
            sigmoid=True,
            normalize=fields.flag("norm_topk_prob"),
            scale=fields.number("routed_scaling_factor"),
            smallest_sum=1e-6,
        ),
        ffn_size=fields.integer("moe_intermediate_size"),
        correction=fields.flag("use_expert_bias"),
        first=fields.integer("num_dense_layers", minimum=0),
    )


LFM2 = Family(
    model_type="lfm2",
    defaults={
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
    fields=CONV_FIELDS | BLOCK_FIELDS | OTHER_FIELDS,
    names=TensorNames(
        final_norm="model.embedding_norm",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        out="self_attn.out_proj",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        experts=ExpertNames(
            expert="feed_forward.experts.{index}",
            gate_up=("w1", "w3"),
            down="w2",
            router="feed_forward.gate",
            correction="feed_forward.expert_bias",
            stacked="feed_forward.experts",
        ),
    ),
    qk_norm="head",
    norm_eps="norm_eps",
    respelled=_respelled,
    ffn_size=_ffn_size,
    recurrent=_convolutions,
)
LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    defaults={
        **LFM2.defaults,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    fields=CONV_FIELDS | EXPERT_FIELDS | TRAINING_FIELDS,
    ffn_size=intermediate_size,
    experts=_experts,
)
