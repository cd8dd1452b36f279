"""Packing matrices of small integers for the C++ kernels.

Knows: which storage holds a matrix without loss in the fewest bytes, and what C++ must be told about it. Does not
know: the layout (csrc/grouped_layout.h) nor the arithmetic (`forerun.kernels.grouped`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forerun.kernels.cpu import _native
from forerun.kernels.cpu.arena import WeightArena
from forerun.kernels.grouped import GroupedMatrix, PointGrid, check_matrix
from forerun.kernels.stored_scales import KINDS, stored_scales

STORAGES = (2, 3, 4, 5, 6, 8)  # bits a packed code may occupy
STRETCH, SECTION = 128, 512  # inputs: whole stretches have points of a grid, and whole groups make a section


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
    points: Tensor | None  # of a grid, which C++ reads

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.panels.nbytes + (0 if self.order is None else self.order.nbytes)


def pack_matrix(matrix: GroupedMatrix, engine: _native.CpuEngine, arena: WeightArena) -> CpuGrouped:
    """Lay `matrix` out for the C++ kernels; raises KernelError where its tensors are not what C++ would read."""
    check_matrix(matrix)
    if matrix.shape[1] % STRETCH or SECTION % matrix.group_size:
        matrix = matrix.off_grid()
    num_outputs, num_inputs = matrix.shape
    stored = stored_scales(matrix)
    table, storage, has_offsets, grid = _whole(matrix.table), _storage(matrix), matrix.offsets is not None, matrix.grid
    sizes = (num_inputs, matrix.group_size, storage, KINDS.index(stored.kind), has_offsets, matrix.groups_a_unit)
    words = None if grid is None else _words(grid)
    shape = (0, 0, 0) if grid is None else (grid.run, grid.bits, grid.signs)
    layout = _native.GroupedLayout(*sizes, _address(table), matrix.unit_scale, _address(words), *shape)
    panels = arena.take(-(-num_outputs // _native.LANES) * layout.panel_bytes, torch.uint8)
    numbers = [_whole(tensor) for tensor in (matrix.codes, *stored[1:], matrix.points)]
    engine.pack_grouped(*map(_address, (*numbers, panels)), num_outputs, num_inputs, layout)
    order = _whole(matrix.input_order)
    return CpuGrouped(panels, panels.data_ptr(), order, _address(order), matrix.shape, matrix.zero, layout, words)


@lru_cache(32)
def _words(grid: PointGrid) -> Tensor:
    """Its points as csrc/grouped_layout.h says -> [2 ** bits] int16."""
    place = torch.arange(grid.run)
    shifts = place % 2 * 8 + place // 2 % 2 * 4 + place // 4 * 2
    words = torch.zeros(1 << grid.bits, dtype=torch.int16)
    words[: len(grid.points)] = (grid.points.int() << shifts).sum(dim=1).short()
    return words


def _storage(matrix: GroupedMatrix) -> int:
    """The fewest bits that hold every code; those of a table are always stored in four."""
    wanted = 4 if matrix.table is not None else int(matrix.codes.max()).bit_length()
    return next(bits for bits in STORAGES if bits >= wanted)


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
