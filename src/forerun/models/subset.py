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
from forerun.models.hybrid import HybridDecoder


def subset_decoder(model: Decoder, layers: Sequence[int]) -> Decoder:
    """The decoder of `layers`, ascending; its kv_specs are those of these layers.

    Raises ConfigError for layers that do not exist, are out of order, or are all or none of them, and for those that
    read the keys and values of one left out.
    """
    num_layers = len(model.parts.layers)
    is_ascending = all(a < b for a, b in pairwise(layers))
    if not layers or len(layers) >= num_layers or not is_ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(
            f"the layers to draft with must be some of 0 to {num_layers - 1}, ascending and not all of them; got "
            f"{', '.join(map(str, layers)) or 'none'}"
        )
    missing = lent_layers(model) - set(layers)
    lost = {model.kv_places[index] for index in missing}
    if any(model.kv_places[index] in lost for index in layers):
        raise ConfigError(
            f"some of the layers {', '.join(map(str, layers))} read the keys and values of a layer that is not among "
            f"them; keep {', '.join(map(str, sorted(lent_layers(model))))}, too"
        )
    parts = replace(model.parts, layers=tuple(model.parts.layers[index] for index in layers))
    is_hybrid = any(layer.recurrent is not None for layer in parts.layers)
    return (HybridDecoder if is_hybrid else Decoder)(parts, model.max_position, model.kv_specs[0].dtype)


def lent_layers(model: Decoder) -> frozenset[int]:
    """The layers whose keys and values other layers read."""
    layers = model.parts.layers
    readers = {place for layer, place in zip(layers, model.kv_places, strict=True) if not layer.stores}
    pairs = enumerate(zip(layers, model.kv_places, strict=True))
    return frozenset(index for index, (layer, place) in pairs if layer.stores and place in readers - {None})
