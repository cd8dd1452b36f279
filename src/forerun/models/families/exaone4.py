"""EXAONE 4: norms behind attention and feed-forward part only; if there are windows, only layers with one rotate.

Source: transformers modeling_exaone4.py.
"""

from __future__ import annotations

from forerun.layers.rotary import RopeSpec
from forerun.models.families.olmo2 import OLMO2
from forerun.models.family import Family, one_rope, rope_in_windows
from forerun.models.fields import Fields
from forerun.models.layer_types import TYPE_FIELDS, read_windows


def _ropes(fields: Fields, rope: RopeSpec, windows: tuple[int, ...]) -> tuple[RopeSpec, ...]:
    hybrid = fields.get("sliding_window") is not None
    return (rope_in_windows if hybrid else one_rope)(fields, rope, windows)


EXAONE4 = Family(
    model_type="exaone4",
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
    fields=TYPE_FIELDS,
    names=OLMO2.names,
    qk_norm="head",
    windows=read_windows,
    ropes=_ropes,
)
