"""Qwen2 and Qwen2.5: biases on q, k and v; optionally a sliding window in the later layers.

Qwen2.5-1M within the positions where its dual chunk attention is the ordinary one.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.models.family import Biases, Family
from forerun.models.fields import Fields, words
from forerun.models.layer_types import read_layer_types

WINDOW_FIELDS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"})
DUAL_CHUNKS = "dual_chunk_attention_config"
CHUNK_FIELDS = words("chunk_size local_size original_max_position_embeddings sparse_attention_enabled")


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=True)


def qwen_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The window of every layer: from `layer_types`, else for layers from `max_window_layers` on."""
    used = fields.flag("use_sliding_window")
    window = fields.integer("sliding_window", default=0, minimum=0) if used else 0
    types = read_layer_types(fields, num_layers)
    if types is None:
        first = fields.integer("max_window_layers", default=0, minimum=0)
        return tuple(window if index >= first else 0 for index in range(num_layers))
    if "sliding_attention" in types and not used:
        raise UnsupportedError(
            "config.json: layer_types asks for sliding_attention but use_sliding_window is false; make them agree"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _position_limit(fields: Fields) -> int:
    """Within the first chunk positions are their own, and scores grow beyond the original context only (2402.17463)."""
    if not fields.given(DUAL_CHUNKS):
        return 0
    chunks = fields.section(DUAL_CHUNKS, CHUNK_FIELDS)
    chunks.expect("sparse_attention_enabled", False)
    size = chunks.integer("chunk_size")
    first = size - chunks.integer("local_size", minimum=0, maximum=size - 1)
    return min(first, chunks.integer("original_max_position_embeddings", default=size))


QWEN_DEFAULTS = {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

QWEN2 = Family(
    model_type="qwen2",
    defaults=QWEN_DEFAULTS,
    fields=WINDOW_FIELDS | {DUAL_CHUNKS},
    biases=_biases,
    windows=qwen_windows,
    position_limit=_position_limit,
)
