"""Gemma 3 (text): Gemma 2 without soft caps; norms of query and key heads; five layers of six have a window, with a
rope of their own.

Source: Gemma 3 (2503.19786) and transformers modeling_gemma3.py.
"""

from __future__ import annotations

from forerun.models.families.gemma2 import GEMMA_FIELDS, GEMMA_NAMES, gemma_biases, gemma_scales
from forerun.models.family import Family
from forerun.models.layer_types import read_windows

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    fields=GEMMA_FIELDS - {"attn_logit_softcapping"},  # transformers leaves scores as they are
    names=GEMMA_NAMES,
    qk_norm="head",
    norm_offset=1.0,
    activation="hidden_activation",
    window_rope=True,
    counts_stretched=True,
    biases=gemma_biases,
    windows=read_windows,
    scales=gemma_scales,
)
