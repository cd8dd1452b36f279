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
    (num_outputs, num_inputs), half = matrix.shape, scales_fit_half(matrix)
    has_offsets = matrix.offsets is not None
    layout = _native.GroupedLayout(num_inputs, matrix.group_size, _storage(matrix.codes), half, has_offsets)
    panels = arena.take(-(-num_outputs // _native.LANES) * layout.panel_bytes, torch.uint8)
    codes, scales = matrix.codes.contiguous(), _stored(matrix.scales, half)
    offsets = None if matrix.offsets is None else _stored(matrix.offsets, half)
    addresses = (codes.data_ptr(), scales.data_ptr(), _address(offsets), panels.data_ptr())
    engine.pack_grouped(*addresses, num_outputs, num_inputs, layout)
    order = None if matrix.input_order is None else matrix.input_order.contiguous()
    return CpuGrouped(panels, panels.data_ptr(), order, _address(order), matrix.shape, matrix.zero, layout)


def _storage(codes: Tensor) -> int:
    """The fewest bits that hold every code."""
    wanted = int(codes.max()).bit_length()
    return next(bits for bits in STORAGES if bits >= wanted)


def _stored(values: Tensor, half: bool) -> Tensor:
    return (values.half() if half else values).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
