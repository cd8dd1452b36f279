"""The header of a safetensors file, read and checked before anything else touches the file.

Knows: the format (8 bytes of little-endian length, JSON, data) and every way it can be damaged. Does not know: what
the tensors are for. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from forerun.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in a file."""

    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensor name -> entry; raises CheckpointError naming the file and what is wrong with it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(8), size)
            table = _parse(path, file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return _entries(path, table, size - 8 - length)


def data_start(file: BinaryIO | RawIOBase) -> int:
    """Where the data of an open file begins, in bytes; the file's header was checked before."""
    file.seek(0)
    return 8 + int.from_bytes(file.read(8) or b"", "little")


def _header_length(path: Path, first: bytes, size: int) -> int:
    if len(first) < 8:
        raise _broken(path, f"it has only {size} bytes, too few for a safetensors file")
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES or length < 2:
        raise _broken(path, f"its header claims {length} bytes (allowed: 2 to {MAX_HEADER_BYTES})")
    if length > size - 8:
        raise _broken(path, f"its header claims {length} bytes but only {size - 8} follow; the file is cut off")
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        table = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({type(error).__name__})") from error
    if not isinstance(table, dict):
        raise _broken(path, "its header is not a JSON object")
    table.pop("__metadata__", None)
    return table


def _entries(path: Path, table: dict[str, Any], data_bytes: int) -> dict[str, TensorEntry]:
    entries = {name: _entry(path, name, fields) for name, fields in table.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > data_bytes:
            raise _broken(
                path, f"tensor {name} ends at byte {entry.end} of the data but there are {data_bytes}; it is cut off"
            )
        if entry.begin != position:
            raise _broken(path, f"tensor {name} begins at byte {entry.begin} of the data, expected {position}")
        position = entry.end
    if position != data_bytes:
        raise _broken(path, f"its tensors cover {position} of {data_bytes} bytes of data")
    return entries


def _entry(path: Path, name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _broken(path, f"the header entry of tensor {name} is not an object")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _broken(path, f"tensor {name} has the unknown dtype {str(dtype)[:40]!r}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"tensor {name} has a malformed shape or data_offsets")
    entry = TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])
    if entry.nbytes * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        raise _broken(path, f"tensor {name} of shape {list(shape)} and dtype {dtype} cannot have {entry.nbytes} bytes")
    return entry


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > 64:
        return False
    return all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < 2**63 for entry in value)


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}; download or copy the file again")
