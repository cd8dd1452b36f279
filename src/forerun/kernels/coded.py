"""Matrices of codes that stand for floats, with a scale per group of inputs: FP8, NF4, and integers taken as floats.

Knows: this interchange form, the float32 matrix it stands for, and which one stands for the same as a grouped matrix.
Does not know: file formats, nor how a backend lays a matrix out.

The product is that of `Kernels.linear` with the float32 matrix, to the bit: a backend looks codes up while it reads
them. With an input order it sums columns in the order in which codes lie. Activations are not rounded, unlike those of
`kernels.grouped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.grouped import GroupedMatrix, check_matrix

NUM_VALUES = 16  # that codes of 4 bits stand for
NUM_SCALE_VALUES = 256
BY_ROW = ("codes", "scales", "units", "shifts", "offsets")  # fields that have a part for each row


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """w[n, k] = value of codes[n, k] * scale of (n, g) - offsets[n, g], g = k // group_size, each step rounded.

    The value is `values[code]`, or code - `zero`, or what e4m3 says of a byte. The scale is scales[n, g]; where that is
    a byte, scale_values[scales[n, g]]; and where there are units that * units[n, u] + shifts[n], each step rounded,
    with as many neighbouring groups to every unit. The last group may be shorter than the others. Column k multiplies
    input `input_order[k]`.
    """

    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, num_groups] float32, or uint8 with scale_values
    group_size: int  # even with values
    values: Tensor | None = None  # [16] float32; K is even then
    scale_values: Tensor | None = None  # [256] float32
    units: Tensor | None = None  # [N, num_units] float32
    shifts: Tensor | None = None  # [N] float32, where there are units
    zero: int | None = None  # 0 .. 255, where bytes are integers
    offsets: Tensor | None = None  # [N, num_groups] float32, where codes are not e4m3
    input_order: Tensor | None = None  # [K] int64, a permutation

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = -(-columns // self.group_size)
        kind = torch.float32 if self.scale_values is None else torch.uint8
        _check("codes", self.codes, torch.uint8, (rows, columns))
        _check("scales", self.scales, kind, (rows, groups))
        _check("values", self.values, torch.float32, (NUM_VALUES,))
        _check("scale values", self.scale_values, torch.float32, (NUM_SCALE_VALUES,))
        _check("offsets", self.offsets, torch.float32, (rows, groups))
        _check("input order", self.input_order, torch.int64, (columns,))
        if self.values is not None and (columns % 2 or (self.group_size % 2 and groups > 1)):
            raise KernelError(f"codes of 4 bits lie in pairs: {columns} inputs in groups of {self.group_size} do not")
        if self.units is not None:
            if self.scale_values is None or self.shifts is None or groups % self.units.shape[-1]:
                raise KernelError("units need scales that are bytes, shifts, and as many groups each")
            _check("units", self.units, torch.float32, (rows, self.units.shape[-1]))
            _check("shifts", self.shifts, torch.float32, (rows,))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def groups_a_unit(self) -> int:
        """Groups that share a unit, 0 without units."""
        return 0 if self.units is None else self.scales.shape[1] // self.units.shape[1]

    def rows(self, row_ids: Tensor) -> CodedMatrix:
        """Rows `row_ids` [M] int64 of it."""
        held = {name: getattr(self, name) for name in BY_ROW if getattr(self, name) is not None}
        return replace(self, **{name: numbers[row_ids] for name, numbers in held.items()})

    def float_scales(self) -> Tensor:
        """The scale of every group -> [N, num_groups] float32."""
        if self.scale_values is None:
            return self.scales
        found = self.scale_values[self.scales.int()]
        if self.units is None or self.shifts is None:
            return found
        return found * self.units.repeat_interleave(self.groups_a_unit, dim=1) + self.shifts[:, None]

    def dequantize(self) -> Tensor:
        """The matrix it stands for -> [N, K] float32."""
        group_ids = torch.arange(self.shape[1]) // self.group_size  # [K]
        dense = self._values() * self.float_scales()[:, group_ids]
        if self.offsets is not None:
            dense -= self.offsets[:, group_ids]
        if self.input_order is None:
            return dense
        return torch.empty_like(dense).index_copy_(1, self.input_order, dense)

    def _values(self) -> Tensor:
        """What the codes stand for -> [N, K] float32."""
        if self.values is not None:
            return self.values[self.codes.int()]
        return self.codes.view(torch.float8_e4m3fn).float() if self.zero is None else self.codes.float() - self.zero


def of_integers(matrix: GroupedMatrix) -> CodedMatrix:
    """Codes that stand for the floats of `matrix`, to the bit: nibbles where 4 bits are enough, else bytes."""
    check_matrix(matrix)
    columns, plain = matrix.shape[1], matrix.plain()
    found = CodedMatrix(
        plain.codes, plain.scales, matrix.group_size, zero=matrix.zero, offsets=plain.offsets,
        input_order=matrix.input_order,
    )  # fmt: skip
    if matrix.bits > 4 or columns % 2:
        return found
    integers = torch.arange(NUM_VALUES) if matrix.table is None else matrix.table
    return replace(found, codes=matrix.codes, values=integers.float() - matrix.zero, zero=None)


def fit(first: CodedMatrix, other: CodedMatrix) -> bool:
    """Whether the rows of two matrices can be those of one."""
    same = (first.shape[1], first.group_size, first.groups_a_unit, first.zero, first.offsets is None) == (
        other.shape[1], other.group_size, other.groups_a_unit, other.zero, other.offsets is None,
    )  # fmt: skip
    names = ("values", "scale_values", "input_order")
    return same and all(_equal(getattr(first, name), getattr(other, name)) for name in names)


def stacked(matrices: Sequence[CodedMatrix]) -> CodedMatrix:
    """One matrix of the rows of matrices that fit."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    held = {name: [getattr(matrix, name) for matrix in matrices] for name in BY_ROW if getattr(first, name) is not None}
    joined: dict[str, Any] = {name: torch.cat(tables) for name, tables in held.items()}
    return replace(first, **joined)


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _check(name: str, numbers: Tensor | None, kind: torch.dtype, shape: tuple[int, ...]) -> None:
    if numbers is not None and (numbers.shape != shape or numbers.dtype is not kind):
        raise KernelError(f"{name} are {numbers.dtype} {list(numbers.shape)}, not {kind} {list(shape)}")
