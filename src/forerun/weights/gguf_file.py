"""One GGUF file: its metadata and where its tensors lie, read and checked before anything relies on them.

Knows: the container (header, key-value pairs, tensor table, aligned data) and every way it can be damaged. Does not
know: what keys mean, nor what a block of a tensor holds. Source: ggml docs/gguf.md.

No allocation trusts a size in the file: every length is first compared with the bytes that are left.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_types import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    MAGIC,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    VERSIONS,
    BlockLayout,
)

MAX_HEADER_BYTES = 128 << 20  # the largest vocabularies take 20 MB
MAX_NESTING = 3  # arrays in arrays
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in a file."""

    layout: BlockLayout
    shape: tuple[int, ...]  # largest stride first, as in torch
    begin: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension)."""
        return self.shape[-1] // self.layout.size * self.layout.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked file. Metadata arrays of numbers are numpy arrays, arrays of strings are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: Tensor  # [file size] uint8, mapped

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Read the header and map the file; raises CheckpointError or UnsupportedError naming file and fault."""
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                if size < 24:
                    raise _broken(path, f"it has only {size} bytes, too few for a GGUF file")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    metadata, tensors = _read_header(_FileCursor(path, mapped), size)
            data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        return GgufFile(path, metadata, tensors, data)

    def rows(self, name: str) -> Tensor:
        """The stored bytes of a tensor by rows -> [rows, bytes of a row] uint8, a view of the mapped file."""
        tensor = self.tensors[name]
        return self.data[tensor.begin : tensor.begin + tensor.nbytes].view(-1, tensor.row_bytes)


class GgufModel:
    """All files of a model as one: the metadata of the first, the tensors of all."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        """Raises CheckpointError if two files hold a tensor of the same name."""
        self.path = files[0].path
        self.metadata = files[0].metadata
        self.tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        self._file_of = {name: file for file in files for name in file.tensors}
        if len(self.tensors) != sum(len(file.tensors) for file in files):
            raise CheckpointError(
                f"{self.path} and the files beside it hold tensors of the same name; they do not belong together: "
                "download them again"
            )

    def rows(self, name: str) -> Tensor:
        """See `GgufFile.rows`."""
        return self._file_of[name].rows(name)


class _FileCursor:
    """Walks through the header; raises CheckpointError rather than read beyond its end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.at = 0
        self._mapped = mapped
        self._end = min(len(mapped), MAX_HEADER_BYTES)

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return self._mapped[self.at - count : self.at]

    def need(self, count: int) -> None:
        """Make sure that `count` more bytes are there."""
        left = self._end - self.at
        if count > left and self._end == MAX_HEADER_BYTES:
            raise _broken(self.path, f"its header is longer than {MAX_HEADER_BYTES} bytes")
        if count > left:
            raise _broken(self.path, f"{count} bytes are expected at byte {self.at} but {left} are left; it is cut off")

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))
        return value

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _broken(self.path, f"the text before byte {self.at} is not UTF-8") from error


