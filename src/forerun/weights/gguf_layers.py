"""GGUF metadata that may differ from layer to layer, and whether a file has the layers it states.

Knows: a key holds one number for all layers, or a list of one for each; how tensors of layers are named. Does not know:
keys, families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_metadata import GGUFMetadata

_MAX_BLOCKS = 10_000  # an absurd value must not become an absurd allocation
_BLOCK = re.compile(r"blk\.(\d{1,9})\.(nextn\.)?")


def num_blocks(metadata: GGUFMetadata, arch: str) -> int:
    """How many layers a file has, those for drafting among them."""
    blocks = metadata.integer(f"{arch}.block_count")
    if blocks > _MAX_BLOCKS:
        raise metadata.wrong(f"{arch}.block_count", f"at most {_MAX_BLOCKS}")
    return blocks


def check_blocks(metadata: GGUFMetadata, arch: str, names: Iterable[str], num_layers: int) -> None:
    """Raise CheckpointError unless the tensors `names` are of all layers and of no block past block_count.

    Blocks behind the layers that hold a module for drafting may be there or not.
    """
    found = [match for match in map(_BLOCK.match, names) if match]
    present, modules = {int(match[1]) for match in found}, {int(match[1]) for match in found if match[2]}
    stated, key = num_blocks(metadata, arch), f"{arch}.block_count"
    missing = sorted(set(range(num_layers)) - present)
    if missing:
        raise CheckpointError(
            f"{metadata.path} has no tensors of {len(missing)} of its {num_layers} layers, e.g. blk.{missing[0]}, but "
            f"{key} is {stated}; the file is incomplete: download it again, or convert the model again"
        )
    surplus = sorted(number for number in present - modules if number >= stated)
    if surplus:
        raise CheckpointError(
            f"{metadata.path} has tensors of {len(surplus)} layers more than {key}, which is {stated}, e.g. "
            f"blk.{surplus[0]}; computing without them gives another model's text: convert the model again"
        )


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
