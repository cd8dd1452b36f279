"""The tensors of a head's folder: safetensors, or a pytorch_model.bin as the first EAGLE heads were published.

Knows: the two kinds of files. Does not know: what the tensors are for.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.checkpoint import FLOAT_DTYPES, INTEGER_DTYPES, Checkpoint, has_weights, read_json
from forerun.weights.resolve import resolve_model

BIN_FILE = "pytorch_model.bin"


class HeadSource(Protocol):
    """A `quant.base.TensorSource` that can say what it holds and what nobody asked for."""

    folder: Path

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json."""

    @property
    def unread(self) -> list[str]:
        """Names of the tensors nobody asked for so far, sorted."""

    def __iter__(self) -> Iterator[str]:
        """The names of all tensors."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a floating tensor; raises CheckpointError if it is missing or not of `shape`."""

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a tensor of whole numbers, likewise."""


class BinCheckpoint:
    """The tensors of a `pytorch_model.bin`; only tensors are unpickled, so that no code of the file's runs."""

    def __init__(self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Use `BinCheckpoint.open`."""
        self.folder = folder
        self.config = config
        self._tensors = tensors
        self._unread = set(tensors)

    @staticmethod
    def open(folder: Path) -> BinCheckpoint:
        """Read the file; raises CheckpointError naming it."""
        config, path = read_json(folder / "config.json"), folder / BIN_FILE
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"cannot read {path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}; copy it "
                "again, or save the head as safetensors"
            ) from error
        if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise CheckpointError(f"{path} is not a table of tensors by name; save the head's state_dict() instead")
        return BinCheckpoint(folder, config, loaded)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def unread(self) -> list[str]:
        """See `HeadSource`."""
        return sorted(self._unread)

    def has(self, name: str) -> bool:
        """See `HeadSource`."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See `HeadSource`."""
        return tuple(self._tensor(name).shape)

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """See `HeadSource`."""
        return self._take(name, shape, tuple(FLOAT_DTYPES.values()))

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """See `HeadSource`."""
        return self._take(name, shape, tuple(INTEGER_DTYPES.values()))

    def _take(self, name: str, shape: Sequence[int] | None, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        found = self._tensor(name)
        if found.dtype not in dtypes:
            raise UnsupportedError(
                f"tensor {name} of {self.folder / BIN_FILE} is stored as {found.dtype}; supported are "
                f"{', '.join(map(str, dtypes))}; convert the checkpoint"
            )
        if shape is not None and tuple(found.shape) != tuple(shape):
            raise CheckpointError(
                f"tensor {name} of {self.folder / BIN_FILE} has shape {list(found.shape)}, config.json and the target "
                f"ask for {list(shape)}; they do not belong together"
            )
        self._unread.discard(name)
        return found

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder / BIN_FILE} has no tensor {name}; the head's checkpoint is incomplete")
        return self._tensors[name]


def open_head(name_or_folder: str | Path) -> HeadSource:
    """The tensors of a head given by embedded name, folder or hub id.

    Raises ModelNotFoundError, CheckpointError or UnsupportedError naming what was looked for.
    """
    folder = resolve_model(name_or_folder)
    if not has_weights(folder) and (folder / BIN_FILE).exists():
        return BinCheckpoint.open(folder)
    return Checkpoint.open(folder)
