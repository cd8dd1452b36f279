"""Llama 1 to 3, SmolLM, and everything else published as `model_type: llama`."""

from __future__ import annotations

from forerun.models.family import Biases, Family
from forerun.models.fields import Fields


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention, mlp=fields.flag("mlp_bias"))


LLAMA = Family(
    model_type="llama",
    defaults={"rms_norm_eps": 1e-6},
    fields=frozenset({"attention_bias", "mlp_bias"}),
    biases=_biases,
)
