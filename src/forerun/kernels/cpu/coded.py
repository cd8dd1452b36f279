"""Packing matrices of codes for the C++ kernels.

Knows: where codes and scales lie in a panel of 16 outputs (csrc/coded.inc reads them there). Does not know: the
arithmetic.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from forerun.kernels.coded import CodedMatrix
from forerun.kernels.cpu import _native
from forerun.kernels.cpu.arena import WeightArena
from forerun.kernels.cpu.packed import CpuLinear

FLOAT32_CODE = 0  # the products' type
LINE = 64  # bytes; every part of a panel begins at a multiple


def pack_matrix(matrix: CodedMatrix, arena: WeightArena) -> CpuLinear:
    """Lay `matrix` out for the C++ kernels: codes input by input, scales group by group, shifts and units."""
    num_outputs, num_inputs = matrix.shape
    codes = _by_lanes(matrix.codes)  # [P, K, 16]
    if matrix.values is not None:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = {"codes": codes, "scales": _by_lanes(matrix.scales)}
    if matrix.units is not None and matrix.shifts is not None:
        parts["units"] = _by_lanes(torch.cat([matrix.shifts[:, None], matrix.units], dim=1))
    if matrix.offsets is not None:
        parts["offsets"] = _by_lanes(matrix.offsets)
    lines = {name: _in_lines(part) for name, part in parts.items()}
    ends = dict(zip(lines, accumulate(part.shape[1] for part in lines.values()), strict=True))
    size = max(ends.values())
    panels = arena.take(len(codes) * size, torch.uint8)
    for name, part in lines.items():
        panels.view(-1, size)[:, ends[name] - part.shape[1] : ends[name]] = part
    tables = tuple(
        None if table is None else table.contiguous()
        for table in (matrix.values, matrix.scale_values, matrix.input_order)
    )
    addresses = [0 if table is None else table.data_ptr() for table in tables]
    starts = [ends[name] - lines[name].shape[1] if name in lines else 0 for name in ("scales", "units", "offsets")]
    zero = -1 if matrix.zero is None else matrix.zero
    # csrc's CodedLayout, word by word
    layout = torch.tensor([*addresses, zero, matrix.group_size, matrix.groups_a_unit, *starts, size])
    held, sizes = (layout, *tables), (num_outputs, num_inputs, num_outputs)
    return CpuLinear(panels, panels.data_ptr(), *sizes, FLOAT32_CODE, layout.data_ptr(), held)


def _by_lanes(rows: Tensor) -> Tensor:
    """Rows [N, C] in panels of 16, filled up with zeros -> [P, C, 16]."""
    lanes = _native.LANES
    filled = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % lanes))
    return filled.view(-1, lanes, rows.shape[1]).transpose(1, 2).contiguous()


def _in_lines(part: Tensor) -> Tensor:
    """A panel's numbers [P, C, 16] as bytes, filled up to whole lines -> [P, bytes]."""
    flat = part.flatten(1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % LINE))
