"""gpt-oss: attention with sinks and biases, every second layer in a window; experts with a clipped gate and biases.

Experts come as MXFP4 blocks, as they are published, or as floats. Source: transformers modeling_gpt_oss.py.
"""

from __future__ import annotations

from forerun.kernels.ops import Routing
from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import MAX_EXPERTS, TRAINING_FIELDS
from forerun.models.family import Biases, ExpertNames, Family, TensorNames
from forerun.models.fields import Fields, words
from forerun.models.layer_types import read_windows

OWN_FIELDS = words(
    "sliding_window layer_types attention_bias num_local_experts num_experts_per_tok experts_per_token swiglu_limit "
    "swiglu_alpha initial_context_length"
)
ONLY = {"hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # of the clipped gate
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", default=True)
    return Biases(qkv=attention, out=attention)


def _experts(fields: Fields) -> ExpertsShape:
    for name, value in ONLY.items():
        fields.expect(name, value)
    num_experts = fields.integer("num_local_experts", maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok", maximum=num_experts)
    fields.expect("experts_per_token", top_k)
    return ExpertsShape(routing=Routing(num_experts, top_k), ffn_size=fields.integer("intermediate_size"), biases=True)


GPT_OSS = Family(
    model_type="gpt_oss",
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": YARN,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    fields=TRAINING_FIELDS | OWN_FIELDS,
    names=TensorNames(experts=ExpertNames(router="mlp.router", is_transposed=True, is_interleaved=True)),
    sinks=True,
    gate="clipped_swiglu",
    biases=_biases,
    windows=read_windows,
    experts=_experts,
)
