"""SmolLM3: Llama in which every fourth layer does not rotate.

Source: transformers modeling_smollm3.py.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.layers.rotary import RopeSpec
from forerun.models.families.llama import LLAMA
from forerun.models.family import UNROTATED, Family
from forerun.models.fields import Fields, words
from forerun.models.layer_types import read_layer_types


def _rotates(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Of every layer."""
    interval = fields.integer("no_rope_layer_interval")
    if fields.get("no_rope_layers") is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    flags = fields.integers("no_rope_layers")
    if len(flags) < num_layers:
        raise UnsupportedError(f"config.json: no_rope_layers has {len(flags)} entries for {num_layers} layers")
    return tuple(map(bool, flags[:num_layers]))


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    window = fields.integer("sliding_window", default=0, minimum=0) if fields.flag("use_sliding_window") else 0
    types = read_layer_types(fields, num_layers)
    slides = [kind == "sliding_attention" for kind in types] if types else [not r for r in _rotates(fields, num_layers)]
    return tuple(window if each else 0 for each in slides)


def _ropes(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    return tuple(rope if rotates else UNROTATED for rotates in _rotates(fields, len(windows)))


SMOLLM3 = Family(
    model_type="smollm3",
    defaults={
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    fields=LLAMA.fields
    | words("no_rope_layers no_rope_layer_interval layer_types use_sliding_window sliding_window max_window_layers"),
    biases=LLAMA.biases,
    windows=_windows,
    ropes=_ropes,
)
