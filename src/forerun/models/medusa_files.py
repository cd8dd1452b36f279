"""The file of Medusa heads in a folder, or of a model they were saved with.

Knows: which file names are published and which prefixes stand before the names. Does not know: layouts of heads.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from forerun.errors import CheckpointError
from forerun.weights.checkpoint import WEIGHT_FILES, Checkpoint, has_weights, read_file, read_optional_json

OWN_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PREFIXES = ("medusa_heads.", "medusa_head.")  # of heads saved with the model they were trained in
UNPREFIXED = ("token_map", "lm_head.weight")  # what vLLM's layout may keep outside such a prefix


class HeadTensors:
    """The tensors of Medusa heads by their names without prefix, and which of them were asked for."""

    def __init__(self, path: Path, stored: Checkpoint) -> None:
        """If some names have a known prefix, tensors without it belong to another model."""
        self.path = path
        self.config = stored.config
        self._stored = stored
        self._full = _own_names(list(stored))  # name without prefix -> name in the file
        self._unread = set(self._full)

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._full)

    @property
    def unread(self) -> list[str]:
        """Names of tensors that were not read, sorted."""
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
        """Count a tensor as read that is part of the layout but not needed."""
        self._unread.discard(name)

    def _found(self, name: str) -> str:
        if name not in self._full:
            raise CheckpointError(f"{self.path} has no tensor {name}, which Medusa heads need; the file is incomplete")
        self._unread.discard(name)
        return self._full[name]


def holds_medusa(folder: Path) -> bool:
    """Whether a folder holds Medusa heads in a layout we read. Raises ModelError if it holds no weights."""
    if any((folder / name).is_file() for name in OWN_FILES):
        return True
    stored = Checkpoint.open(folder)
    return stored.has("blocks.0.layers.0.weight") or stored.has("0.0.linear.weight")


def open_heads(folder: Path) -> HeadTensors:
    """The heads' file in `folder`; raises CheckpointError where there is none or it is damaged."""
    for name in OWN_FILES:
        if (folder / name).exists():
            config = read_optional_json(folder / "config.json")
            return HeadTensors(folder / name, Checkpoint(folder, config, read_file(folder / name)))
    if has_weights(folder):
        return HeadTensors(folder, Checkpoint.open(folder))
    raise CheckpointError(
        f"{folder} holds no Medusa heads: looked for {', '.join((*OWN_FILES, *WEIGHT_FILES))}; give the folder the "
        "heads were saved in"
    )


def _own_names(names: list[str]) -> dict[str, str]:
    prefixed = {_without_prefix(name): name for name in names if name.startswith(PREFIXES)}
    if not prefixed:
        return {name: name for name in names}
    beside = () if "0.0.linear.weight" in prefixed else UNPREFIXED  # there the output layer is the base model's
    return {**{name: name for name in names if name in beside}, **prefixed}


def _without_prefix(name: str) -> str:
    return next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))
