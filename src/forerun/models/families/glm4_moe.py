"""GLM-4.5 to 4.7: half of each head rotated, biases on q, k and v; experts as in DeepSeek-V3.

Layers behind the last one (`num_nextn_predict_layers`) draft; the model itself does not read them.
Source: GLM-4.5 (2508.06471) and transformers modeling_glm4_moe.py.
"""

from __future__ import annotations

from forerun.models.families.deepseek_v3 import EXPERT_FIELDS, OTHER_FIELDS, sigmoid_experts
from forerun.models.family import Biases, Family
from forerun.models.fields import Fields


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias"))


GLM4_MOE = Family(
    model_type="glm4_moe",
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 1408,
    },
    fields=EXPERT_FIELDS | OTHER_FIELDS | {"attention_bias", "use_qk_norm"},
    qk_norm="head",
    qk_norm_flag="use_qk_norm",
    partial_rotary=True,
    biases=_biases,
    experts=sigmoid_experts,
)
