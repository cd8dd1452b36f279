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
from forerun.quant.dense import DenseWeight, rows_of
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
        return self.read_rows(source, parts, columns, kernels, dtype, [None] * len(parts))

    def read_rows(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels,
        dtype: torch.dtype | None, chosen: Sequence[Tensor | None],
    ) -> Weight:  # fmt: skip
        """See `RowFormat`; all rows of a part for which None is chosen."""
        assert isinstance(source, BlockSource)
        sizes = [(f"{part.prefix}.weight", (part.rows, columns)) for part in parts]
        kinds = {source.block_type(name) for name, _ in sizes}
        if kinds == {None}:
            tables = [read_floats(source, *size, dtype, rows=ids) for size, ids in zip(sizes, chosen, strict=True)]
            return DenseWeight(kernels, torch.cat(tables))
        if None in kinds:
            tables = [read_floats(source, *size, rows=ids) for size, ids in zip(sizes, chosen, strict=True)]
            return DenseWeight(kernels, torch.cat([table.float() for table in tables]))
        matrices = [_read(source, *size, ids) for size, ids in zip(sizes, chosen, strict=True)]
        return GroupedWeight(kernels, join_matrices(matrices))


def keeps_blocks(source: TensorSource, name: str) -> bool:
    """Whether the table `name` stays as small as in its blocks."""
    return isinstance(source, BlockSource) and source.block_type(name) is not None


def read_floats(
    source: TensorSource, name: str, shape: tuple[int, int], dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """A matrix [N, K] as floats: float32 if stored in blocks (exact), else `dtype`, or as stored if that is None.

    rows [R] int64: those that are read; None: all. Raises what `tensor` and `decode_rows` raise.
    """
    if not isinstance(source, BlockSource) or source.block_type(name) is None:
        stored = source.tensor(name, shape) if rows is None else rows_of(source, name, shape, rows)
        return stored.to(dtype or stored.dtype)
    blocks = _blocks(source, name, shape, rows)
    table = torch.empty(len(blocks), shape[1])
    for start in range(0, len(blocks), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        table[part] = _decoded(source, name, blocks[part]).dequantize()
    return table


def _blocks(source: BlockSource, name: str, shape: tuple[int, int], rows: Tensor | None) -> Tensor:
    stored = source.blocks(name, shape)  # mapped: what is not touched is not read
    return stored if rows is None else stored.view(shape[0], -1)[rows]


def _read(source: BlockSource, name: str, shape: tuple[int, int], rows: Tensor | None) -> GroupedMatrix:
    return _decoded(source, name, _blocks(source, name, shape, rows))


def _decoded(source: BlockSource, name: str, rows: Tensor) -> GroupedMatrix:
    kind = source.block_type(name)
    assert kind is not None
    try:
        return decode_rows(kind, rows)
    except ModelError as error:
        raise type(error)(f"{source.describe(name)}: {error}") from error
