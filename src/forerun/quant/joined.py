"""From integers, scales and zero points to a Weight; several modules joined by rows.

Knows: w = scale * (code - zero point) as a GroupedMatrix, and when modules (CodedMatrix too) fit into one. Does not
know: file formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.kernels.coded import CodedMatrix, fit, stacked
from forerun.kernels.grouped import SMALLEST_GROUP, GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import Weight
from forerun.quant.coded import CodedWeight
from forerun.quant.grouped import GroupedWeight
from forerun.quant.settings import REMEDY


def check_group_size(group_size: int, columns: int, prefix: str) -> None:
    """Raise UnsupportedError for groups the kernels have no arithmetic for."""
    if group_size % SMALLEST_GROUP and group_size != columns:
        raise UnsupportedError(
            f"{prefix} is quantized in groups of {group_size} of {columns} inputs; supported are multiples of "
            f"{SMALLEST_GROUP} and whole rows; {REMEDY}"
        )


def affine_matrix(
    codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, group_size: int, order: Tensor | None = None
) -> GroupedMatrix:
    """scales * (codes - zeros) with codes [N, K] uint8 (columns by `order`), scales and whole zeros [N, groups].

    One zero point for all becomes the matrix's own. Differing ones become offsets scale * (zero - middle), which
    float32 holds exactly for 16-bit scales.
    """
    scales, lowest, highest = scales.float().contiguous(), int(zeros.min()), int(zeros.max())
    if lowest == highest and 0 <= lowest < 1 << bits:
        return GroupedMatrix(codes, scales, bits, lowest, group_size, None, order)
    middle = 1 << (bits - 1)
    return GroupedMatrix(codes, scales, bits, middle, group_size, scales * (zeros.float() - middle), order)


def join_rows(kernels: Kernels, matrices: Sequence[GroupedMatrix | CodedMatrix]) -> Weight:
    """One weight of the matrices' rows: a single packed matrix where their groups, orders and tables agree."""
    grouped = [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]
    coded = [matrix for matrix in matrices if isinstance(matrix, CodedMatrix)]
    if not coded and all(_fits(grouped[0], matrix) for matrix in grouped):
        return GroupedWeight(kernels, _concatenated(grouped))
    if not grouped and all(fit(coded[0], matrix) for matrix in coded):
        return CodedWeight(kernels, stacked(coded))
    return JoinedWeight([join_rows(kernels, [matrix]) for matrix in matrices])


class JoinedWeight:
    """Several weights over the same inputs, their outputs concatenated."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        """`parts` in the order of their rows, all with the same number of inputs."""
        self._parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.shape[0] for part in self._parts), self._parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(part.nbytes for part in self._parts)

    @property
    def packed(self) -> None:
        """None: there are several packed matrices."""
        return None

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K] -> [M, N]."""
        sizes = [part.shape[0] for part in self._parts]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        return torch.cat([part.matmul(x, own) for part, own in zip(self._parts, biases, strict=True)], dim=1)

    def dequantize(self) -> Tensor:
        """The matrix all parts stand for -> [N, K]."""
        return torch.cat([part.dequantize() for part in self._parts])


def _fits(first: GroupedMatrix, other: GroupedMatrix) -> bool:
    """Whether their rows can be those of one matrix; the only tables of matrices that come here are e2m1's."""
    if (first.bits, first.group_size, first.unit_scale) != (other.bits, other.group_size, other.unit_scale):
        return False
    if (first.table is None) != (other.table is None):
        return False
    if first.input_order is None or other.input_order is None:
        return first.input_order is other.input_order
    return torch.equal(first.input_order, other.input_order)


def _concatenated(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix:
    if len(matrices) == 1:
        return matrices[0]
    first = matrices[0]
    same_zero = all(matrix.zero == first.zero for matrix in matrices)
    plain = same_zero and all(matrix.offsets is None for matrix in matrices)
    return replace(
        first,
        codes=torch.cat([matrix.codes for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        offsets=None if plain else torch.cat([_offsets_around(matrix, first.zero) for matrix in matrices]),
    )


def _offsets_around(matrix: GroupedMatrix, zero: int) -> Tensor:
    """The matrix's offsets if its codes are counted from `zero` instead of its own zero point."""
    moved = matrix.scales * (matrix.zero - zero)
    return moved if matrix.offsets is None else matrix.offsets + moved
