"""Granite 3: Llama with multipliers of embeddings, scores, residual additions and logits.

Source: transformers modeling_granite.py.
"""

from __future__ import annotations

from forerun.models.families.llama import LLAMA
from forerun.models.family import Family, Scales
from forerun.models.fields import Fields, words

SCALE_FIELDS = words("embedding_multiplier attention_multiplier residual_multiplier logits_scaling")


def granite_scales(fields: Fields) -> Scales:
    """The multipliers, of which config.json may leave out any."""
    residual = fields.number("residual_multiplier", default=1.0)
    return Scales(
        embedding=fields.number("embedding_multiplier", default=1.0),
        attention=fields.number("attention_multiplier", default=1.0),
        of_attention=residual,
        of_mlp=residual,
        logits=1.0 / fields.number("logits_scaling", default=1.0, minimum=1e-6),
    )


GRANITE = Family(
    model_type="granite",
    defaults=LLAMA.defaults,
    fields=LLAMA.fields | SCALE_FIELDS,
    biases=LLAMA.biases,
    scales=granite_scales,
)
