"""Gemma 2: four norms a layer, weights of norms stored less 1, soft caps, a sliding window in every second layer.

Source: Gemma 2 (2408.00118) and transformers modeling_gemma2.py.
"""

from __future__ import annotations

import torch

from forerun.models.family import Biases, Family, Scales, TensorNames
from forerun.models.fields import Fields, words
from forerun.models.layer_types import TYPE_FIELDS, read_windows

_ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GEMMA_FIELDS = TYPE_FIELDS | words(
    "query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping attention_bias sliding_window_size hidden_act"
)
GEMMA_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma_biases(fields: Fields) -> Biases:
    """Biases of attention, if any."""
    attention = fields.flag("attention_bias")
    return Biases(qkv=attention, out=attention)


def gemma_scales(fields: Fields) -> Scales:
    """Embeddings times sqrt(hidden_size), which the models were trained with rounded to their own precision."""
    return Scales(
        embedding=rounded_root(fields, fields.integer("hidden_size")),
        attention=fields.number("query_pre_attn_scalar", minimum=1e-6) ** -0.5,
        attention_cap=cap(fields, "attn_logit_softcapping"),
        logits_cap=cap(fields, "final_logit_softcapping"),
    )


def rounded_root(fields: Fields, size: int) -> float:
    """sqrt(size) in the precision that the model was trained in."""
    dtype = _ROUNDED.get(str(fields.get("dtype") or fields.get("torch_dtype")), torch.float32)
    return float(torch.tensor(size**0.5).to(dtype))


def cap(fields: Fields, name: str) -> float:
    """A soft cap, 0 if there is none."""
    return 0.0 if fields.get(name) is None else fields.number(name, minimum=1e-3)


GEMMA2 = Family(
    model_type="gemma2",
    defaults={
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fields=GEMMA_FIELDS,
    names=GEMMA_NAMES,
    norm_offset=1.0,
    activation="hidden_activation",
    biases=gemma_biases,
    windows=read_windows,
    scales=gemma_scales,
)