def _read_header(cursor: _FileCursor, size: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    _check_start(cursor)
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    cursor.need(num_tensors * 24 + num_pairs * 13)  # the least that one of each takes
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text()
        if key in metadata:
            raise _broken(cursor.path, f"the key {key[:80]!r} occurs twice")
        metadata[key] = _value(cursor, cursor.number("I"), 0)
    table = _read_table(cursor, num_tensors)
    alignment = _alignment(cursor.path, metadata)
    start = -(-cursor.at // alignment) * alignment
    return metadata, _place(cursor.path, table, start, alignment, size)


def _check_start(cursor: _FileCursor) -> None:
    start = cursor.take(16)
    if not start.startswith(MAGIC):
        raise CheckpointError(
            f"{cursor.path} is not a GGUF file: it begins with {start!r}, not with {MAGIC.decode()}; download it "
            "again, or give the name of another file"
        )
    cursor.at = len(MAGIC)
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise UnsupportedError(
            f"{cursor.path} is "
            + ("a big-endian GGUF file" if swapped else f"GGUF version {version}")
            + f"; supported are little-endian files of version {' and '.join(map(str, VERSIONS))}; convert the model "
            "again with a current llama.cpp"
        )


def _value(cursor: _FileCursor, kind: int, depth: int) -> Any:
    if kind == STRING:
        return cursor.text()
    if kind == ARRAY:
        return _array(cursor, depth + 1)
    if kind == BOOL:
        return bool(_flags(cursor, 1)[0])
    return cursor.number(_letter(cursor, kind))


def _array(cursor: _FileCursor, depth: int) -> Any:
    kind, count = cursor.number("I"), cursor.number("Q")
    if depth > MAX_NESTING:
        raise _broken(cursor.path, f"arrays are nested more than {MAX_NESTING} deep at byte {cursor.at}")
    if kind in (STRING, ARRAY):
        cursor.need(count * (8 if kind == STRING else 12))
        return [_value(cursor, kind, depth) for _ in range(count)]
    if kind == BOOL:
        return _flags(cursor, count)
    letter = _letter(cursor, kind)
    return np.frombuffer(cursor.take(count * struct.calcsize("<" + letter)), np.dtype("<" + letter))


def _flags(cursor: _FileCursor, count: int) -> Any:
    found = np.frombuffer(cursor.take(count), np.uint8)
    if (found > 1).any():
        raise _broken(cursor.path, f"a truth value before byte {cursor.at} is neither 0 nor 1")
    return found.astype(np.bool_)


def _letter(cursor: _FileCursor, kind: int) -> str:
    if kind not in SCALARS:
        raise _broken(cursor.path, f"the value before byte {cursor.at} has the unknown type {kind}")
    return SCALARS[kind]


_Row = tuple[str, tuple[int, ...], BlockLayout, int]


def _read_table(cursor: _FileCursor, count: int) -> list[_Row]:
    """Name, shape, layout and offset of every tensor."""
    table: list[_Row] = []
    for _ in range(count):
        name, num_dims = cursor.text(), cursor.number("I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise _broken(cursor.path, f"tensor {name[:80]!r} has {num_dims} dimensions (allowed: 1 to 4)")
        sizes = tuple(cursor.number("Q") for _ in range(num_dims))
        layout = _layout(cursor, name, cursor.number("I"))
        if not all(1 <= size < 2**31 for size in sizes) or sizes[0] % layout.size:
            raise _broken(
                cursor.path,
                f"tensor {name[:80]!r} has the sizes {list(sizes)}; they must be positive and {layout.name} rows a "
                f"multiple of {layout.size}",
            )
        table.append((name, sizes[::-1], layout, cursor.number("Q")))
    return table


def _layout(cursor: _FileCursor, name: str, code: int) -> BlockLayout:
    if code not in TENSOR_TYPES:
        raise UnsupportedError(
            f"{cursor.path}: tensor {name[:80]!r} is of type {code}, which forerun does not know; known are "
            f"{', '.join(layout.name for layout in TENSOR_TYPES.values())}; convert the model again to one of them"
        )
    return TENSOR_TYPES[code]


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and not isinstance(alignment, bool) and 1 <= alignment <= MAX_ALIGNMENT
    if not valid or alignment & (alignment - 1):
        raise _broken(path, f"general.alignment is {str(alignment)[:40]}, not a power of two up to {MAX_ALIGNMENT}")
    return int(alignment)


def _place(path: Path, table: list[_Row], start: int, alignment: int, size: int) -> dict[str, GgufTensor]:
    """Tensors by name, none overlapping another or the end of the file."""
    tensors: dict[str, GgufTensor] = {}
    free_from = start
    for name, shape, layout, offset in sorted(table, key=lambda row: row[3]):
        tensor = GgufTensor(layout, shape, start + offset)
        end = tensor.begin + tensor.nbytes
        if name in tensors:
            raise _broken(path, f"the tensor {name[:80]!r} occurs twice")
        if offset % alignment or tensor.begin < free_from:
            raise _broken(path, f"tensor {name[:80]!r} begins at a wrong place, byte {offset} of the data")
        if end > size:
            raise _broken(path, f"tensor {name[:80]!r} ends at byte {end} but the file at {size}; it is cut off")
        tensors[name] = tensor
        free_from = end
    return tensors


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}; download or copy the file again")
