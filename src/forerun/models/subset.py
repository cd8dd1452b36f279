"""A decoder made of some of another one's layers.

Knows: how to leave layers out. Does not know: which, or why. Nothing is copied: embedding, layers, norms and output
layer are the same objects, and the state after the last layer kept goes through the final norm and the output layer
as if it were that of the whole model (early exit; LayerSkip, arXiv 2404.16710, section 3.3, where the layers kept
are the first ones; any others: Draft & Verify, arXiv 2309.08168).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from forerun.errors import ConfigError
from forerun.models.decoder import Decoder


def subset_decoder(model: Decoder, layers: Sequence[int]) -> Decoder:
    """The decoder of `layers`, ascending; its kv_specs are those of these layers.

    Raises ConfigError for layers that do not exist, are out of order, or are all or none of them.
    """
    num_layers = len(model.parts.layers)
    is_ascending = all(a < b for a, b in pairwise(layers))
    if not layers or len(layers) >= num_layers or not is_ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(
            f"the layers to draft with must be some of 0 to {num_layers - 1}, ascending and not all of them; got "
            f"{', '.join(map(str, layers)) or 'none'}"
        )
    parts = replace(model.parts, layers=tuple(model.parts.layers[index] for index in layers))
    return Decoder(parts, model.max_position, model.kv_specs[0].dtype)
