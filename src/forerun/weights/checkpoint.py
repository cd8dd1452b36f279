"""A model folder: its configuration and its tensors, read lazily.

Knows: the files of a Hugging Face folder and how they can be missing or damaged. Does not know: architectures,
formats of quantization, or devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.safetensors_header import TensorEntry, data_start, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INTEGER_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
TORCH_DTYPES = FLOAT_DTYPES | INTEGER_DTYPES


class Checkpoint:
    """The tensors of a model folder by name. `open` checks every header; tensor data is read when asked for."""

    def __init__(self, folder: Path, config: dict[str, Any], files: dict[str, Path], entries: dict[str, TensorEntry]):
        """Use `Checkpoint.open`."""
        self.folder = folder
        self.config = config
        self._files = files  # tensor name -> file
        self._entries = entries
        self._unread = set(entries)

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Read config.json and all tensor headers; raises CheckpointError or UnsupportedError naming the file."""
        config = read_json(folder / "config.json")
        files, entries = _read_headers(folder)
        return Checkpoint(folder, config, files, entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @property
    def unread(self) -> list[str]:
        """Names of the tensors nobody asked for so far, sorted."""
        return sorted(self._unread)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """A floating tensor's dtype, without reading it; raises UnsupportedError for any other."""
        stored = self._entry(name).dtype
        if stored not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"tensor {name} of {self._files[name]} is stored as {stored}; supported are "
                f"{', '.join(FLOAT_DTYPES)}; convert the checkpoint"
            )
        return FLOAT_DTYPES[stored]

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a floating tensor in its stored precision; raises CheckpointError if missing or not of `shape`."""
        self.dtype(name)
        return self._read_shaped(name, shape)

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a tensor of whole numbers in their stored width; raises CheckpointError likewise."""
        stored = self._entry(name).dtype
        if stored not in INTEGER_DTYPES:
            raise CheckpointError(
                f"tensor {name} of {self._files[name]} is stored as {stored}, not as integers "
                f"({', '.join(INTEGER_DTYPES)}); weights and config.json do not belong together"
            )
        return self._read_shaped(name, shape)

    def _read_shaped(self, name: str, shape: Sequence[int] | None) -> Tensor:
        entry = self._entry(name)
        if shape is not None and entry.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} of {self._files[name]} has shape {list(entry.shape)}, config.json asks for "
                f"{list(shape)}; weights and config.json do not belong together"
            )
        return self._read(name)

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}, which config.json asks for; the checkpoint is incomplete or "
                "of another family"
            )
        return self._entries[name]

    def _read(self, name: str) -> Tensor:
        path, entry = self._files[name], self._entry(name)
        try:
            raw = read_bytes(path, entry)  # [nbytes] uint8
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {name} of {path}: {error}") from error
        self._unread.discard(name)
        return raw.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def read_bytes(path: Path, entry: TensorEntry) -> Tensor:
    """A tensor's bytes in memory of their own -> [nbytes] uint8.

    Read, not mapped: a mapped file counts as memory of the process for as long as any tensor of it lives.
    """
    raw = torch.empty(entry.nbytes, dtype=torch.uint8)
    view = raw.numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(data_start(file) + entry.begin)
        while view:
            num_read = file.readinto(view)
            if not num_read:
                raise OSError("the file ends inside it")
            view = view[num_read:]
    return raw


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}; a model folder needs one") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; copy the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}; copy the file again")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """The same, {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def has_weights(folder: Path) -> bool:
    """Whether the folder holds safetensors in a layout `Checkpoint` reads."""
    return (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()


def _read_headers(folder: Path) -> tuple[dict[str, Path], dict[str, TensorEntry]]:
    if (folder / INDEX_FILE).exists():
        return _read_shards(folder)
    path = folder / SINGLE_FILE
    if not path.exists():
        raise _no_weights(folder)
    entries = read_header(path)
    return dict.fromkeys(entries, path), entries


def _no_weights(folder: Path) -> CheckpointError:
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".gguf", ".safetensors"))
    return CheckpointError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        + (f" (found {', '.join(others[:5])})" if others else "")
        + "; save the model as safetensors, e.g. with transformers' save_pretrained, or give the path of a .gguf file"
    )


def _read_shards(folder: Path) -> tuple[dict[str, Path], dict[str, TensorEntry]]:
    weight_map = _weight_map(folder)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight files named in {INDEX_FILE}: "
            f"{', '.join(missing[:5])}; download or copy them"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{folder / shard} lacks tensor {name}, which {INDEX_FILE} says it holds; the files do not belong "
                "together: download them again"
            )
    files = {name: folder / shard for name, shard in weight_map.items()}
    return files, {name: headers[shard][name] for name, shard in weight_map.items()}


def _weight_map(folder: Path) -> dict[str, str]:
    table = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map; copy the file again")
    for name, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{folder / INDEX_FILE} maps {name} to {shard!r}, which is not a file name")
    return table
