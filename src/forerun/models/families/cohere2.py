"""Command R7B and A (Cohere 2): attention and feed-forward part beside each other behind one layer norm, scaled logits;
only layers with a sliding window rotate, in neighbouring pairs.

Source: transformers modeling_cohere2.py.
"""

from __future__ import annotations

from forerun.models.family import Biases, Family, Scales, TensorNames, rope_in_windows
from forerun.models.fields import Fields, words
from forerun.models.layer_types import TYPE_FIELDS, read_windows

# What other values would mean is not computed.
ONLY = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "rotary_pct": 1.0,
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
}


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def _scales(fields: Fields) -> Scales:
    for name, value in ONLY.items():
        fields.expect(name, value)
    return Scales(logits=fields.number("logit_scale"))


COHERE2 = Family(
    model_type="cohere2",
    defaults={
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    fields=TYPE_FIELDS | words("attention_bias logit_scale layer_switch use_parallel_embedding") | frozenset(ONLY),
    names=TensorNames(mlp_norm=""),
    centered_norms=True,
    parallel=True,
    norm_eps="layer_norm_eps",
    interleaved_rope=True,
    biases=_biases,
    windows=read_windows,
    scales=_scales,
    ropes=rope_in_windows,
)
