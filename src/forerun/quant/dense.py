"""Dense weights: float32, bfloat16 or float16 matrices in the layout the kernels read.

Knows: `NAME.weight` tensors and `Kernels.pack_linear`. Does not know: quantization or architectures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, RowSource, TensorSource
from forerun.quant.packed import PackedWeight


class DenseWeight(PackedWeight):
    """A matrix packed by the kernels that multiply with it."""

    def __init__(self, kernels: Kernels, matrix: Tensor) -> None:
        """Pack `matrix` [N, K]."""
        super().__init__(kernels, kernels.pack_linear(matrix))
        self.dtype = matrix.dtype


class DenseFormat:
    """`PREFIX.weight` tensors; the format of every checkpoint that is not quantized."""

    name = "dense"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether `PREFIX.weight` exists."""
        return source.has(f"{prefix}.weight")

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> DenseWeight:
        """Read, convert, join by rows and pack."""
        return DenseWeight(kernels, read_joined(source, parts, columns, dtype))

    def read_rows(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels,
        dtype: torch.dtype | None, chosen: Sequence[Tensor],
    ) -> DenseWeight:  # fmt: skip
        """See `RowFormat`."""
        each = zip(parts, chosen, strict=True)
        tensors = [rows_of(source, f"{part.prefix}.weight", (part.rows, columns), ids) for part, ids in each]
        return DenseWeight(kernels, torch.cat([tensor if dtype is None else tensor.to(dtype) for tensor in tensors]))


def rows_of(source: TensorSource, name: str, shape: tuple[int, int], row_ids: Tensor) -> Tensor:
    """Rows of a floating matrix, read alone where the source can -> [R, K]."""
    if isinstance(source, RowSource):
        return source.rows(name, shape, row_ids)
    return source.tensor(name, shape)[row_ids]


def read_joined(source: TensorSource, parts: Sequence[RowPart], columns: int, dtype: torch.dtype | None) -> Tensor:
    """The `PREFIX.weight` of all parts, converted if `dtype` is given, one below the other -> [N, K], a copy."""
    tensors = [source.tensor(f"{part.prefix}.weight", (part.rows, columns)) for part in parts]
    return torch.cat([tensor if dtype is None else tensor.to(dtype) for tensor in tensors])
