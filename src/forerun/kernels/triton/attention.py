"""Attention over a paged pool of keys and values, split over the context (flash-decoding).

Knows: the layout of pools, which program computes what. Does not know: rotations, what rows mean. A program takes up
to 16 queries of one KV head, rows of one sequence with all heads of its group, over one split of 256 visible keys; what
its rows share of the keys it reads once. Its results go to a work space, from which `combine_kernel` makes the output.
Prefill, decoding and verification are this one kernel, so that their bits agree.

Source: flash-decoding, Dao et al. 2023; PagedAttention, Kwon et al. 2023 (2309.06180).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import AttentionRows, HeadLayout, LayerKV
from forerun.kernels.triton.attention_keys import run_split
from forerun.kernels.triton.attention_plan import ROW_TENSORS, UNSPECIALIZED, Slice, Tiling, run_in_turns
from forerun.kernels.triton.attention_tiles import LANES, reaches, run_end, seen_by, starts_run, store_partial
from forerun.kernels.triton.common import EXACT, aligned, power_of_two
from forerun.kernels.triton.rope import check_pool


def attention(
    qkv: Tensor, heads: HeadLayout, kv: LayerKV, rows: AttentionRows, scale: float, window: int = 0, chunk: int = 0,
    sinks: Tensor | None = None, cap: float = 0.0,
) -> Tensor:  # fmt: skip
    """See `Kernels.attention`; chunks are refused."""
    if chunk:
        raise KernelError("the Triton kernels have no attention in chunks (Llama 4); choose --device cpu")
    check_pool(kv, latent=False)
    tiling = Tiling.of(heads.num_q // heads.num_kv, heads.num_kv)
    block_d = power_of_two(heads.head_dim, 16)
    constants = (
        heads.num_q, heads.num_kv, heads.head_dim, heads.row_size, kv.block_size, window, cap,
        block_d, chunk_size(block_d, kv.keys.element_size()), tiling.rows, tiling.heads,
    )  # fmt: skip
    queries = aligned(qkv)

    def launch(grid: tuple[int, int, int], work: Tensor, part: Slice) -> None:
        _attention_kernel[grid](
            queries, kv.keys, kv.values, kv.key_scales, kv.value_scales, work,
            rows.seq_ids, rows.prefix_lens, rows.tree_masks, rows.tree_starts, rows.block_tables,
            rows.block_tables.stride(0), scale, part.first_row, part.last_row, part.num_splits, part.splits,
            *constants, part.stride, num_warps=warps_of(block_d), num_stages=2, **EXACT,
        )  # fmt: skip

    out = torch.empty(qkv.shape[0], heads.num_q * heads.head_dim, device=qkv.device)
    run_in_turns(launch, out.view(-1, heads.num_q, heads.head_dim), rows, tiling, window, sinks)
    return out


def chunk_size(block_d: int, itemsize: int) -> int:
    """Keys a program multiplies at once: 64, or fewer where a tile of them would take more than 32 KiB."""
    return max(16, min(64, (32 << 10) // (block_d * itemsize)))


def warps_of(block_d: int) -> int:
    """Warps of a program: with 4, sums of 256 columns would no longer fit into registers."""
    return 4 if block_d <= 128 else 8


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _attention_kernel(
    qkv, keys, values, key_scales, value_scales, work,
    seq_ids, prefix_lens, tree_masks, tree_starts, block_tables,
    table_stride, scale, first_row, last_row, num_splits, splits,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, ROW_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = NUM_Q // NUM_KV
    kv_head, first_split = tl.program_id(1) % NUM_KV, tl.program_id(2) * splits
    lane, column = tl.arange(0, LANES), tl.arange(0, BLOCK_D)
    in_group = tl.program_id(1) // NUM_KV * HEADS + lane % HEADS  # [LANES]
    pool, seen = (keys, values, key_scales, value_scales), (prefix_lens, tree_masks)
    for step in range(STRIDE):
        start = first_row + tl.program_id(0) * STRIDE + step
        if starts_run(start, first_row, last_row, seq_ids, ROWS):
            end = run_end(start, last_row, seq_ids, ROWS)
            row, head = start + lane // HEADS, kv_head * GROUP + in_group  # [LANES]
            used = (row < end) & (in_group < GROUP)
            first, prefix, count = seen_by(row, row < end, prefix_lens, tree_masks, WINDOW)
            at = (row.to(tl.int64) * ROW_SIZE + head * DIM)[:, None] + column[None, :]
            queries = tl.load(qkv + at, used[:, None] & (column < DIM)[None, :], 0.0)
            sequence = tl.load(seq_ids + start)
            table, tree_start = block_tables + sequence.to(tl.int64) * table_stride, tl.load(tree_starts + sequence)
            place = ((row - first_row).to(tl.int64) * NUM_Q + head) * num_splits
            for split in range(first_split, tl.minimum(first_split + splits, num_splits)):
                lanes = used & reaches(split, first, count)
                if tl.max(lanes.to(tl.int32), 0) > 0:
                    top, total, acc = run_split(
                        queries, pool, table, kv_head, seen, tree_start, split, start, end, row, lanes,
                        first, prefix, count, scale, NUM_KV, DIM, 0, BLOCK_D, BLOCK_SIZE, WINDOW, CAP, CHUNK,
                    )  # fmt: skip
                    store_partial(work, lanes, place + split, top, total, acc, column, DIM)
