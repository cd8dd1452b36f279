"""The file of Medusa heads in a folder, safetensors or a pickle of tensors, by one interface.

Knows: which file names are published and which prefixes stand before the names. Does not know: layouts of heads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.models.memory import check_memory
from forerun.weights.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_optional_json
from forerun.weights.safetensors_header import read_header

SAFETENSORS = "medusa_lm_head.safetensors"
PICKLE = "medusa_lm_head.pt"
PREFIXES = ("medusa_heads.", "medusa_head.")  # of heads saved with the model they were trained in
UNPREFIXED = ("token_map", "lm_head.weight")  # what vLLM's layout may keep outside such a prefix


class Tensors(Protocol):
    """Tensors of a file by the names in it."""

    def tensor(self, name: str) -> Tensor:
        """A floating tensor."""

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers."""


class HeadTensors:
    """The tensors of Medusa heads by their names without prefix, and which of them were asked for."""

    def __init__(self, path: Path, config: Mapping[str, Any], stored: Tensors, names: list[str]) -> None:
        """`names`: all of the file's; where some stand behind a prefix the others belong to another model."""
        self.path = path
        self.config = config
        self._stored = stored
        self._full = _own_names(names)  # name without prefix -> name in the file
        self._unread = set(self._full)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._full)

    @property
    def unread(self) -> list[str]:
        """Names nobody asked for, sorted."""
        return sorted(self._unread)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._full

    def tensor(self, name: str) -> Tensor:
        """A floating tensor in its stored precision; raises CheckpointError if it is missing."""
        return self._stored.tensor(self._found(name))

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers, likewise."""
        return self._stored.integers(self._found(name))

    def leave(self, name: str) -> None:
        """Count a tensor as read that the layout has and nobody needs."""
        self._unread.discard(name)

    def _found(self, name: str) -> str:
        if name not in self._full:
            raise CheckpointError(f"{self.path} has no tensor {name}, which Medusa heads need; the file is incomplete")
        self._unread.discard(name)
        return self._full[name]


def open_heads(folder: Path) -> HeadTensors:
    """The heads' file in `folder`; raises CheckpointError where there is none or it is damaged."""
    config = read_optional_json(folder / "config.json")
    if (folder / SAFETENSORS).exists():
        return _open_safetensors(folder / SAFETENSORS, config)
    if (folder / PICKLE).exists():
        return _open_pickle(folder / PICKLE, config)
    if (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists():
        return _of_checkpoint(folder, Checkpoint.open(folder))
    raise CheckpointError(
        f"{folder} holds no Medusa heads: looked for {SAFETENSORS}, {PICKLE}, {SINGLE_FILE} and {INDEX_FILE}; give "
        "the folder the heads were saved in"
    )


def _open_safetensors(path: Path, config: dict[str, Any]) -> HeadTensors:
    entries = read_header(path)
    return _of_checkpoint(path, Checkpoint(path.parent, config, dict.fromkeys(entries, path), entries))


def _of_checkpoint(path: Path, checkpoint: Checkpoint) -> HeadTensors:
    return HeadTensors(path, checkpoint.config, checkpoint, list(checkpoint))


def _own_names(names: list[str]) -> dict[str, str]:
    prefixed = {_without_prefix(name): name for name in names if name.startswith(PREFIXES)}
    if not prefixed:
        return {name: name for name in names}
    beside = () if "0.0.linear.weight" in prefixed else UNPREFIXED  # there the output layer is the base model's
    return {**{name: name for name in names if name in beside}, **prefixed}


def _without_prefix(name: str) -> str:
    return next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))


class _Pickled:
    """A state dict in memory."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path = path
        self._tensors = tensors

    def tensor(self, name: str) -> Tensor:
        found = self._tensors[name]
        if found.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(
                f"tensor {name} of {self._path} is stored as {found.dtype}; supported are float32, bfloat16, float16"
            )
        return found

    def integers(self, name: str) -> Tensor:
        found = self._tensors[name]
        if found.dtype not in (torch.int64, torch.int32):
            raise CheckpointError(f"tensor {name} of {self._path} is stored as {found.dtype}, not as int32 or int64")
        return found


def _open_pickle(path: Path, config: dict[str, Any]) -> HeadTensors:
    """A file of torch.save; only tensors are unpickled, never code."""
    check_memory(path.stat().st_size, f"loading {path}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"cannot read {path}: {lines[0]}; copy the file again or save it anew") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise CheckpointError(
            f"{path} must hold a dictionary of tensors, got {type(found).__name__}; save a state dict"
        )
    return HeadTensors(path, config, _Pickled(path, found), list(found))
