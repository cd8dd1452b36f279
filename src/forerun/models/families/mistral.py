"""Mistral: Llama with a sliding window in every layer (a window absent from the file means 4096, null means none)."""

from __future__ import annotations

from forerun.models.family import Family
from forerun.models.fields import Fields


def _windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    return (fields.integer("sliding_window", default=0, minimum=0),) * num_layers


MISTRAL = Family(
    model_type="mistral",
    defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    fields=frozenset({"sliding_window"}),
    windows=_windows,
)
