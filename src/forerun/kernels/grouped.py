"""Matrices of small integers with a scale per group of inputs: the form quantized formats are loaded as.

Knows: this interchange form, the integers and scales it stands for, how activations are quantized to 8 bits, and the
plain torch arithmetic that specifies the product. Does not know: file formats, nor how a backend lays a matrix out.

The product of a row is defined step by step, so that every backend can give the same bits:

1. The row x [K] is permuted by `input_order` if there is one.
2. It is cut into steps (`steps_of`). Each activation group has the scale a = max|x| / 127 (float32) and the integers
   q = round_half_even(x * (1 / a)) in -127 .. 127, both the quotient and the product rounded; where 1 / a is not
   finite (a is 0, or far below what matters) q = 0. NaN or infinity in a row makes all its outputs NaN.
3. Steps are visited in ascending order. With the integers w = codes - zero of an output's row and the exact integer
   dot product d = sum(w * q), acc = fma(scale * a, float(d), acc); if there are offsets, then
   acc = fma(-(offset * a), float(sum(q)), acc). acc starts at 0; products in front of an fma are rounded to float32.
4. The bias is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.errors import KernelError

SMALLEST_GROUP = 16
MAX_STEP = 128


@dataclass(frozen=True, slots=True, eq=False)
class PointGrid:
    """Points that runs of neighbouring codes form; of the codes of a point 8 may be added to any, their sign."""

    points: Tensor  # [P, 4] uint8 below 8, or [P, 8] below 4; P is 129 to 2 ** 15
    signs: int  # of eight neighbouring codes: 8; 7, and the eighth makes their number even; 1 for all; 0

    @property
    def run(self) -> int:
        """Codes of a point."""
        return self.points.shape[1]

    @property
    def bits(self) -> int:
        """Of the number of a point."""
        return (len(self.points) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """w[n, k] = scales[n, g] * (codes[n, k] - zero) - offsets[n, g], where g = k // group_size.

    `codes` hold at most 2 ** bits different values; with a `table` they are indices into it. Column k multiplies input
    `input_order[k]`. The last group may be shorter than the others. With `units`, which neighbouring groups share,
    scales and offsets are whole numbers that count them: unit_scale * unit * count in float32 is what they stand for.
    Without units they stand for unit_scale * themselves.
    With a `grid` the codes are those of its `points`, and a backend may store the points' numbers instead.
    """

    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, num_groups] float32, or int8 with units
    bits: int  # 2 .. 8; 4 with a table
    zero: int  # what stands for the integer 0, 0 .. 2 ** bits - 1, or a byte with a table
    group_size: int  # a multiple of 16, or K
    offsets: Tensor | None = None  # [N, num_groups], like scales
    input_order: Tensor | None = None  # [K] int64, a permutation
    units: Tensor | None = None  # [N, num_units] float16; as many groups share each
    offset_units: Tensor | None = None  # [N, num_units] float16, where there are units and offsets
    table: Tensor | None = None  # [16] uint8
    unit_scale: float = 1.0  # a power of two where there are units
    grid: PointGrid | None = None
    points: Tensor | None = None  # [N, K / run] int16, where there is a grid

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        if self.group_size % SMALLEST_GROUP and self.group_size != columns:
            raise KernelError(f"group size {self.group_size} is neither a multiple of {SMALLEST_GROUP} nor all inputs")
        if not 2 <= self.bits <= 8 or not 0 <= self.zero < (256 if self.table is not None else 1 << self.bits):
            raise KernelError(f"{self.bits} bits around zero point {self.zero} are not supported; 2 to 8 bits are")
        groups, kind = -(-columns // self.group_size), torch.float32 if self.units is None else torch.int8
        _check_numbers("scales", self.scales, kind, (rows, groups))
        _check_numbers("offsets", self.offsets, kind, (rows, groups))
        if self.units is None:
            return
        if groups % self.units.shape[-1]:
            raise KernelError(f"{groups} groups cannot share {self.units.shape[-1]} units evenly")
        if (self.offset_units is None) != (self.offsets is None):
            raise KernelError("where scales count units, offsets need units of their own")
        _check_numbers("units", self.units, torch.float16, (rows, groups // self.groups_a_unit))
        _check_numbers("offset units", self.offset_units, torch.float16, (rows, groups // self.groups_a_unit))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def groups_a_unit(self) -> int:
        """Groups that share a unit, 1 without units."""
        return 1 if self.units is None else self.scales.shape[1] // self.units.shape[1]

    def multiplied_out(self) -> GroupedMatrix:
        """The same matrix without units and unit_scale: scales and offsets are float32."""
        if self.units is None:
            offsets = None if self.offsets is None else self.offsets * self.unit_scale
            return replace(self, scales=self.scales * self.unit_scale, offsets=offsets, unit_scale=1.0)
        span = self.groups_a_unit
        units, offsets = self.units.float() * self.unit_scale, None
        if self.offset_units is not None:
            offsets = _counted(self.offset_units.float() * self.unit_scale, self.offsets, span)
        scales = _counted(units, self.scales, span)
        return replace(self, scales=scales, offsets=offsets, units=None, offset_units=None, unit_scale=1.0)

    def looked_up(self) -> GroupedMatrix:
        """The same matrix without a table: codes are bytes."""
        plain = self.off_grid()
        return plain if self.table is None else replace(plain, codes=self.table[self.codes.int()], bits=8, table=None)

    def off_grid(self) -> GroupedMatrix:
        """The same matrix without a grid."""
        return self if self.grid is None else replace(self, grid=None, points=None)

    def plain(self) -> GroupedMatrix:
        """The same matrix without units, table and grid."""
        return self.multiplied_out().looked_up()

    def rows(self, row_ids: Tensor) -> GroupedMatrix:
        """Rows `row_ids` [M] int64 of it."""
        names = ("codes", "scales", "offsets", "units", "offset_units", "points")
        held = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: numbers[row_ids] for name, numbers in held.items()})

    def dequantize(self) -> Tensor:
        """The matrix it stands for, inputs in their own order -> [N, K] float32."""
        plain, columns = self.plain(), self.codes.shape[1]
        group_ids = torch.arange(columns) // self.group_size  # [K]
        dense = (plain.codes.float() - self.zero) * plain.scales[:, group_ids]
        if plain.offsets is not None:
            dense -= plain.offsets[:, group_ids]
        if self.input_order is None:
            return dense
        own = torch.empty_like(dense)
        own[:, self.input_order] = dense
        return own


def _check_numbers(name: str, numbers: Tensor | None, kind: torch.dtype, shape: tuple[int, int]) -> None:
    if numbers is not None and (numbers.shape != shape or numbers.dtype is not kind):
        raise KernelError(f"{name} are {numbers.dtype} {list(numbers.shape)}, not {kind} {list(shape)}")


def _counted(units: Tensor, counts: Tensor | None, span: int) -> Tensor:
    """units [N, U] float32 times counts [N, U * span] int8 -> [N, U * span] float32, exact for units of float16."""
    assert counts is not None
    return units.repeat_interleave(span, dim=1) * counts.float()


class Step(NamedTuple):
    """Neighbouring inputs with one weight scale and one activation scale."""

    start: int
    end: int
    group: int  # whose weight scale holds
    activation_group: int  # whose activation scale holds


def steps_of(columns: int, group_size: int) -> list[Step]:
    """How the inputs of a row are summed: each weight group in steps of at most 128 inputs.

    Every step has an activation scale of its own, except that groups of 16 share one two by two.
    """
    steps: list[Step] = []
    for group, first in enumerate(range(0, columns, group_size)):
        last = min(first + group_size, columns)
        for start in range(first, last, MAX_STEP):
            activation = start // (2 * group_size) if group_size == SMALLEST_GROUP else len(steps)
            steps.append(Step(start, min(start + MAX_STEP, last), group, activation))
    return steps


def quantize_row(x: Tensor, steps: Sequence[Step]) -> tuple[Tensor, Tensor]:
    """A row [K] as whole numbers [K] float32 and the scale of every activation group [num_activation_groups]."""
    whole, scales = torch.empty_like(x), torch.zeros(steps[-1].activation_group + 1)
    for index in range(len(scales)):
        members = [step for step in steps if step.activation_group == index]
        part = slice(members[0].start, members[-1].end)
        scales[index] = x[part].abs().max() / 127
        inverse = 1 / scales[index]
        inverse = inverse if inverse.isfinite() else torch.zeros(())
        whole[part] = (x[part] * inverse).round().clamp(-127, 127)
    return whole, scales


@dataclass(frozen=True, slots=True)
class ReferenceGrouped:
    """A grouped matrix as the reference multiplies with it."""

    matrix: GroupedMatrix
    weights: Tensor  # [N, K] float32, codes - zero
    steps: Sequence[Step]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.matrix.shape

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weights.nbytes + self.matrix.scales.nbytes


def pack_reference(matrix: GroupedMatrix) -> ReferenceGrouped:
    """Lay a grouped matrix out for `multiply_grouped`."""
    matrix = matrix.plain()
    return ReferenceGrouped(matrix, matrix.codes.float() - matrix.zero, steps_of(matrix.shape[1], matrix.group_size))


def multiply_grouped(packed: ReferenceGrouped, row: Tensor) -> Tensor:
    """One row [K] times the matrix transposed -> [N] float32."""
    matrix = packed.matrix
    x = row if matrix.input_order is None else row[matrix.input_order]
    whole, activation_scales = quantize_row(x, packed.steps)
    total = torch.zeros(matrix.shape[0])
    for start, end, group, activation in packed.steps:
        dots = packed.weights[:, start:end] @ whole[start:end]  # exact: whole numbers below 2^24
        a = activation_scales[activation]
        total = _fma(matrix.scales[:, group] * a, dots, total)
        if matrix.offsets is not None:
            total = _fma(-(matrix.offsets[:, group] * a), whole[start:end].sum(), total)
    return total


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, the product not rounded (the sum twice in rare cases, hence last bits may differ from C++)."""
    return (a.double() * b.double() + c.double()).float()


