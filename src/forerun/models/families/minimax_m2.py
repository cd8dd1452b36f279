"""MiniMax-M2: norms over all query and all key heads of a row, partly rotated heads; experts by corrected sigmoids.

Source: transformers modeling_minimax_m2.py.
"""

from __future__ import annotations

from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import ExpertNames, Family, TensorNames
from forerun.models.fields import Fields, words

OTHER_FIELDS = words("num_mtp_modules mtp_transformer_layers use_mtp mlp_intermediate_size shared_moe_mode")
ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}


def _experts(fields: Fields) -> ExpertsShape:
    for name, value in ONLY.items():
        fields.expect(name, value)
    fields.expect("attn_type_list", [1] * fields.integer("num_hidden_layers"))
    num_experts = fields.integer("num_local_experts", maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    routing = Routing(num_experts, top_k, sigmoid=True)
    return ExpertsShape(routing=routing, ffn_size=fields.integer("intermediate_size"), correction=True)


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    fields=TRAINING_FIELDS
    | OTHER_FIELDS
    | words("num_local_experts num_experts_per_tok rotary_dim attn_type_list")
    | set(ONLY),
    names=TensorNames(
        experts=ExpertNames(
            expert="block_sparse_moe.experts.{index}",
            gate_up=("w1", "w3"),
            down="w2",
            router="block_sparse_moe.gate",
            correction="block_sparse_moe.e_score_correction_bias",
            stacked="block_sparse_moe.experts",
        )
    ),
    qk_norm="row",
    partial_rotary=True,
    experts=_experts,
)
