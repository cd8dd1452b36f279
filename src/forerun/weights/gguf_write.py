"""Writing GGUF files, version 3: metadata, a tensor table, and tensors one after the other.

Knows: the container. Does not know: which keys or tensors a model needs, nor how blocks are made: tensors come as
bytes, each read only when it is written, so that the whole model never has to be in memory.
Source: ggml docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.weights.gguf_file import GgufTensor
from forerun.weights.gguf_types import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    TYPE_CODES,
)

_KINDS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": BOOL,
    "string": STRING, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip


class Typed(NamedTuple):
    """A metadata value whose kind is not the default for its Python type, e.g. Typed("int32", [1, 2])."""

    kind: str  # uint8 .. int64, float32, float64, bool, string
    value: Any


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """One tensor: `read` gives its bytes, rows one after the other, as uint8 in any shape."""

    name: str
    type: str  # e.g. "Q4_K"
    shape: tuple[int, ...]  # as torch has it
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor of this type and shape."""
        return GgufTensor(TENSOR_TYPES[TYPE_CODES[self.type]], self.shape, 0).nbytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorToWrite],
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a file; it appears under its name only when complete. progress(done, total) is called after every tensor.

    ints become uint32 (int64 if they do not fit), floats float32, lists arrays; `Typed` sets another type. Raises
    CheckpointError if the file cannot be written or a tensor's bytes do not match its type and shape.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(_header(metadata, tensors))
            for index, tensor in enumerate(tensors):
                _pad(file)
                _write_tensor(file, tensor)
                if progress is not None:
                    progress(index + 1, len(tensors))
            _pad(file)
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The memory of a float32, float16 or bfloat16 tensor as [bytes] uint8, for tensors that are not quantized."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _header(metadata: Mapping[str, Any], tensors: Sequence[TensorToWrite]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [_text(key) + _pair(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        _check_shape(tensor)
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        parts += [_text(tensor.name), sizes, struct.pack("<IQ", TYPE_CODES[tensor.type], offset)]
        offset += -(-tensor.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return b"".join(parts)


def _check_shape(tensor: TensorToWrite) -> None:
    if tensor.type not in TYPE_CODES:
        raise CheckpointError(
            f"tensor {tensor.name}: there is no type {tensor.type}; choose from {', '.join(TYPE_CODES)}"
        )
    size = TENSOR_TYPES[TYPE_CODES[tensor.type]].size
    if not tensor.shape or tensor.shape[-1] % size:
        raise CheckpointError(
            f"tensor {tensor.name} of shape {list(tensor.shape)} cannot be {tensor.type}: rows must be a multiple of "
            f"{size}; choose another type for it"
        )


def _pair(value: Any) -> bytes:
    """Kind and value."""
    kind, plain = value if isinstance(value, Typed) else (_default_kind(value), value)
    code = _KINDS[kind]
    if isinstance(plain, list | tuple):
        return struct.pack("<IIQ", ARRAY, code, len(plain)) + _items(code, plain)
    return struct.pack("<I", code) + _items(code, [plain])


def _default_kind(value: Any) -> str:
    samples = value if isinstance(value, list | tuple) else [value]
    if all(isinstance(entry, str) for entry in samples) and samples:
        return "string"
    if all(isinstance(entry, bool) for entry in samples) and samples:
        return "bool"
    if all(isinstance(entry, int) for entry in samples) and samples:
        return "uint32" if all(0 <= entry < 2**32 for entry in samples) else "int64"
    if all(isinstance(entry, int | float) for entry in samples) and samples:
        return "float32"
    raise CheckpointError(f"GGUF metadata cannot hold {str(value)[:80]!r}; give texts, numbers, or lists of one kind")


def _items(code: int, values: Sequence[Any]) -> bytes:
    if code == STRING:
        return b"".join(map(_text, values))
    return struct.pack(f"<{len(values)}{SCALARS[code]}", *values)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def _write_tensor(file: BinaryIO, tensor: TensorToWrite) -> None:
    raw = tensor.read().contiguous()
    if raw.dtype is not torch.uint8 or raw.numel() != tensor.nbytes:
        raise CheckpointError(
            f"tensor {tensor.name} came as {raw.numel()} entries of {raw.dtype}; {tensor.type} of shape "
            f"{list(tensor.shape)} has {tensor.nbytes} bytes"
        )
    raw.numpy().tofile(file)
