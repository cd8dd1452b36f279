"""Ernie 4.5: Llama with rope over neighbouring pairs, dense or with experts by corrected softmax and shared ones.

Layers behind the last one (`num_nextn_predict_layers`) draft; the model itself does not read them.
Source: transformers modeling_ernie4_5.py and modeling_ernie4_5_moe.py.
"""

from __future__ import annotations

from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import Biases, ExpertNames, Family, TensorNames
from forerun.models.fields import Fields, words

FIELDS = words("use_bias use_rmsnorm")
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}
EXPERT_FIELDS = words(
    "moe_num_experts moe_k moe_num_shared_experts moe_intermediate_size moe_layer_start_index moe_layer_end_index "
    "moe_layer_interval moe_norm_min moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers"
)


def _biases(fields: Fields) -> Biases:
    fields.expect("use_bias", False)  # the output layer would have one, too
    fields.expect("use_rmsnorm", True)
    return Biases()


def _experts(fields: Fields) -> ExpertsShape:
    fields.expect("moe_gate", "topk")
    num_experts, ffn = fields.integer("moe_num_experts", maximum=MAX_EXPERTS), fields.integer("moe_intermediate_size")
    last, num_layers = fields.integer("moe_layer_end_index", minimum=-1), fields.integer("num_hidden_layers")
    return ExpertsShape(
        routing=Routing(num_experts, fields.integer("moe_k", maximum=num_experts)),
        ffn_size=ffn,
        shared_size=ffn * fields.integer("moe_num_shared_experts", minimum=0),
        correction=True,
        first=fields.integer("moe_layer_start_index", minimum=0),
        step=fields.integer("moe_layer_interval"),
        dense=frozenset() if last == -1 else frozenset(range(last + 1, num_layers)),
    )


ERNIE4_5 = Family(
    model_type="ernie4_5",
    defaults={**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    fields=FIELDS,
    interleaved_rope=True,
    biases=_biases,
)
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    fields=FIELDS | EXPERT_FIELDS | TRAINING_FIELDS,
    names=TensorNames(experts=ExpertNames(correction="mlp.moe_statics.e_score_correction_bias")),
    interleaved_rope=True,
    biases=_biases,
    experts=_experts,
)
