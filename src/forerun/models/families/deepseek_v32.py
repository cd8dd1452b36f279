"""DeepSeek-V3.2 within as many positions as its indexer selects (`index_topk`), where it selects all: DeepSeek-V3.

The tensors of the indexer are not read. Source: transformers modeling_deepseek_v32.py.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.models.blocks import ExpertsShape
from forerun.models.families.deepseek_v3 import DEEPSEEK_V3, sigmoid_experts
from forerun.models.fields import Fields, words


def _experts(fields: Fields) -> ExpertsShape:
    fields.expect("layer_types", ["indexed_attention"] * fields.integer("num_hidden_layers"))
    return sigmoid_experts(fields)


DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    defaults={**DEEPSEEK_V3.defaults, "index_topk": 2048},
    fields=DEEPSEEK_V3.fields | words("index_topk index_head_dim index_n_heads layer_types mlp_layer_types"),
    names=replace(DEEPSEEK_V3.names, unread=".indexer."),
    position_limit=lambda fields: fields.integer("index_topk"),
    experts=_experts,
)
