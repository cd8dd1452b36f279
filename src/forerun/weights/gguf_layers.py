"""GGUF metadata that may differ from layer to layer.

Knows: a key holds one number for all layers, or a list of one for each. Does not know: keys, families.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.weights.gguf_metadata import GGUFMetadata

_MAX_BLOCKS = 10_000  # an absurd value must not become an absurd allocation


def num_blocks(metadata: GGUFMetadata, arch: str) -> int:
    """How many layers a file has, those for drafting among them."""
    blocks = metadata.integer(f"{arch}.block_count")
    if blocks > _MAX_BLOCKS:
        raise metadata.wrong(f"{arch}.block_count", f"at most {_MAX_BLOCKS}")
    return blocks


def layer_values(metadata: GGUFMetadata, arch: str, key: str, default: int | None = None) -> list[int]:
    """A number of each layer."""
    num_layers, key = num_blocks(metadata, arch), f"{arch}.{key}"
    if isinstance(metadata.get(key), int | None):
        return [metadata.integer(key, default)] * num_layers
    values = metadata.numbers(key, num_layers)
    if not all(isinstance(value, int) and 0 <= value < 2**31 for value in values):
        raise metadata.wrong(key, "whole numbers from 0 to 2147483647")
    return values


def layer_sizes(metadata: GGUFMetadata, arch: str, key: str, default: int | None = None) -> list[int]:
    """A size of each layer, the same in all that do not have 0; raises UnsupportedError if they differ."""
    sizes = layer_values(metadata, arch, key, default)
    if len(set(sizes) - {0}) > 1:
        raise UnsupportedError(
            f"{metadata.path}: {arch}.{key} has several sizes; supported is one for all layers that have it; load the "
            "model from its safetensors through transformers"
        )
    return sizes
