"""A model folder: its configuration and its tensors, read lazily.

Knows: the files of a Hugging Face folder (safetensors, or the older .bin files of torch.save) and how they can be
missing or damaged. Does not know: architectures, quantization formats, or devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.safetensors_header import TensorEntry, data_start, read_header
from forerun.weights.torch_file import read_torch_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
MODELOPT_FILE = "hf_quant_config.json"
INDEX_FILES = (INDEX_FILE, TORCH_INDEX_FILE)
_LAYOUTS = ((INDEX_FILE, SINGLE_FILE), (TORCH_INDEX_FILE, TORCH_FILE))  # the first one present is used
WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, TORCH_FILE, TORCH_INDEX_FILE)
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INTEGER_DTYPES = {"I8": torch.int8, "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
SMALL_FLOAT_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
TORCH_DTYPES = FLOAT_DTYPES | INTEGER_DTYPES | SMALL_FLOAT_DTYPES
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


# What text parts of multimodal models put before a name, and what a model of text alone does.
_TEXT_PARTS = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
    ("model.layers.", "model.layers."),  # in Step 3.7, and in adapters that were trained on the text part alone
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.norm.", "model.norm."),
)


class StoredTensor(NamedTuple):
    """One tensor of a file, and how to read it."""

    file: Path
    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[..., Tensor]  # into newly allocated memory, flattened; of the entries first .. end, if given


class Checkpoint:
    """The tensors of a model folder by name. `open` checks every header; tensor data is read when asked for."""

    def __init__(self, folder: Path, config: dict[str, Any], tensors: Mapping[str, StoredTensor]):
        """Use `Checkpoint.open`; call this only with tensors that `read_file` found in a file of another name."""
        self.folder = folder
        self.config = config
        self._tensors = tensors
        self._unread = set(tensors)

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Read config.json and all tensor headers; raises CheckpointError or UnsupportedError naming the file."""
        config = read_model_config(folder)
        return Checkpoint(folder, config, _read_folder(folder))

    def text_part(self, config: dict[str, Any]) -> Checkpoint:
        """The tensors of a multimodal model's text part, named as in a model of text alone; `config` describes it."""
        named = ((text_name(name), tensor) for name, tensor in self._tensors.items())
        return Checkpoint(self.folder, config, {name: tensor for name, tensor in named if name is not None})

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that have not been read so far, sorted."""
        return sorted(self._unread)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def files(self) -> list[Path]:
        """The files the tensors are in, sorted."""
        return sorted({tensor.file for tensor in self._tensors.values()})

    def left_over(self, names: Sequence[str], model_type: str) -> str:
        """What to say of tensors that a model of this type does not read."""
        return (
            f"{self.folder} has {len(names)} tensors that config.json of a {model_type} model does not ask for, e.g. "
            f"{', '.join(names[:3])}; weights and config.json do not belong together, or load the model through "
            'transformers, in Python: LLM(MODEL, implementation="transformers")'
        )

    def stored(self) -> Iterator[tuple[str, str, int]]:
        """Every tensor's name, the type it is stored in, such as "BF16", and its bytes."""
        return ((name, entry.dtype, entry.nbytes) for name, entry in self._tensors.items())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._entry(name).shape

    def stored_as(self, name: str) -> str:
        """The type a tensor is stored in, such as "BF16", without reading it."""
        return self._entry(name).dtype

    def dtype(self, name: str) -> torch.dtype:
        """A floating tensor's dtype, without reading it; raises UnsupportedError for any other."""
        stored = self._entry(name)
        if stored.dtype not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"tensor {name} of {stored.file} is stored as {stored.dtype}; supported are "
                f"{', '.join(FLOAT_DTYPES)}; convert the checkpoint"
            )
        return FLOAT_DTYPES[stored.dtype]

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a floating tensor in its stored precision; raises CheckpointError if missing or not of `shape`."""
        self.dtype(name)
        return self._read_shaped(name, shape)

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read an integer tensor in its stored width; raises CheckpointError if missing, or not of `shape`."""
        stored = self._entry(name)
        if stored.dtype not in INTEGER_DTYPES:
            raise CheckpointError(
                f"tensor {name} of {stored.file} is stored as {stored.dtype}, not as integers "
                f"({', '.join(INTEGER_DTYPES)}); weights and config.json do not belong together"
            )
        return self._read_shaped(name, shape)

    def raw(self, name: str) -> Tensor:
        """Read a tensor of any type as it is stored; raises CheckpointError if missing or of an unknown type."""
        stored = self._entry(name)
        if stored.dtype not in TORCH_DTYPES:
            raise CheckpointError(
                f"tensor {name} of {stored.file} is stored as {stored.dtype}; supported are {', '.join(TORCH_DTYPES)}; "
                "weights and config.json do not belong together"
            )
        return self._read_shaped(name, None)

    def rows(self, name: str, shape: tuple[int, int], row_ids: Tensor) -> Tensor:
        """Rows `row_ids` [R] int64 of a floating matrix, without reading others; raises as `tensor`."""
        self.dtype(name)
        self.check_shape(name, shape)
        width, stored, parts = shape[1], self._entry(name), list[Tensor]()
        self._unread.discard(name)
        try:
            for first, end in _runs(row_ids.tolist()):
                parts.append(stored.read(first * width, end * width))
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {name} of {stored.file}: {error}") from error
        return torch.cat([part.view(-1, width) for part in parts])

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError if the tensor is missing or not of `shape`, without reading it."""
        stored = self._entry(name)
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"tensor {name} of {stored.file} has shape {list(stored.shape)}, config.json asks for "
                f"{list(shape)}; weights and config.json do not belong together"
            )

    def _read_shaped(self, name: str, shape: Sequence[int] | None) -> Tensor:
        stored = self._entry(name)
        if shape is not None:
            self.check_shape(name, shape)
        self._unread.discard(name)
        try:
            return stored.read().view(stored.shape)
        except OSError as error:
            raise CheckpointError(f"cannot read tensor {name} of {stored.file}: {error}") from error

    def _entry(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.folder} has no tensor {name}, which config.json asks for; the checkpoint is incomplete or "
                "of another family"
            )
        return self._tensors[name]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where neighbours follow each other: the first of them, and the number after the last."""
    begun = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[begun], numbers[index - 1] + 1
            begun = index


