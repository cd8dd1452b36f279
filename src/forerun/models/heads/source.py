"""The tensors of a draft head, wherever it is.

Knows: how a head is named. Does not know: what its tensors are for.
"""

from __future__ import annotations

from pathlib import Path

from forerun.weights.checkpoint import Checkpoint
from forerun.weights.resolve import resolve_model


def open_head(name_or_folder: str | Path) -> Checkpoint:
    """The tensors of a head given by embedded name, folder or hub id.

    Raises ModelNotFoundError, CheckpointError or UnsupportedError naming what was looked for.
    """
    return Checkpoint.open(resolve_model(name_or_folder))
