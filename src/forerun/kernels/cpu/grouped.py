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
from forerun.kernels.grouped import GroupedMatrix, check_matrix, scales_fit_half

STORAGES = (2, 3, 4, 5, 6, 8)  # bits a packed code may occupy
FLOAT32, FLOAT16, BYTES, NIBBLES = range(4)  # csrc: ScaleKind


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

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.panels.nbytes + (0 if self.order is None else self.order.nbytes)


def pack_matrix(matrix: GroupedMatrix, engine: _native.CpuEngine, arena: WeightArena) -> CpuGrouped:
    """Lay `matrix` out for the C++ kernels; raises KernelError where its tensors are not what C++ would read."""
    check_matrix(matrix)
    (num_outputs, num_inputs), kind = matrix.shape, _scale_kind(matrix)
    scales, offsets = _stored_scales(matrix, kind)
    table, storage, has_offsets = _whole(matrix.table), _storage(matrix), matrix.offsets is not None
    sizes = (num_inputs, matrix.group_size, storage, kind, has_offsets, matrix.groups_a_unit)
    layout = _native.GroupedLayout(*sizes, _address(table))
    panels = arena.take(-(-num_outputs // _native.LANES) * layout.panel_bytes, torch.uint8)
    numbers = (_whole(matrix.codes), scales, offsets, _whole(matrix.units), _whole(matrix.offset_units), panels)
    engine.pack_grouped(*map(_address, numbers), num_outputs, num_inputs, layout)
    order = _whole(matrix.input_order)
    return CpuGrouped(panels, panels.data_ptr(), order, _address(order), matrix.shape, matrix.zero, layout)


def _scale_kind(matrix: GroupedMatrix) -> int:
    if matrix.units is None:
        return FLOAT16 if scales_fit_half(matrix) else FLOAT32
    both = () if matrix.offsets is None else (matrix.scales, matrix.offsets)
    small = all(int(counts.min()) >= 0 and int(counts.max()) < 16 for counts in both)
    return NIBBLES if both and small else BYTES


def _stored_scales(matrix: GroupedMatrix, kind: int) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets as C++ reads them: one tensor where a byte holds both."""
    if kind == NIBBLES:
        assert matrix.offsets is not None
        return (matrix.scales | matrix.offsets << 4).contiguous(), None
    if kind == FLOAT16:
        return matrix.scales.half().contiguous(), None if matrix.offsets is None else matrix.offsets.half().contiguous()
    return matrix.scales.contiguous(), _whole(matrix.offsets)


def _storage(matrix: GroupedMatrix) -> int:
    """The fewest bits that hold every code; those of a table are always stored in four."""
    wanted = 4 if matrix.table is not None else int(matrix.codes.max()).bit_length()
    return next(bits for bits in STORAGES if bits >= wanted)


def _whole(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
