"""Granite 3: Llama with multipliers of embeddings, scores, residual additions and logits.

Source: transformers modeling_granite.py.
"""

from __future__ import annotations

from forerun.models.families.llama import LLAMA
from forerun.models.family import Family, Scales
from forerun.models.fields import Fields, words


def _scales(fields: Fields) -> Scales:
    return Scales(
        embedding=fields.number("embedding_multiplier", default=1.0),
        attention=fields.number("attention_multiplier", default=1.0),
        residual=fields.number("residual_multiplier", default=1.0),
        logits=1.0 / fields.number("logits_scaling", default=1.0, minimum=1e-6),
    )


GRANITE = Family(
    model_type="granite",
    defaults=LLAMA.defaults,
    fields=LLAMA.fields | words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling"),
    biases=LLAMA.biases,
    scales=_scales,
)
