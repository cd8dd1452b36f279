"""Pieces of the attention kernels: what a row sees, the running softmax of a split, where results go.

Knows: visible indices, masks, one chunk of keys against one tile of queries. Does not know: layouts of pools.

A tile has LANES = 16 queries, the fewest a tensor core multiplies: HEADS query heads of one KV head for each of a few
rows. A query's arithmetic is the same in every lane and whatever the other lanes hold, so a row's bits do not depend
on its company. Lanes are masked by selection, never by multiplying with 0: what one row sees may be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.triton.products import tile_product

LANES = tl.constexpr(16)
SPLIT = tl.constexpr(256)  # `ops.ATTENTION_SPLIT`; a test compares them


@triton.jit
def count_bits(words):
    """Set bits of 64-bit words, by sums of neighbours (Hacker's Delight, 5-1)."""
    pairs = words - ((words >> 1) & 0x5555555555555555)
    fours = (pairs & 0x3333333333333333) + ((pairs >> 2) & 0x3333333333333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F0F0F0F0F
    eights += eights >> 8
    eights += eights >> 16
    return ((eights + (eights >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def select_bit(word, rank):
    """Where the set bit with `rank` [n] set bits below it is, for one word -> [n]; 0 if there are not so many."""
    place = tl.arange(0, 64)
    bit = ((word >> place.to(tl.int64)) & 1).to(tl.int32)
    below = tl.cumsum(bit, 0) - bit  # [64]
    found = (bit == 1)[None, :] & (below[None, :] == rank[:, None])  # [n, 64], one place a row at most
    return tl.sum(tl.where(found, place[None, :], 0), 1)


@triton.jit
def seen_by(row, inside, prefix_lens, tree_masks, WINDOW: tl.constexpr):
    """Visible indices of rows: the first that counts, the first that is in the tree, and how many there are."""
    prefix = tl.load(prefix_lens + row, inside, 0)
    count = prefix + count_bits(tl.load(tree_masks + row, inside, 0))
    if WINDOW > 0:
        first = tl.maximum(count - WINDOW, 0)
    else:
        first = tl.minimum(-WINDOW, count - 1)
    return first, prefix, count


@triton.jit
def reaches(split, first, count):
    """Whether rows of which keys first .. count-1 count have some in the split."""
    return (first // SPLIT <= split) & (split * SPLIT < count)


@triton.jit
def logical_rows(index, prefix, mask, start):
    """Logical rows of a row's ascending visible indices [n]; those beyond the last are of no use."""
    logical = index
    if prefix <= tl.max(index, 0):
        logical = tl.where(index < prefix, index, start + select_bit(mask, index - prefix))
    return logical


@triton.jit
def run_end(row, last_row, seq_ids, ROWS: tl.constexpr):
    """One past the last of the rows from `row` on that are of its sequence, ROWS at most."""
    other = row + tl.arange(0, ROWS)
    stranger = (tl.load(seq_ids + other, other < last_row, -1) != tl.load(seq_ids + row)) | (other >= last_row)
    return tl.min(tl.where(stranger, other, row + ROWS), 0)


@triton.jit
def starts_run(row, first_row, last_row, seq_ids, ROWS: tl.constexpr):
    """Whether `row` is the first of its sequence in its window of ROWS rows."""
    inner = (row - first_row) % ROWS != 0
    before = tl.load(seq_ids + row - 1, inner & (row < last_row), -1)
    return (row < last_row) & (before != tl.load(seq_ids + row, row < last_row, -2))


@triton.jit
def soften(scores, values, value_scales, top, total, acc):
    """A chunk of keys more in the softmax of a split.

    scores [LANES, n], -inf for keys that do not count; values [n, d]; value_scales [n] or None. top, total [LANES] and
    acc [LANES, d]: the largest score so far, the sum of weights relative to it, and that of weighted values.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing counted yet: weights are 0, not e^NaN
    shrink = tl.exp(top - base)
    weights = tl.exp(scores - base[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if value_scales is not None:
        weights = weights * value_scales[None, :]
    return new_top, total, acc * shrink[:, None] + tile_product(weights, values)


@triton.jit
def nothing(BLOCK_D: tl.constexpr):
    """(top, total, acc) before the first chunk."""
    top = tl.full((LANES,), float("-inf"), tl.float32)
    return top, tl.zeros((LANES,), tl.float32), tl.zeros((LANES, BLOCK_D), tl.float32)


@triton.jit
def choose(lanes, new, old):
    """(top, total, acc) of `new` in these lanes [LANES], of `old` in the others."""
    top = tl.where(lanes, new[0], old[0])
    total = tl.where(lanes, new[1], old[1])
    return top, total, tl.where(lanes[:, None], new[2], old[2])


@triton.jit
def chunks_of(split, lanes, first, prefix, count, CHUNK: tl.constexpr):
    """Four chunk numbers of a split: from the first to the second and from the third to the fourth, rows differ.

    Between the second and the third every lane in use counts every key, and visible indices are logical rows.
    """
    far: tl.constexpr = 0x7FFFFFFF
    begin = tl.maximum(split * (SPLIT // CHUNK), tl.min(tl.where(lanes, first, far), 0) // CHUNK)
    end = tl.minimum((split + 1) * (SPLIT // CHUNK), tl.cdiv(tl.max(tl.where(lanes, count, 0), 0), CHUNK))
    same = tl.cdiv(tl.max(tl.where(lanes, first, 0), 0), CHUNK)
    same = tl.minimum(tl.maximum(same, begin), end)
    differ = tl.min(tl.where(lanes, prefix, far), 0) // CHUNK
    return begin, same, tl.minimum(tl.maximum(differ, same), end), end


@triton.jit
def store_partial(work, lanes, slot, top, total, acc, column, DIM: tl.constexpr):
    """A split's result [LANES] into places `slot` [LANES] of the work space: DIM sums, then top and total."""
    place = work + slot * (DIM + 2)
    tl.store(place[:, None] + column[None, :], acc, lanes[:, None] & (column < DIM)[None, :])
    tl.store(place + DIM, top, lanes)
    tl.store(place + DIM + 1, total, lanes)


@triton.jit(do_not_specialize=["first_row", "num_splits"], do_not_specialize_on_alignment=["prefix_lens", "tree_masks"])
def combine_kernel(
    work, sinks, out, prefix_lens, tree_masks, first_row, num_splits,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of one row: its splits' sums relative to the largest score of all, added up in a fixed order."""
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    first, _, count = seen_by(row, row >= 0, prefix_lens, tree_masks, WINDOW)
    column = tl.arange(0, BLOCK_D)
    base = work + (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * num_splits * (DIM + 2)
    begin, end = first // SPLIT, tl.cdiv(count, SPLIT)
    top = tl.full((STEP,), float("-inf"), tl.float32)
    for start in range(begin // STEP * STEP, end, STEP):
        split = start + tl.arange(0, STEP)
        counts = (split >= begin) & (split < end)
        top = tl.maximum(top, tl.load(base + split * (DIM + 2) + DIM, counts, float("-inf")))
    largest = tl.max(top, 0)
    total = tl.zeros((STEP,), tl.float32)
    acc = tl.zeros((STEP, BLOCK_D), tl.float32)
    for start in range(begin // STEP * STEP, end, STEP):
        split = start + tl.arange(0, STEP)
        counts = (split >= begin) & (split < end)
        place = base + split * (DIM + 2)
        weight = tl.where(counts, tl.exp(tl.load(place + DIM, counts, 0.0) - largest), 0.0)
        total += weight * tl.load(place + DIM + 1, counts, 0.0)
        inside = counts[:, None] & (column < DIM)[None, :]
        acc += weight[:, None] * tl.load(place[:, None] + column[None, :], inside, 0.0)
    divisor = tl.sum(total, 0)
    if sinks is not None:
        divisor += tl.exp(tl.load(sinks + head) - largest)
    result = tl.math.div_rn(tl.sum(acc, 0), divisor)
    at = ((row.to(tl.int64)) * NUM_HEADS + head) * DIM + column
    tl.store(out + at, result, column < DIM)
