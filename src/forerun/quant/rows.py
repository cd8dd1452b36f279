"""Some rows of a matrix, whatever its storage.

Knows: that every storage format ends in one of three calls that pack a matrix, of which rows can be taken. Does not
know: formats, or why rows are left out.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels, PackedLinear
from forerun.quant.base import RowPart, TensorSource, Weight, WeightFormat


def read_rows(
    form: WeightFormat, source: TensorSource, part: RowPart, columns: int, kernels: Kernels, dtype: torch.dtype | None,
    row_ids: Tensor,
) -> Weight:  # fmt: skip
    """Rows `row_ids` [R] int64 of the module `part`, as stored -> [R, columns]; raises as `WeightFormat.read`."""
    return form.read(source, [part], columns, cast(Kernels, _PacksRows(kernels, row_ids)), dtype)


class _PacksRows:
    """Kernels that pack these rows of the matrices they are given; all else is what the kernels do."""

    def __init__(self, kernels: Kernels, row_ids: Tensor) -> None:
        self._kernels, self._row_ids = kernels, row_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        return self._kernels.pack_linear(weight[self._row_ids])

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        return self._kernels.pack_grouped(matrix.rows(self._row_ids))

    def pack_coded(self, matrix: CodedMatrix) -> PackedLinear:
        return self._kernels.pack_coded(matrix.rows(self._row_ids))
