"""GLM-4-0414 (dense): four norms a layer, gate and up stored joined, half of each head rotated in neighbouring pairs.

Source: transformers modeling_glm4.py.
"""

from __future__ import annotations

from forerun.models.family import Biases, Family, TensorNames
from forerun.models.fields import Fields


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("attention_bias"))


GLM4 = Family(
    model_type="glm4",
    defaults={
        "rms_norm_eps": 1.5625e-7,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    fields=frozenset({"attention_bias"}),
    names=TensorNames(
        after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm", gate_up=("mlp.gate_up_proj",)
    ),
    partial_rotary=True,
    interleaved_rope=True,
    biases=_biases,
)
