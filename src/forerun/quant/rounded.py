"""Matrices stored as floats, rounded to small integers as they are read.

Knows: rounding to the nearest of evenly spaced values, group by group. Does not know: which matrices may be rounded.
Draft heads may: a worse draft costs speed, never a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight, WeightFormat
from forerun.quant.dense import DenseFormat, DenseWeight, read_joined
from forerun.quant.formats import find_format
from forerun.quant.grouped import GroupedWeight

ROUNDED_BITS = {"int8": 8, "int4": 4}
GROUP_SIZES = {8: (128, 64, 32, 16), 4: (64, 32, 16)}  # by bits; the first that divides a row
SMALLEST_SCALE = 1e-30  # for groups of zeros

ChooseFormat = Callable[[TensorSource, str], WeightFormat | None]
Pack = Callable[[Kernels, Tensor], Weight]  # of a float matrix [N, K]


def choose_for(weights: str) -> ChooseFormat:
    """How modules are read where float matrices become `weights`: "stored" as they are, or a key of ROUNDED_BITS."""
    if weights == "stored":
        return find_format
    rounded = RoundedFormat(ROUNDED_BITS[weights])

    def choose(source: TensorSource, prefix: str) -> WeightFormat | None:
        found = find_format(source, prefix)
        return rounded if found is not None and found.name == DenseFormat.name else found

    return choose


def pack_as(weights: str) -> Pack:
    """`choose_for` for a matrix that is already in memory."""
    return DenseWeight if weights == "stored" else RoundedFormat(ROUNDED_BITS[weights]).pack


class RoundedFormat:
    """Reads `PREFIX.weight` as `DenseFormat` does and rounds it. Implements `quant.base.WeightFormat`."""

    name = "rounded"

    def __init__(self, bits: int) -> None:
        """`bits`: 8 or 4."""
        self.bits = bits

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether `PREFIX.weight` exists."""
        return source.has(f"{prefix}.weight")

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """Read, join by rows, round and pack."""
        return self.pack(kernels, read_joined(source, parts, columns, dtype))

    def pack(self, kernels: Kernels, matrix: Tensor) -> Weight:
        """Round `matrix` [N, K]; it stays dense if no group size divides its rows."""
        size = next((size for size in GROUP_SIZES[self.bits] if matrix.shape[1] % size == 0), None)
        if size is None:
            return DenseWeight(kernels, matrix)
        return GroupedWeight(kernels, rounded(matrix, self.bits, size))


def rounded(matrix: Tensor, bits: int, group_size: int) -> GroupedMatrix:
    """Round to the nearest integers of `bits` bits around zero, with a scale for every group of a row."""
    rows, columns = matrix.shape
    groups = matrix.float().view(rows, columns // group_size, group_size)  # [N, groups, size]
    zero = 1 << (bits - 1)
    scales = (groups.abs().amax(dim=2) / (zero - 1)).clamp(min=SMALLEST_SCALE)  # [N, groups]
    codes = (groups / scales[..., None]).round() + zero  # 1 .. 2 ** bits - 1
    return GroupedMatrix(codes.to(torch.uint8).view(rows, columns), scales, bits, zero, group_size)
