"""Some rows of a matrix, whatever its storage.

Knows: that some formats read rows by themselves, and that every other one ends in one of three calls that pack a
matrix, of which rows can be taken. Does not know: formats, or why rows are left out.

In those others what a row becomes may depend on the rest of its matrix (zero points that are all alike become one
number), so that is read and decoded as a whole: the packed rows are those of the whole matrix, to the bit. Kernels may
have to know how many rows that has, too, to add up what these rows give as it does (`KnowsWhole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels, PackedLinear
from forerun.quant.base import RowFormat, RowPart, TensorSource, Weight, WeightFormat


@runtime_checkable
class KnowsWhole(Protocol):
    """Kernels in which the order of a row's sum depends on how many rows the whole matrix has."""

    def part_of(self, num_rows: int | None) -> Kernels:
        """These kernels, for packing some rows of matrices of `num_rows`; None: for matrices of experts."""


def packs_part(kernels: Kernels, num_rows: int | None) -> Kernels:
    """Kernels that pack some of `num_rows` rows, whose sums are those of all rows; None: of an expert's."""
    return kernels.part_of(num_rows) if isinstance(kernels, KnowsWhole) else kernels


def read_rows(
    form: WeightFormat, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels,
    dtype: torch.dtype | None, row_ids: Tensor, of_rank: bool = False,
) -> Weight:  # fmt: skip
    """Rows `row_ids` [R] int64 of the modules `parts` one below the other, as stored -> [R, columns].

    row_ids: of several modules ascending. of_rank: sums are those of all rows (`KnowsWhole`). Raises as
    `WeightFormat.read`.
    """
    num_rows = sum(part.rows for part in parts)
    if isinstance(form, RowFormat):
        kernels = packs_part(kernels, num_rows) if of_rank else kernels
        return form.read_rows(source, parts, columns, kernels, dtype, split_rows(parts, row_ids))
    return form.read(source, parts, columns, only_rows(kernels, row_ids, num_rows, of_rank), dtype)


def split_rows(parts: Sequence[RowPart], row_ids: Tensor) -> list[Tensor]:
    """Of rows of modules one below the other: those of each, counted from its own first."""
    found, first = list[Tensor](), 0
    for part in parts:
        found.append(row_ids[(row_ids >= first) & (row_ids < first + part.rows)] - first)
        first += part.rows
    return found


def only_rows(kernels: Kernels, row_ids: Tensor, num_rows: int, of_rank: bool = True) -> Kernels:
    """Kernels that pack rows `row_ids` of `num_rows`, which are packed together or in pieces, one below the other."""
    return cast(Kernels, _PacksRows(kernels, row_ids, num_rows, of_rank))


class _PacksRows:
    """Kernels that pack these rows of the matrices they are given; all else is what the kernels do."""

    def __init__(self, kernels: Kernels, row_ids: Tensor, num_rows: int, of_rank: bool) -> None:
        self._kernels, self._row_ids, self._num_rows, self._first = kernels, row_ids, num_rows, 0
        self._of_rank = of_rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def _next(self, num_rows: int) -> Tensor:
        """Which rows of the next piece are packed; after the last one begins another matrix."""
        first, self._first = self._first, (self._first + num_rows) % self._num_rows
        assert first + num_rows <= self._num_rows, (first, num_rows, self._num_rows)
        return self._row_ids[(self._row_ids >= first) & (self._row_ids < first + num_rows)] - first

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        kernels = packs_part(self._kernels, len(weight)) if self._of_rank else self._kernels
        return kernels.pack_linear(weight[self._next(len(weight))])

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        return self._kernels.pack_grouped(matrix.rows(self._next(matrix.shape[0])))

    def pack_coded(self, matrix: CodedMatrix) -> PackedLinear:
        return self._kernels.pack_coded(matrix.rows(self._next(matrix.shape[0])))
