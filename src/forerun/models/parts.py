"""What several ranks ask of a model: whether it can be divided so, and what a rank has of it beside its own part.

Knows: headers, the two ways of dividing. Does not know: ranks, how a part is loaded (`loader`).
"""

from __future__ import annotations

from pathlib import Path

from forerun.errors import UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.models.build import Builder
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.family import Family
from forerun.models.loader import (
    DTYPES,
    find_family,
    gguf_family,
    open_checkpoint,
    read_config,
    tied_as_stored,
)
from forerun.models.shares import check_shares
from forerun.models.stages import divide
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.resolve import resolve_model


def check_division(name_or_path: str | Path, num_shards: int, num_stages: int) -> None:
    """Raise ModelError or ConfigError for a model that cannot be divided so. Reads headers only."""
    checkpoint, config, family = _open(resolve_model(name_or_path))
    check_shares(config, num_shards)
    divide(config, family, checkpoint, num_stages)


def load_ends(name_or_path: str | Path, kernels: Kernels, dtype: str, max_position: int) -> Decoder:
    """The whole embedding, final norm and output layer of a model, for heads beside a part of it. Raises ModelError."""
    checkpoint, config, family = _open(resolve_model(name_or_path))
    if isinstance(checkpoint, Checkpoint):
        config = tied_as_stored(config, family, checkpoint)
    return Builder(config, family, checkpoint, kernels, DTYPES[dtype], max_position).ends()


def _open(folder: Path) -> tuple[Checkpoint | GgufCheckpoint, ModelConfig, Family]:
    checkpoint, config = open_checkpoint(folder), read_config(folder)
    family = gguf_family(checkpoint) if isinstance(checkpoint, GgufCheckpoint) else find_family(checkpoint.config)
    if config is None or family is None:
        raise UnsupportedError(
            f"{folder} runs through transformers, which several ranks do not: leave tensor_parallel and "
            "pipeline_parallel at 1"
        )
    return checkpoint, config, family