def text_name(name: str) -> str | None:
    """What a multimodal model's tensor is called in a model of text alone; None for other parts than that of text."""
    return next((own + name.removeprefix(prefix) for prefix, own in _TEXT_PARTS if name.startswith(prefix)), None)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a .safetensors file, or of a torch.save file; raises CheckpointError naming the file."""
    if path.suffix == ".safetensors":
        return {
            name: StoredTensor(path, entry.dtype, entry.shape, entry.nbytes, partial(_read_entry, path, entry))
            for name, entry in read_header(path).items()
        }
    return {
        name: StoredTensor(
            path, _NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), tensor.nbytes,
            partial(_copied, tensor),
        )
        for name, tensor in read_torch_file(path).items()
    }  # fmt: skip


def _read_entry(path: Path, entry: TensorEntry, first: int = 0, end: int | None = None) -> Tensor:
    dtype = TORCH_DTYPES[entry.dtype]
    begin = entry.begin + first * dtype.itemsize
    part = replace(entry, begin=begin, end=entry.end if end is None else entry.begin + end * dtype.itemsize)
    return read_bytes(path, part).view(dtype)


def _copied(mapped: Tensor, first: int = 0, end: int | None = None) -> Tensor:
    return mapped.detach().reshape(-1)[first:end].clone(memory_format=torch.contiguous_format)


def read_bytes(path: Path, entry: TensorEntry) -> Tensor:
    """Copy a tensor's bytes into new memory -> [nbytes] uint8.

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
    """`read_json`, or {} if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json, and how a ModelOpt checkpoint is quantized where that stands in a file beside it."""
    blocks = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
    if blocks:
        raise CheckpointError(f"{folder} has no config.json, but GGUF files, models by themselves: give {blocks[0]}")
    config = read_json(folder / "config.json")
    beside = read_optional_json(folder / MODELOPT_FILE).get("quantization")
    if isinstance(beside, dict) and not config.get("quantization_config"):
        config["quantization_config"] = {"quant_method": "modelopt", **beside}
    return config


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights in a layout `Checkpoint` reads."""
    return any((folder / name).exists() for name in WEIGHT_FILES)


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    for index, single in _LAYOUTS:
        if (folder / index).exists() and not ((folder / single).exists() and _is_stale(folder / index)):
            return _read_shards(folder / index)
        if (folder / single).exists():
            return read_file(folder / single)
    raise _no_weights(folder)


def _is_stale(index: Path) -> bool:
    """Whether files it names are gone: transformers saves a model in one file and leaves an older index beside it."""
    return any(not (index.parent / shard).exists() for shard in set(_weight_map(index).values()))


def _no_weights(folder: Path) -> CheckpointError:
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".gguf", ".safetensors"))
    return CheckpointError(
        f"{folder} has none of {', '.join(WEIGHT_FILES)}"
        + (f" (found {', '.join(others[:5])})" if others else "")
        + "; save the model as safetensors, e.g. with transformers' save_pretrained, or give the path of a .gguf file"
    )


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    folder, weight_map = index.parent, _weight_map(index)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight files named in {index.name}: "
            f"{', '.join(missing[:5])}; download or copy them"
        )
    files = {shard: read_file(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in files[shard]:
            raise CheckpointError(
                f"{folder / shard} lacks tensor {name}, which {index.name} says it holds; the files do not belong "
                "together: download them again"
            )
    return {name: files[shard][name] for name, shard in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} has no weight_map; copy the file again")
    for name, shard in table.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index} maps {name} to {shard!r}, which is not a file name")
    return table
