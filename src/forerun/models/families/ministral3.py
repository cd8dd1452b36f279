"""Ministral 3: Mistral with a yarn rope, run within its original context (16,384 positions as published).

Beyond that, queries are multiplied by a number that grows with the position, which is not computed here.
Source: transformers modeling_ministral3.py.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.models.families.mistral import MISTRAL

YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "rope_theta": 1e6,
        "rope_scaling": YARN,
    },
    within_original=True,
)
