"""Keys and values from a paged pool into the softmax of one split: for many queries at once, or row by row.

Knows: the layout of pools, int8 scales, which of its keys a tile's rows share. Does not know: rotations, what rows
mean, where results go. A pool of keys and values is (keys, values, key scales or None, value scales or None), one of
latents (values,).
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.triton.attention_tiles import choose, chunks_of, logical_rows, nothing, seen_by, soften
from forerun.kernels.triton.norms import soft_cap
from forerun.kernels.triton.products import tile_product


@triton.jit
def _locate(table, logical, inside, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Blocks [n] int64 and offsets [n] of logical rows; block 0 where not `inside`."""
    if MASKED:
        block = tl.load(table + logical // BLOCK_SIZE, inside, 0)
    else:
        block = tl.load(table + logical // BLOCK_SIZE)
    return block.to(tl.int64), logical % BLOCK_SIZE


@triton.jit
def _load_tile(pointers, inside, MASKED: tl.constexpr):
    """A tile, 0 where not `inside`; without a mask loads are wider."""
    if MASKED:
        tile = tl.load(pointers, inside, 0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _plain_scores(
    queries, pool, place, offset, inside, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """queries [LANES, d] times keys; `place` [n] counts blocks of one head -> [LANES, n]."""
    column = tl.arange(0, queries.shape[1])
    at = place[None, :] * (DIM * BLOCK_SIZE) + (column[:, None] * BLOCK_SIZE + offset[None, :])
    whole = (column < DIM)[:, None] & inside[None, :]
    keys = _load_tile(pool[0] + at, whole, MASKED or queries.shape[1] != DIM)  # [d, n]
    if pool[2] is not None:
        scales = _load_tile(pool[2] + place * BLOCK_SIZE + offset, inside, MASKED)
        scores = tile_product(queries, keys.to(tl.float32).to(tl.bfloat16)) * scales[None, :]
    else:
        scores = tile_product(queries, keys)
    return scores


@triton.jit
def _plain_values(
    state, scores, pool, place, offset, inside,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax with these scores [LANES, n] and their values added."""
    column = tl.arange(0, BLOCK_D)
    at = place[:, None] * (DIM * BLOCK_SIZE) + (offset[:, None] * DIM + column[None, :])
    whole = (column < DIM)[None, :] & inside[:, None]
    values = _load_tile(pool[1] + at, whole, MASKED or BLOCK_D != DIM)  # [n, d]
    if pool[3] is not None:
        scales = _load_tile(pool[3] + place * BLOCK_SIZE + offset, inside, MASKED)
        state = soften(scores, values.to(tl.float32).to(tl.bfloat16), scales, state[0], state[1], state[2])
    else:
        state = soften(scores, values, None, state[0], state[1], state[2])
    return state


@triton.jit
def _latent_scores(
    queries, used, pool, position, inside, DIM: tl.constexpr, MASKED: tl.constexpr, PIECE: tl.constexpr = 64
):  # fmt: skip
    """Queries that `queries` [LANES] points to times whole vectors at `position` [n] of the pool -> [LANES, n].

    PIECE entries at a time: a whole query in three parts would not fit into registers.
    """
    scores = tl.zeros((queries.shape[0], position.shape[0]), tl.float32)
    for start in range(0, DIM, PIECE):
        column = start + tl.arange(0, PIECE)
        query = tl.load(queries[:, None] + column[None, :], used[:, None] & (column < DIM)[None, :], 0.0)
        whole = (column < DIM)[:, None] & inside[None, :]
        keys = _load_tile(pool[0] + (position[None, :] * DIM + column[:, None]), whole, MASKED or DIM % PIECE != 0)
        scores += tile_product(query, keys)
    return scores


@triton.jit
def _latent_values(
    state, scores, pool, position, inside,
    DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    whole = (column < RANK)[None, :] & inside[:, None]
    values = _load_tile(pool[0] + (position[:, None] * DIM + column[None, :]), whole, MASKED or BLOCK_D != RANK)
    return soften(scores, values, None, state[0], state[1], state[2])


@triton.jit
def _add_keys(
    state, queries, used, pool, table, kv_head, logical, inside, lanes, scale,
    NUM_KV: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The keys at `logical` [n] that are `inside` added for `lanes` [LANES]; all keys for all lanes if not MASKED."""
    block, offset = _locate(table, logical, inside, BLOCK_SIZE, MASKED)
    place = block * NUM_KV + kv_head
    position = block * BLOCK_SIZE + offset  # [n]
    if RANK > 0:
        scores = _latent_scores(queries, used, pool, position, inside, DIM, MASKED) * scale
    else:
        scores = _plain_scores(queries, pool, place, offset, inside, DIM, BLOCK_SIZE, MASKED) * scale
    if CAP > 0:
        scores = soft_cap(scores, CAP)
    if MASKED:
        scores = tl.where(lanes[:, None] & inside[None, :], scores, float("-inf"))
    if RANK > 0:
        new = _latent_values(state, scores, pool, position, inside, DIM, RANK, BLOCK_D, MASKED)
    else:
        new = _plain_values(state, scores, pool, place, offset, inside, DIM, BLOCK_D, BLOCK_SIZE, MASKED)
    if MASKED:
        new = choose(lanes, new, state)
    return new


@triton.jit
def _add_row_by_row(
    state, queries, used, pool, table, kv_head, seen, tree_start, chunk, start, end, row, scale,
    NUM_KV: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of which rows start .. end-1 see different keys; `row` [LANES], `seen` prefix lengths and masks."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    for one in range(start, end):
        first, prefix, count = seen_by(one, one >= 0, seen[0], seen[1], WINDOW)
        if (first < (chunk + 1) * CHUNK) & (chunk * CHUNK < count):
            logical = logical_rows(index, prefix, tl.load(seen[1] + one), tree_start)
            state = _add_keys(
                state, queries, used, pool, table, kv_head, logical, (index >= first) & (index < count), row == one,
                scale, NUM_KV, DIM, RANK, BLOCK_D, BLOCK_SIZE, CAP, True,
            )  # fmt: skip
    return state


@triton.jit
def run_split(
    queries, pool, table, kv_head, seen, tree_start, split, start, end, row, lanes, first, prefix, count, scale,
    NUM_KV: tl.constexpr, DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One split for the rows start .. end-1 of one sequence -> (top, total, acc) of the lanes that reach it.

    queries [LANES, d], or pointers [LANES] if RANK > 0, of a pool of latents of that rank; `row`, and what `seen_by`
    says of it, [LANES]; `lanes` [LANES] reach the split. `table` points to the sequence's blocks; sums have BLOCK_D
    columns.
    """
    begin, same, differ, stop = chunks_of(split, lanes, first, prefix, count, CHUNK)
    state = nothing(BLOCK_D)
    # Once each for the compiler: chunks before the shared ones (windows alone have some), then those and what follows.
    for phase in range(0 if WINDOW != 0 else 1, 2):
        for chunk in range(same, tl.where(phase == 0, same, differ)):
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            state = _add_keys(
                state, queries, lanes, pool, table, kv_head, index, index >= 0, lanes, scale,
                NUM_KV, DIM, RANK, BLOCK_D, BLOCK_SIZE, CAP, False,
            )  # fmt: skip
        for chunk in range(tl.where(phase == 0, begin, differ), tl.where(phase == 0, same, stop)):
            state = _add_row_by_row(
                state, queries, lanes, pool, table, kv_head, seen, tree_start, chunk, start, end, row, scale,
                NUM_KV, DIM, RANK, BLOCK_D, BLOCK_SIZE, WINDOW, CAP, CHUNK,
            )  # fmt: skip
    return state
