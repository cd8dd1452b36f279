"""Qwen3: an RMS norm over each query and key head, no qkv bias unless asked for, windows as in Qwen2."""

from __future__ import annotations

from forerun.models.families.qwen2 import QWEN_DEFAULTS, WINDOW_FIELDS, qwen_windows
from forerun.models.family import Biases, Family
from forerun.models.fields import Fields


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


QWEN3 = Family(
    model_type="qwen3",
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    fields=WINDOW_FIELDS | {"attention_bias"},
    qk_norm="head",
    biases=_biases,
    windows=qwen_windows,
)
