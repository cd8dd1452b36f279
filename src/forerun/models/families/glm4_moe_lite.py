"""GLM-4.7-Flash: DeepSeek-V3's layers, of other sizes. Source: transformers modeling_glm4_moe_lite.py."""

from __future__ import annotations

from dataclasses import replace

from forerun.models.families.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    defaults={
        **DEEPSEEK_V3.defaults,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 20,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
    },
    fields=DEEPSEEK_V3.fields | {"mlp_layer_types"},
)
