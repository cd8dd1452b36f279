"""Rows of GGUF's blocks as grouped matrices.

Knows: which block types there are, how blocks become a matrix, and matrices of several types one. Does not know: files,
names of tensors, kernels, nor what is in a block (`gguf_blocks`, `gguf_grids`).
numpy does the work on a few threads: torch's own threads wait for each other after every small operation, which on a
busy machine takes far longer than the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.grouped import GroupedMatrix
from forerun.quant.gguf_blocks import INTEGER_TYPES, Array, BlockType, Decoded
from forerun.quant.gguf_grids import GRID_TYPES

BLOCK_TYPES = INTEGER_TYPES | GRID_TYPES
_PORTION = 1 << 18  # entries decoded at a time


def decode_rows(name: str, rows: Tensor) -> GroupedMatrix:
    """The matrix of rows of blocks of the type `name` [N, bytes of a row] uint8.

    Raises CheckpointError for scales that are not finite.
    """
    kind, num_rows = BLOCK_TYPES[name], rows.shape[0]
    decoded = _decode(kind, rows.reshape(-1, kind.nbytes).numpy())
    if not all(np.isfinite(numbers).all() for numbers in decoded[1:] if numbers is not None):
        raise CheckpointError(f"its {name} blocks have scales that are not finite; the file is damaged, copy it again")

    def by_row(numbers: Array | None) -> Tensor | None:
        return None if numbers is None else torch.from_numpy(numbers).reshape(num_rows, -1)

    return GroupedMatrix(
        codes=torch.from_numpy(decoded.codes).reshape(num_rows, -1),
        scales=torch.from_numpy(decoded.scales).reshape(num_rows, -1),
        bits=kind.bits,
        zero=kind.zero,
        group_size=kind.group,
        offsets=by_row(decoded.offsets),
        units=by_row(decoded.units),
        offset_units=by_row(decoded.offset_units),
        table=None if kind.table is None else torch.tensor([value + kind.zero for value in kind.table]).byte(),
        unit_scale=kind.unit_scale,
        grid=None if kind.grid is None else kind.grid(),
        points=by_row(decoded.points),
    )


def _decode(kind: BlockType, blocks: Array) -> Decoded:
    """Decode blocks in portions, so that intermediate arrays stay small."""
    step, count = _PORTION // kind.size, len(blocks)
    starts = range(0, count, step)
    codes = np.empty((count, kind.size), np.uint8)

    def work(start: int) -> tuple[Array | None, ...]:
        with np.errstate(invalid="ignore"):  # who calls refuses NaN
            part = kind.decode(blocks[start : start + step])
        codes[start : start + step] = part.codes
        return part[1:]

    if len(starts) == 1:
        found = [work(0)]
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = list(pool.map(work, starts))
    scales, *others = (_concatenated(parts) for parts in zip(*found, strict=True))
    assert scales is not None
    return Decoded(codes, scales, *others)


def _concatenated(parts: Sequence[Array | None]) -> Array | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


def join_matrices(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """One matrix with the rows of all, which may be of different block types; every value stays as it is.

    The result has the smallest group size, the largest zero point and as many bits as its codes then need. It keeps
    units if all matrices have units for the same number of inputs, and a table or grid if all have the same one.
    """
    if len(matrices) == 1:
        return matrices[0]
    counted = [
        (matrix.units is None, matrix.group_size * matrix.groups_a_unit, matrix.unit_scale) for matrix in matrices
    ]
    if len(set(counted)) > 1:
        matrices = [matrix.multiplied_out() for matrix in matrices]
    if len({matrix.grid for matrix in matrices}) > 1:
        matrices = [matrix.off_grid() for matrix in matrices]
    if len({None if matrix.table is None else tuple(matrix.table.tolist()) for matrix in matrices}) > 1:
        matrices = [matrix.looked_up() for matrix in matrices]
    group, zero = min(matrix.group_size for matrix in matrices), max(matrix.zero for matrix in matrices)
    highest = max((1 << matrix.bits) - 1 + zero - matrix.zero for matrix in matrices)
    has_offsets = any(matrix.offsets is not None for matrix in matrices)
    return GroupedMatrix(
        codes=torch.cat([matrix.codes + (zero - matrix.zero) for matrix in matrices]),
        scales=torch.cat([_regrouped(matrix.scales, matrix.group_size // group) for matrix in matrices]),
        bits=4 if matrices[0].table is not None else highest.bit_length(),
        zero=zero,
        group_size=group,
        offsets=torch.cat([_offsets(matrix, group) for matrix in matrices]) if has_offsets else None,
        units=_together([matrix.units for matrix in matrices]),
        offset_units=_together([_offset_units(matrix) for matrix in matrices]) if has_offsets else None,
        table=matrices[0].table,
        unit_scale=matrices[0].unit_scale,
        grid=matrices[0].grid,
        points=_together([matrix.points for matrix in matrices]),
    )


def _together(tables: Sequence[Tensor | None]) -> Tensor | None:
    present = [table for table in tables if table is not None]
    return torch.cat(present) if present else None


def _offset_units(matrix: GroupedMatrix) -> Tensor | None:
    if matrix.units is None or matrix.offset_units is not None:
        return matrix.offset_units
    return torch.zeros_like(matrix.units)


def _regrouped(table: Tensor, factor: int) -> Tensor:
    """The table after every group is split into `factor` groups."""
    return table.repeat_interleave(factor, dim=1) if factor > 1 else table


def _offsets(matrix: GroupedMatrix, group: int) -> Tensor:
    table = torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
    return _regrouped(table, matrix.group_size // group)
