"""Packing matrices of small integers for the C++ kernels.

Knows: which storage holds a matrix without loss in the fewest bytes, and what C++ must be told about it. Does not
know: the layout (csrc/grouped_layout.h) nor the arithmetic (`forerun.kernels.grouped`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.cpu import _native
from forerun.kernels.cpu.arena import WeightArena
from forerun.kernels.grouped import GroupedMatrix, PointGrid, check_matrix, scales_fit_half

STORAGES = (2, 3, 4, 5, 6, 8)  # bits a packed code may occupy
FLOAT32, FLOAT16, BYTES, NIBBLES, POWERS, FLOAT8, ODD_NIBBLES, SIGNED_NIBBLES = range(8)  # csrc: ScaleKind
STRETCH, SECTION = 64, 512  # inputs: whole stretches have points of a grid, and whole groups make a section


@dataclass(frozen=True, slots=True)
class CpuGrouped:
    """A grouped matrix in panels of 16 outputs."""

    panels: Tensor  # flat, uint8
    address: int
    order: Tensor | None  # [K] int64, contiguous
    order_address: int  # 0 without an order
    shape: tuple[int, int]  # (N, K)
    zero: int  # what a code of 0 stands for is -zero
    layout: _native.GroupedLayout
    grid: PointGrid | None  # whose points C++ reads

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.panels.nbytes + (0 if self.order is None else self.order.nbytes)


def pack_matrix(matrix: GroupedMatrix, engine: _native.CpuEngine, arena: WeightArena) -> CpuGrouped:
    """Lay `matrix` out for the C++ kernels; raises KernelError where its tensors are not what C++ would read."""
    check_matrix(matrix)
    # Runs of four are read eight times as slowly as codes of four bits, for a fifth of the memory (docs/log.md).
    slow = matrix.grid is not None and matrix.grid.run == 4
    if slow or matrix.shape[1] % STRETCH or SECTION % matrix.group_size:
        matrix = matrix.off_grid()
    num_outputs, num_inputs = matrix.shape
    kind, scales, offsets = _stored_scales(matrix)
    table, storage, has_offsets, grid = _whole(matrix.table), _storage(matrix), matrix.offsets is not None, matrix.grid
    sizes = (num_inputs, matrix.group_size, storage, kind, has_offsets, matrix.groups_a_unit)
    shape = (0, 0, 0, 0) if grid is None else (_address(grid.points), grid.run, grid.bits, grid.signs)
    layout = _native.GroupedLayout(*sizes, _address(table), matrix.unit_scale, *shape)
    panels = arena.take(-(-num_outputs // _native.LANES) * layout.panel_bytes, torch.uint8)
    offset_units = None if kind == SIGNED_NIBBLES else _whole(matrix.offset_units)
    units, points = _whole(matrix.units), _whole(matrix.points)
    numbers = (_whole(matrix.codes), scales, offsets, units, offset_units, points, panels)
    engine.pack_grouped(*map(_address, numbers), num_outputs, num_inputs, layout)
    order = _whole(matrix.input_order)
    return CpuGrouped(panels, panels.data_ptr(), order, _address(order), matrix.shape, matrix.zero, layout, grid)


def _stored_scales(matrix: GroupedMatrix) -> tuple[int, Tensor, Tensor | None]:
    """Their kind, scales and offsets as C++ reads them: one tensor where a byte holds both."""
    scales, offsets = matrix.scales.contiguous(), _whole(matrix.offsets)
    if matrix.units is None:
        return _stored_floats(matrix, scales, offsets)
    if matrix.groups_a_unit % 2 == 0 and (nibbles := _odd_nibbles(matrix)) is not None:
        kind = ODD_NIBBLES if offsets is None else SIGNED_NIBBLES
        return kind, nibbles[:, 0::2] | nibbles[:, 1::2] << 4, None
    if offsets is not None and all(int(counts.min()) >= 0 and int(counts.max()) < 16 for counts in (scales, offsets)):
        return NIBBLES, scales | offsets << 4, None
    return BYTES, scales, offsets


def _odd_nibbles(matrix: GroupedMatrix) -> Tensor | None:
    """Scales 2 n + 1 as n; scales 8 (2 n + 1) with offsets of 2 n + 1 as n, and 8 more where those are positive."""
    scales, offsets = matrix.scales, matrix.offsets
    odd = scales if offsets is None else offsets.abs()
    if not bool(((odd & 1 == 1) & (odd > 0) & (odd < (32 if offsets is None else 16))).all()):
        return None
    if offsets is None:
        return (odd >> 1).byte()
    assert matrix.units is not None and matrix.offset_units is not None
    same = torch.equal(scales, 8 * odd) and torch.equal(matrix.units, matrix.offset_units)
    return ((odd >> 1) | (offsets > 0).char() << 3).byte() if same else None


def _stored_floats(matrix: GroupedMatrix, scales: Tensor, offsets: Tensor | None) -> tuple[int, Tensor, Tensor | None]:
    """Float32 scales and offsets in the fewest bytes that hold them exactly."""
    for kind, as_bytes in ((POWERS, _power_bytes), (FLOAT8, _float8_bytes)):
        if offsets is None and as_bytes(scales[:1]) is not None and (stored := as_bytes(scales)) is not None:
            return kind, stored, None
    if scales_fit_half(matrix):
        return FLOAT16, scales.half(), None if offsets is None else offsets.half()
    return FLOAT32, scales, offsets


def _power_bytes(scales: Tensor) -> Tensor | None:
    """Powers of two: their exponents, counted from -128."""
    mantissas, exponents = torch.frexp(scales)
    fit = (mantissas == 0.5) & (exponents >= -127)
    return (exponents + 127).byte() if bool(fit.all()) else None


def _float8_bytes(scales: Tensor) -> Tensor | None:
    """Halves of numbers that e4m3 has."""
    small = (2 * scales).to(torch.float8_e4m3fn)
    exact = torch.equal(small.float(), 2 * scales) and not bool(scales.signbit().any())
    return small.view(torch.uint8) if exact else None


def _storage(matrix: GroupedMatrix) -> int:
    """The fewest bits that hold every code; those of a table are always stored in four."""
    wanted = 4 if matrix.table is not None else int(matrix.codes.max()).bit_length()
    return next(bits for bits in STORAGES if bits >= wanted)


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
