"""Which layers of a decoder have a sliding window, where config.json says it by types of layers.

Knows: the fields `layer_types` and `sliding_window`. Does not know: families.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.models.fields import Fields, what_is_wrong

LAYER_TYPES = ("full_attention", "sliding_attention")
TYPE_FIELDS = frozenset({"layer_types", "sliding_window", "sliding_window_pattern"})


def read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """`layer_types`, None if absent; raises UnsupportedError for other types or another number of them."""
    types = fields.texts("layer_types")
    wrong = None if types is None else what_is_wrong(types, LAYER_TYPES, num_layers)
    if wrong is not None:
        raise UnsupportedError(
            f"config.json: layer_types must name {num_layers} layers, each one of {', '.join(LAYER_TYPES)}; got {wrong}"
        )
    return types


def read_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The window of every layer: where `layer_types` says so, else in all but each `sliding_window_pattern`-th."""
    window = fields.integer("sliding_window", default=0, minimum=0)
    types = read_layer_types(fields, num_layers)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    pattern = fields.integer("sliding_window_pattern") if window else 1
    return tuple(window if (index + 1) % pattern else 0 for index in range(num_layers))
