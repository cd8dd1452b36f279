"""How attention is cut into programs, and the work space they leave their results in.

Knows: sizes the host knows, how many programs keep a GPU busy. Does not know: what a program computes, pools. Nothing
here may change a row's bits: rows are independent, and a row's splits are always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from forerun.kernels.ops import ATTENTION_SPLIT, AttentionRows
from forerun.kernels.triton.attention_tiles import combine_kernel
from forerun.kernels.triton.common import EXACT, power_of_two

TILE_LANES = 16  # queries of a program
FEW_ROWS = 64  # up to here every row may start a program; beyond, most of them would have nothing to do
WORK_BYTES = 256 << 20  # results of splits kept at a time
_COMBINE_STEP = 16  # splits that `combine_kernel` loads at once

WANTED_PROGRAMS = 2112  # 16 for each of an H200's 132 multiprocessors; with more, programs take several splits
MAX_SPLITS = 8  # of a program
UNSPECIALIZED = ("table_stride", "first_row", "last_row", "num_splits", "splits")  # arguments that change with a batch
ROW_TENSORS = (
    "seq_ids",
    "prefix_lens",
    "tree_masks",
    "tree_starts",
    "block_tables",
)  # parts of one tensor, so unaligned


class Slice(NamedTuple):
    """What one launch computes."""

    first_row: int
    last_row: int  # one past the last
    stride: int  # rows a program looks at for the first of a sequence
    num_splits: int  # of the longest row
    splits: int  # that a program takes, one after the other


Launch = Callable[[tuple[int, int, int], Tensor, Slice], None]


class Tiling(NamedTuple):
    """The queries of a tile: `heads` heads of one group for each of `rows` rows."""

    rows: int
    heads: int
    num_tiles: int  # for all heads of a row

    @classmethod
    def of(cls, group: int, num_kv: int) -> Tiling:
        """A group of `group` query heads to each of `num_kv` KV heads."""
        heads = min(TILE_LANES, power_of_two(group))
        return cls(TILE_LANES // heads, heads, num_kv * triton.cdiv(group, heads))


def run_in_turns(
    launch: Launch, out: Tensor, rows: AttentionRows, tiling: Tiling, window: int, sinks: Tensor | None = None
) -> None:
    """Fill out [M, Q, D]: as many rows at a time as the work space holds results of."""
    num_rows, num_heads, dim = out.shape
    num_splits = max(1, triton.cdiv(rows.max_visible, ATTENTION_SPLIT))
    turn = rows_of_turn(num_rows, num_heads * num_splits * (dim + 2) * 4, tiling)
    work = torch.empty(turn, num_heads, num_splits, dim + 2, device=out.device)
    for first_row in range(0, num_rows, turn):
        part = slice_of(first_row, min(first_row + turn, num_rows), num_splits, tiling)
        launch(grid_of(part, tiling), work, part)
        combine_kernel[(part.last_row - first_row, num_heads)](
            work, sinks, out, rows.prefix_lens, rows.tree_masks, first_row, num_splits,
            num_heads, dim, power_of_two(dim), window, _COMBINE_STEP, **EXACT,
        )  # fmt: skip


def slice_of(first_row: int, last_row: int, num_splits: int, tiling: Tiling) -> Slice:
    """These rows, by as many programs as keep the GPU busy."""
    stride = 1 if last_row - first_row <= FEW_ROWS else tiling.rows
    busy = triton.cdiv(last_row - first_row, tiling.rows) * tiling.num_tiles * num_splits  # programs with work to do
    splits = max(1, min(MAX_SPLITS, busy // WANTED_PROGRAMS))
    return Slice(first_row, last_row, stride, num_splits, splits)


def grid_of(part: Slice, tiling: Tiling) -> tuple[int, int, int]:
    """Programs by rows, heads and splits."""
    num_rows = part.last_row - part.first_row
    return triton.cdiv(num_rows, part.stride), tiling.num_tiles, triton.cdiv(part.num_splits, part.splits)


def rows_of_turn(num_rows: int, row_bytes: int, tiling: Tiling) -> int:
    """Rows whose results fit into the work space, whole tiles of them, at least one tile."""
    tiles = max(1, WORK_BYTES // (row_bytes * tiling.rows))
    return max(1, min(num_rows, tiles * tiling.rows))
