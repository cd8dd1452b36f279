"""Attention over a paged pool of latents (multi-head latent attention in absorbed form).

Knows: which program computes what. Does not know: rotations, projections into the latent space. Every head looks at
the same vectors: a program takes up to 16 heads of a row, or all heads of a few rows, over one split of 256 visible
keys.

Source: DeepSeek-V2 (2405.04434), section 2.1; flash-decoding, Dao et al. 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.ops import AttentionRows, LatentLayout, LayerKV
from forerun.kernels.triton.attention_keys import run_split
from forerun.kernels.triton.attention_plan import ROW_TENSORS, UNSPECIALIZED, Slice, Tiling, run_in_turns
from forerun.kernels.triton.attention_tiles import LANES, reaches, run_end, seen_by, starts_run, store_partial
from forerun.kernels.triton.common import EXACT, aligned, power_of_two
from forerun.kernels.triton.rope import check_pool

CHUNK = 32  # keys a program multiplies at once: 32 KiB of values at rank 512


def latent_attention(
    queries: Tensor, layout: LatentLayout, kv: LayerKV, rows: AttentionRows, scale: float
) -> Tensor:  # fmt: skip
    """See `Kernels.latent_attention`."""
    check_pool(kv, latent=True)
    tiling = Tiling.of(layout.num_heads, 1)
    constants = (
        layout.num_heads, layout.key_dim, layout.rank, kv.block_size,
        power_of_two(layout.rank, 16), CHUNK, tiling.rows, tiling.heads,
    )  # fmt: skip
    source = aligned(queries)

    def launch(grid: tuple[int, int, int], work: Tensor, part: Slice) -> None:
        _latent_attention_kernel[grid](
            source, kv.values, work,
            rows.seq_ids, rows.prefix_lens, rows.tree_masks, rows.tree_starts, rows.block_tables,
            rows.block_tables.stride(0), scale, part.first_row, part.last_row, part.num_splits, part.splits,
            *constants, part.stride, num_warps=8, num_stages=2, **EXACT,
        )  # fmt: skip

    out = torch.empty(queries.shape[0], layout.num_heads * layout.rank, device=queries.device)
    run_in_turns(launch, out.view(-1, layout.num_heads, layout.rank), rows, tiling, 0)
    return out


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=ROW_TENSORS)
def _latent_attention_kernel(
    queries, values, work, seq_ids, prefix_lens, tree_masks, tree_starts, block_tables,
    table_stride, scale, first_row, last_row, num_splits, splits,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    lane, first_split, seen = tl.arange(0, LANES), tl.program_id(2) * splits, (prefix_lens, tree_masks)
    head = tl.program_id(1) * HEADS + lane % HEADS  # [LANES]
    for step in range(STRIDE):
        start = first_row + tl.program_id(0) * STRIDE + step
        if starts_run(start, first_row, last_row, seq_ids, ROWS):
            end = run_end(start, last_row, seq_ids, ROWS)
            row = start + lane // HEADS  # [LANES]
            used = (row < end) & (head < NUM_HEADS)
            first, prefix, count = seen_by(row, row < end, prefix_lens, tree_masks, 0)
            pointers = queries + (row.to(tl.int64) * NUM_HEADS + head) * DIM
            sequence = tl.load(seq_ids + start)
            table, tree_start = block_tables + sequence.to(tl.int64) * table_stride, tl.load(tree_starts + sequence)
            place = ((row - first_row).to(tl.int64) * NUM_HEADS + head) * num_splits
            for split in range(first_split, tl.minimum(first_split + splits, num_splits)):
                lanes = used & reaches(split, first, count)
                if tl.max(lanes.to(tl.int32), 0) > 0:
                    top, total, acc = run_split(
                        pointers, (values,), table, 0, seen, tree_start, split, start, end, row, lanes,
                        first, prefix, count, scale, 1, DIM, RANK, BLOCK_D, BLOCK_SIZE, 0, 0.0, CHUNK,
                    )  # fmt: skip
                    store_partial(work, lanes, place + split, top, total, acc, tl.arange(0, BLOCK_D), RANK)
