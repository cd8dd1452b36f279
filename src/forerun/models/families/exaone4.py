"""EXAONE 4: norms behind attention and feed-forward part only; if there are windows, only layers with one rotate.

Source: transformers modeling_exaone4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.layers.rotary import RopeSpec
from forerun.models.families.olmo2 import OLMO2
from forerun.models.family import Family, one_rope, rope_in_windows
from forerun.models.fields import Fields
from forerun.models.layer_types import LAYER_TYPES, TYPE_FIELDS, read_windows

MAX_LAYERS = 10_000


def _respelled(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Types of layers in place of a letter for each, L with a window and G without, again and again; the last is G."""
    letters, num_layers = raw.get("sliding_window_pattern"), raw.get("num_hidden_layers")
    if not isinstance(letters, str) or not isinstance(num_layers, int) or not 0 < num_layers <= MAX_LAYERS:
        return raw
    if not letters or set(letters) - set("GL") or raw.get("layer_types") or raw.get("sliding_window", 1) is None:
        return raw
    repeated = [letters[index % len(letters)] for index in range(num_layers - 1)]
    types = [LAYER_TYPES["GL".index(letter)] for letter in (*repeated, "G")]
    return {**{name: value for name, value in raw.items() if name != "sliding_window_pattern"}, "layer_types": types}


def _ropes(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    fields.expect("reorder_qk_norm", True)  # norms behind the parts, as they are here
    hybrid = fields.get("sliding_window") is not None
    return (rope_in_windows if hybrid else one_rope)(fields, rope, windows)


EXAONE4 = Family(
    model_type="exaone4",
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    fields=TYPE_FIELDS | {"reorder_qk_norm"},
    names=OLMO2.names,
    qk_norm="head",
    respelled=_respelled,
    windows=read_windows,
    ropes=_ropes,
)
