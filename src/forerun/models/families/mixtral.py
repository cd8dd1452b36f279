"""Mixtral: Mistral with a mixture of experts in every layer, of which a row gets the best two by softmax."""

from __future__ import annotations

from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape
from forerun.models.family import ExpertNames, Family, TensorNames
from forerun.models.fields import Fields

MAX_EXPERTS = 4096  # an absurd value must not become an absurd allocation
TRAINING_FIELDS = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return (fields.integer("sliding_window", default=0, minimum=0),) * num_layers


def _experts(fields: Fields) -> ExpertsShape:
    num_experts = fields.integer("num_local_experts", maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    return ExpertsShape(routing=Routing(num_experts, top_k), ffn_size=fields.integer("intermediate_size"))


MIXTRAL = Family(
    model_type="mixtral",
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    fields=TRAINING_FIELDS | {"sliding_window", "num_local_experts", "num_experts_per_tok"},
    names=TensorNames(
        experts=ExpertNames(
            expert="block_sparse_moe.experts.{index}",
            gate_up=("w1", "w3"),
            down="w2",
            router="block_sparse_moe.gate",
            stacked="block_sparse_moe.experts",
        )
    ),
    windows=_windows,
    experts=_experts,
)
