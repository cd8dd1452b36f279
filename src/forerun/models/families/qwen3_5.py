"""Qwen3.5 and 3.6, the text model: Qwen3-Next's layers with projections stored apart, dense or with experts.

Source: transformers modeling_qwen3_5.py and modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import TRAINING_FIELDS
from forerun.models.families.qwen2_moe import EXPERT_FIELDS
from forerun.models.families.qwen3_next import DELTA_DEFAULTS, DELTA_FIELDS, delta_biases, delta_dims, shared_experts
from forerun.models.family import Biases, ExpertNames, Family, TensorNames
from forerun.models.fields import THROUGH_TRANSFORMERS, Fields, words

# What is always so, and the layers for drafting, which the model itself does not read.
OTHER_FIELDS = words("attn_output_gate mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings")
ONLY = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # whatever config.json says


def _biases(fields: Fields) -> Biases:
    if not fields.flag("attn_output_gate", default=True):
        raise UnsupportedError(
            "config.json: attn_output_gate is false; forerun computes qwen3_5 models with the gate only; "
            + THROUGH_TRANSFORMERS
        )
    return delta_biases(fields)


def _experts(fields: Fields) -> ExpertsShape:
    for name, value in ONLY.items():
        fields.expect(name, value)
    return shared_experts(fields)


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    defaults={**DELTA_DEFAULTS, "num_key_value_heads": 4},
    fields=DELTA_FIELDS | OTHER_FIELDS,
    qk_norm="head",
    gated_attention=True,
    norm_offset=1.0,
    partial_rotary=True,
    biases=_biases,
    recurrent=delta_dims,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    defaults={
        **DELTA_DEFAULTS,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,  # no layer is dense
    },
    fields=DELTA_FIELDS | OTHER_FIELDS | EXPERT_FIELDS | TRAINING_FIELDS | {"shared_expert_intermediate_size"},
    names=TensorNames(experts=ExpertNames(shared="mlp.shared_expert")),
    qk_norm="head",
    gated_attention=True,
    norm_offset=1.0,
    partial_rotary=True,
    biases=_biases,
    experts=_experts,
    recurrent=delta_dims,
)
