"""OLMo 2 and 3: norms behind attention and feed-forward part only, and over all query and all key heads together.

OLMo 3 has a sliding window in three layers of four, and a rope scaling, if any, in the others.
Sources: OLMo 2 (2501.00656), transformers modeling_olmo2.py and modeling_olmo3.py.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.models.family import Biases, Family, TensorNames
from forerun.models.fields import Fields
from forerun.models.layer_types import TYPE_FIELDS, read_windows


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


OLMO2 = Family(
    model_type="olmo2",
    defaults={"rms_norm_eps": 1e-5},
    fields=frozenset({"attention_bias"}),
    names=TensorNames(
        attention_norm="",
        after_attention="post_attention_layernorm",
        mlp_norm="",
        after_mlp="post_feedforward_layernorm",
    ),
    qk_norm="row",
    biases=_biases,
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    fields=OLMO2.fields | TYPE_FIELDS,
    window_rope=True,
    windows=read_windows,
)
