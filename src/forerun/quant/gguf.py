"""Matrices of GGUF files: quantized blocks become grouped matrices, plain ones stay dense.

Knows: what it needs of a source of blocks, and how modules of different block types become one matrix. Does not know:
files, names, or what is in a block (`gguf_decode`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.dense import DenseFormat, DenseWeight
from forerun.quant.gguf_decode import decode_rows, join_matrices
from forerun.quant.grouped import GroupedWeight

_ROWS_AT_ONCE = 4096  # of a table that is decoded to floats


@runtime_checkable
class BlockSource(Protocol):
    """A TensorSource whose tensors may be stored in blocks."""

    def block_type(self, name: str) -> str | None:
        """The type of a quantized tensor, e.g. "Q4_K"; None for plain floats."""

    def blocks(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Its stored bytes by rows -> [rows, bytes of a row] uint8."""

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """A tensor of plain floats."""

    def describe(self, name: str) -> str:
        """How messages name the tensor: its file, and its name in that file."""


class GgufFormat:
    """`PREFIX.weight` in a source of blocks.

    Modules of different block types are joined into one matrix with the finest groups and the most bits among them,
    which changes no value; if one is quantized and another is not, all become float32.
    """

    name = "gguf"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the source has blocks and `PREFIX.weight` exists."""
        return isinstance(source, BlockSource) and source.has(f"{prefix}.weight")

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; raises UnsupportedError for block types that are not known. dtype applies to floats."""
        assert isinstance(source, BlockSource)
        kinds = {source.block_type(f"{part.prefix}.weight") for part in parts}
        if kinds == {None}:
            return DenseFormat().read(source, parts, columns, kernels, dtype)
        if None in kinds:
            tables = [read_floats(source, f"{part.prefix}.weight", (part.rows, columns)) for part in parts]
            return DenseWeight(kernels, torch.cat([table.float() for table in tables]))
        return GroupedWeight(kernels, join_matrices([_read(source, part, columns) for part in parts]))


def keeps_blocks(source: TensorSource, name: str) -> bool:
    """Whether the table `name` stays as small as in its blocks."""
    return isinstance(source, BlockSource) and source.block_type(name) is not None


def read_floats(source: TensorSource, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None) -> Tensor:
    """A matrix [N, K] as floats: float32 if stored in blocks (exact), else `dtype`, or as stored if that is None.

    Raises what `tensor` and `decode_rows` raise.
    """
    if not isinstance(source, BlockSource) or source.block_type(name) is None:
        stored = source.tensor(name, shape)
        return stored.to(dtype or stored.dtype)
    rows, table = source.blocks(name, shape), torch.empty(shape)
    for start in range(0, shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        table[part] = _decoded(source, name, rows[part]).dequantize()
    return table


def _read(source: BlockSource, part: RowPart, columns: int) -> GroupedMatrix:
    name = f"{part.prefix}.weight"
    return _decoded(source, name, source.blocks(name, (part.rows, columns)))


def _decoded(source: BlockSource, name: str, rows: Tensor) -> GroupedMatrix:
    kind = source.block_type(name)
    assert kind is not None
    try:
        return decode_rows(kind, rows)
    except ModelError as error:
        raise type(error)(f"{source.describe(name)}: {error}") from error