def check_matrix(matrix: GroupedMatrix) -> None:
    """Raise KernelError for a matrix no backend can pack: empty, codes not bytes, no such points, no permutation."""
    num_outputs, num_inputs = matrix.shape
    if num_outputs < 1 or num_inputs < 1:
        raise KernelError(f"a grouped matrix of shape {[num_outputs, num_inputs]} is empty")
    if matrix.codes.dtype is not torch.uint8:
        raise KernelError(f"codes of a grouped matrix are uint8, not {matrix.codes.dtype}")
    if matrix.grid is not None:
        _check_points(matrix, matrix.grid)
    order = matrix.input_order
    if order is None:
        return
    if order.dtype is not torch.int64 or not torch.equal(order.cpu().sort().values, torch.arange(num_inputs)):
        raise KernelError(f"input_order must be an int64 permutation of 0 .. {num_inputs - 1}")


def _check_points(matrix: GroupedMatrix, grid: PointGrid) -> None:
    (rows, columns), points = matrix.shape, matrix.points
    if not 129 <= len(grid.points) <= 1 << 15:  # numbers of 8 to 15 bits: AVX-512 reads tables of 256 and more
        raise KernelError(f"a grid has 129 to {1 << 15} points, not {len(grid.points)}")
    if points is None or points.dtype is not torch.int16 or points.shape != (rows, columns / grid.run):
        raise KernelError(f"{[rows, columns]} codes on a grid of runs of {grid.run} come without as many int16 points")
    if int(grid.points.max()) >= 32 // grid.run:
        raise KernelError(f"codes of points of {grid.run} must be below {32 // grid.run}")
    if int(points.min()) < 0 or int(points.max()) >= len(grid.points):
        raise KernelError(f"points must be 0 .. {len(grid.points) - 1}, numbers of the grid's")
