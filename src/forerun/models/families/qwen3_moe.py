"""Qwen3-MoE: Qwen3 with mixtures of experts by softmax; one window for all layers, if any."""

from __future__ import annotations

from forerun.models.blocks import ExpertsShape
from forerun.models.families.mixtral import TRAINING_FIELDS
from forerun.models.families.qwen2 import QWEN_DEFAULTS
from forerun.models.families.qwen2_moe import EXPERT_DEFAULTS, EXPERT_FIELDS, qwen_experts
from forerun.models.family import Biases, Family
from forerun.models.fields import Fields

# transformers gives every layer the same window and does not read max_window_layers here.
WINDOW_FIELDS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})
# What Qwen3-Coder's config.json spells out; transformers does not read it.
ONLY = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    used = fields.flag("use_sliding_window")
    return (fields.integer("sliding_window", default=0, minimum=0) if used else 0,) * num_layers


def _experts(fields: Fields) -> ExpertsShape:
    for name, value in ONLY.items():
        fields.expect(name, value)
    return qwen_experts(fields)


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    defaults={
        **QWEN_DEFAULTS,
        **EXPERT_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    fields=WINDOW_FIELDS | EXPERT_FIELDS | TRAINING_FIELDS | {"attention_bias", *ONLY},
    qk_norm="head",
    biases=_biases,
    windows=_windows,
    experts=_experts,
)
