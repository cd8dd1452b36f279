"""Draft trees on the device: a launch a level chooses what is kept and expanded and says what the next pass computes.

Knows: what `kernels.tree_growth` does in torch, here by one program a tree. Does not know: passes, logits, requests.

A tree has 64 nodes and a level up to 256 children, few enough to count: a node's rank is how many go before it.
Sums of integers have no order and a log chance is one sum, so numbers and ties are those of torch, bit by bit.

A tree that never had a leaf repeats a row of the first tree, which another program chooses at the same time: it chooses
for the first tree once more. Nothing that a launch reads is written by it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import tree_growth as trees
from forerun.kernels.tree_growth import TreeNodes, TreeRoom, TreeRows
from forerun.kernels.triton.common import EXACT, power_of_two

NODES, COLUMNS = tl.constexpr(trees.MOST_NODES), tl.constexpr(6)
TOKENS, PARENTS, DEPTHS = tl.constexpr(trees.TOKENS), tl.constexpr(trees.PARENTS), tl.constexpr(trees.DEPTHS)
CHANCES, PLACES, MASKS = tl.constexpr(trees.CHANCES), tl.constexpr(trees.PLACES), tl.constexpr(trees.MASKS)
NEVER = tl.constexpr(float("-inf"))
NEVER_BITS = tl.constexpr(-(1 << 52))  # of -inf as float64
ABSENT = tl.constexpr((-1, 0, 0, -(1 << 52), -1, 0))  # columns of a node that is not there
CHUNK = 16  # of more children so many at a time are compared with the others
ONE_TILE = 64  # children that are compared at once
TOLD = tl.constexpr((trees.TOKENS, trees.PARENTS, trees.CHANCES, trees.PLACES))  # of a node, as they are
DOUBLINGS = tl.constexpr(6)  # 2^6 levels


def grow_trees(
    nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, room: TreeRoom, last: TreeRows | None
) -> tuple[TreeNodes, TreeRows]:
    """See `Kernels.grow_trees`."""
    num_trees, _, width = ids.shape
    grown = TreeNodes(torch.empty_like(nodes.columns), nodes.leaves.new_empty(num_trees, width))
    rows = _new_rows(num_trees * width, ids.device)
    _grow_kernel[(num_trees,)](
        *nodes, budgets, ids.contiguous(), log_chances.contiguous(), room.starts, room.tables, room.tables.shape[1],
        *(last or rows), *grown, *rows, BLOCK_SIZE=room.block_size, SHIFT=room.shift, HAS_LAST=last is not None,
        **_sizes(ids), **EXACT,
    )  # fmt: skip
    return grown, rows


def keep_trees(nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, num_nodes: int) -> Tensor:
    """See `Kernels.keep_trees`."""
    out = ids.new_empty(6, len(ids), num_nodes)
    grown, leaves = torch.empty_like(nodes.columns), ids.new_empty(len(ids), ids.shape[2])
    _keep_kernel[(len(ids),)](
        *nodes, budgets, ids.contiguous(), log_chances.contiguous(), grown, leaves, out,
        num_nodes, **_sizes(ids), **EXACT,
    )  # fmt: skip
    return out


def _sizes(ids: Tensor) -> dict[str, Any]:
    """Constants of a level: leaves and children a leaf; those filled up to powers of two."""
    _, num_leaves, width = ids.shape
    ranks = power_of_two(width)
    children = power_of_two(num_leaves) * ranks
    chunk = children if children <= ONE_TILE else CHUNK
    return {"LEAVES": num_leaves, "WIDTH": width, "RANKS": ranks, "CHILDREN": children, "CHUNK": chunk,
            "num_warps": 4 if children < ONE_TILE else 8}  # fmt: skip


def _new_rows(num: int, device: torch.device) -> TreeRows:
    wide, narrow = torch.int64, torch.int32
    types = (wide, narrow, narrow, narrow, narrow, wide, wide)
    return TreeRows(*(torch.empty(num, dtype=dtype, device=device) for dtype in types))


# -- a level of one tree ---------------------------------------------------------------------------------------------


@triton.jit
def _column(columns, tree, column: tl.constexpr):
    """Where a column of a tree's nodes begins."""
    return columns + (tree * COLUMNS + column) * NODES


@triton.jit
def _chances_of(columns, tree, node, is_there):
    """Log chances of nodes, -inf where they are not there."""
    bits = tl.load(_column(columns, tree, CHANCES) + node, is_there, NEVER_BITS)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _parents_of(leaves, tree, child, LEAVES: tl.constexpr, RANKS: tl.constexpr):
    """The leaf above each child, -1 for none."""
    leaf = child // RANKS
    return tl.load(leaves + tree * LEAVES + leaf, leaf < LEAVES, -1)


@triton.jit
def _drawn_at(tree, child, LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Where what was drawn for children lies, and whether anything does."""
    leaf, rank = child // RANKS, child % RANKS
    return (tree * LEAVES + leaf) * WIDTH + rank, (leaf < LEAVES) & (rank < WIDTH)


@triton.jit
def _child_chances(
    columns, leaves, ids, log_chances, tree, child, LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr
):
    """Log chances of the paths to children, -inf for those that are not there."""
    parent = _parents_of(leaves, tree, child, LEAVES, RANKS)
    at, inside = _drawn_at(tree, child, LEAVES, WIDTH, RANKS)
    is_there = inside & (parent >= 0)
    is_there = is_there & (tl.load(ids + at, is_there, -1) >= 0)
    above = _chances_of(columns, tree, parent, is_there)
    own = tl.load(log_chances + at, is_there, 0.0)
    chance = above + tl.where(own > 0.0, 0.0, own)
    return tl.where(is_there & (chance > NEVER), chance, NEVER)


@triton.jit
def _goes_before(chance, index, other, other_index):
    """Whether the others [1, n] go before [m, 1]: they are likelier, or as likely and older -> [m, n] int32."""
    return ((other > chance) | ((other == chance) & (other_index < index))).to(tl.int32)


@triton.jit
def _kept(
    columns, leaves, budgets, ids, log_chances, tree,
    LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, CHILDREN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Who is kept of the nodes [64] and the children [CHILDREN], these' order, and whether they may have children.

    Children go behind nodes, so a child is before a node only if it is likelier.
    """
    node, child = tl.arange(0, NODES), tl.arange(0, CHILDREN)
    chance = _chances_of(columns, tree, node, node < NODES)
    new = _child_chances(columns, leaves, ids, log_chances, tree, child, LEAVES, WIDTH, RANKS)
    node_rank = tl.sum(_goes_before(chance[:, None], node[:, None], chance[None, :], node[None, :]), 1)
    older = tl.sum((chance[None, :] >= new[:, None]).to(tl.int32), 1)  # [CHILDREN]
    order = tl.zeros([CHILDREN], tl.int32)
    for start in range(0, CHILDREN, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = _child_chances(columns, leaves, ids, log_chances, tree, other, LEAVES, WIDTH, RANKS)
        node_rank += tl.sum((others[None, :] > chance[:, None]).to(tl.int32), 1)
        order += tl.sum(_goes_before(new[:, None], child[:, None], others[None, :], other[None, :]), 1)
    most = tl.load(budgets + tree)
    kept, new_kept = (node_rank <= most) & (chance > NEVER), (older + order <= most) & (new > NEVER)
    is_full = tl.sum(kept.to(tl.int32), 0) + tl.sum(new_kept.to(tl.int32), 0) == most + 1
    infinite = float("inf")
    worst = tl.minimum(tl.min(tl.where(kept, chance, infinite), 0), tl.min(tl.where(new_kept, new, infinite), 0))
    is_leaf = new_kept & (new > tl.where(is_full, worst, NEVER)) & (order < WIDTH)
    return kept, new_kept, order, is_leaf


@triton.jit
def _numbers(kept, new_kept):
    """The new numbers of nodes and children, and how many there are."""
    node, child = kept.to(tl.int32), new_kept.to(tl.int32)
    num = tl.sum(node, 0)
    return tl.cumsum(node, 0) - 1, num + tl.cumsum(child, 0) - 1, num + tl.sum(child, 0)


@triton.jit
def _numbers_of(nodes, kept):
    """The new numbers of these nodes: how many kept ones go before."""
    is_before = kept[None, :] & (tl.arange(0, NODES)[None, :] < nodes[:, None])
    return tl.sum(is_before.to(tl.int32), 1)


@triton.jit
def _free_places(columns, tree, kept):
    """Of every place behind the root whether no kept node has it, and how many free ones go before it."""
    place = tl.arange(0, NODES)
    own = tl.load(_column(columns, tree, PLACES) + place)
    one = tl.full([NODES], 1, tl.int64)
    used = tl.sum(tl.where(kept & (own >= 0), one << tl.maximum(own, 0), 0), 0)
    is_free = ((used >> place.to(tl.int64)) & 1) == 0
    return is_free, tl.cumsum(is_free.to(tl.int32), 0) - 1


@triton.jit
def _nth_free(is_free, rank, nth):
    """The free place that so many go before."""
    is_mine = is_free[None, :] & (rank[None, :] == nth[:, None])
    return tl.sum(tl.where(is_mine, tl.arange(0, NODES)[None, :], 0), 1)


# -- what it leaves --------------------------------------------------------------------------------------------------


@triton.jit
def _store_nodes(
    columns, leaves, ids, log_chances, out, leaves_out, tree, kept, new_kept, order, is_leaf, is_free, free_rank,
    LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, CHILDREN: tl.constexpr,
):  # fmt: skip
    """The nodes kept, in their order, nothing behind them, and the leaves."""
    node, child = tl.arange(0, NODES), tl.arange(0, CHILDREN)
    number, new_number, num = _numbers(kept, new_kept)
    old_parent = tl.load(_column(columns, tree, PARENTS) + node)
    tl.store(_column(out, tree, PARENTS) + number, _numbers_of(old_parent, kept).to(tl.int64), kept)
    for column in tl.static_range(COLUMNS):
        if column != PARENTS:
            tl.store(_column(out, tree, column) + number, tl.load(_column(columns, tree, column) + node), kept)
        tl.store(_column(out, tree, column) + node, tl.full([NODES], ABSENT[column], tl.int64), node >= num)
    parent = _parents_of(leaves, tree, child, LEAVES, RANKS)
    at, _ = _drawn_at(tree, child, LEAVES, WIDTH, RANKS)
    chance = _child_chances(columns, leaves, ids, log_chances, tree, child, LEAVES, WIDTH, RANKS)
    place = _nth_free(is_free, free_rank, order).to(tl.int64)
    mask = tl.load(_column(columns, tree, MASKS) + parent, is_leaf, 0) | (tl.full([CHILDREN], 1, tl.int64) << place)
    depth = tl.load(_column(columns, tree, DEPTHS) + parent, new_kept, 0) + 1
    tl.store(_column(out, tree, TOKENS) + new_number, tl.load(ids + at, new_kept, 0), new_kept)
    tl.store(_column(out, tree, PARENTS) + new_number, _numbers_of(parent, kept).to(tl.int64), new_kept)
    tl.store(_column(out, tree, DEPTHS) + new_number, depth, new_kept)
    tl.store(_column(out, tree, CHANCES) + new_number, chance.to(tl.int64, bitcast=True), new_kept)
    tl.store(_column(out, tree, PLACES) + new_number, tl.where(is_leaf, place, -1), new_kept)
    tl.store(_column(out, tree, MASKS) + new_number, tl.where(is_leaf, mask, 0), new_kept)
    tl.store(leaves_out + tree * WIDTH + order, new_number.to(tl.int64), is_leaf)
    leaf = tl.arange(0, RANKS)
    is_none = (leaf >= tl.sum(is_leaf.to(tl.int32), 0)) & (leaf < WIDTH)
    tl.store(leaves_out + tree * WIDTH + leaf, tl.full([RANKS], -1, tl.int64), is_none)


@triton.jit
def _store_rows(
    columns, leaves, ids, starts, tables, num_blocks, rows, tree, into, order, is_leaf, is_free, free_rank,
    HAS_LAST: tl.constexpr, LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, CHILDREN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The rows of a tree's leaves, the first for those that are not there, as the rows of tree `into`."""
    row, child = tl.arange(0, RANKS), tl.arange(0, CHILDREN)
    nth = tl.where(row < tl.sum(is_leaf.to(tl.int32), 0), row, 0)
    is_mine = is_leaf[None, :] & (order[None, :] == nth[:, None])
    chosen = tl.sum(tl.where(is_mine, child[None, :], 0), 1)  # [RANKS]; the first child without any leaf
    place = _nth_free(is_free, free_rank, nth).to(tl.int64)
    parent = tl.maximum(_parents_of(leaves, tree, chosen, LEAVES, RANKS), 0)
    at, _ = _drawn_at(tree, chosen, LEAVES, WIDTH, RANKS)
    mask = tl.load(_column(columns, tree, MASKS) + parent) | (tl.full([RANKS], 1, tl.int64) << place)
    depth = tl.load(_column(columns, tree, DEPTHS) + parent) + 1
    start = tl.load(starts + tree)
    logical = start + place.to(tl.int32)
    block = tl.load(tables + tree * num_blocks + logical // BLOCK_SIZE)
    to, inside = into * WIDTH + row, row < WIDTH
    none = tl.zeros([RANKS], tl.int32)
    fed = tree * LEAVES + chosen // RANKS
    if HAS_LAST:
        fed += tl.num_programs(0) * WIDTH  # behind the last pass's inputs
    tl.store(rows[0] + to, tl.maximum(tl.load(ids + at), 0), inside)
    tl.store(rows[1] + to, start + depth.to(tl.int32) + SHIFT, inside)
    tl.store(rows[2] + to, block * BLOCK_SIZE + logical % BLOCK_SIZE, inside)
    tl.store(rows[3] + to, none + tree, inside)
    tl.store(rows[4] + to, none + start, inside)
    tl.store(rows[5] + to, mask, inside)
    tl.store(rows[6] + to, fed.to(tl.int64), inside)


@triton.jit
def _repeat_rows(last, rows, tree, into, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """What the last pass computed in a tree's rows once more, fed as then, as the rows of tree `into`."""
    row = tl.arange(0, RANKS)
    own, to, inside = tree * WIDTH + row, into * WIDTH + row, row < WIDTH
    for column in tl.static_range(6):
        tl.store(rows[column] + to, tl.load(last[column] + own, inside), inside)
    tl.store(rows[6] + to, own.to(tl.int64), inside)


# -- programs --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["budgets", "starts", "tables"])
def _grow_kernel(
    columns, leaves, budgets, ids, log_chances, starts, tables, num_blocks,
    last_tokens, last_positions, last_slots, last_seq_ids, last_prefix_lens, last_masks, last_sources,
    out, leaves_out, tokens, positions, slots, seq_ids, prefix_lens, masks, sources,
    BLOCK_SIZE: tl.constexpr, SHIFT: tl.constexpr, HAS_LAST: tl.constexpr,
    LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, CHILDREN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    rows = (tokens, positions, slots, seq_ids, prefix_lens, masks, sources)
    kept, new_kept, order, is_leaf = _kept(
        columns, leaves, budgets, ids, log_chances, tree, LEAVES, WIDTH, RANKS, CHILDREN, CHUNK
    )
    is_free, free_rank = _free_places(columns, tree, kept)
    _store_nodes(
        columns, leaves, ids, log_chances, out, leaves_out, tree, kept, new_kept, order, is_leaf, is_free, free_rank,
        LEAVES, WIDTH, RANKS, CHILDREN,
    )  # fmt: skip
    has_leaf, had_row = tl.sum(is_leaf.to(tl.int32), 0) > 0, tree == 0
    if HAS_LAST:
        had_row = tl.load(last_seq_ids + tree * WIDTH) == tree
    source = tree
    if (has_leaf == 0) & (had_row == 0):
        source = tree * 0
        kept, new_kept, order, is_leaf = _kept(
            columns, leaves, budgets, ids, log_chances, source, LEAVES, WIDTH, RANKS, CHILDREN, CHUNK
        )
        is_free, free_rank = _free_places(columns, source, kept)
        has_leaf = tl.sum(is_leaf.to(tl.int32), 0) > 0
    if has_leaf | (HAS_LAST == 0):
        _store_rows(
            columns, leaves, ids, starts, tables, num_blocks, rows, source, tree, order, is_leaf, is_free, free_rank,
            HAS_LAST, LEAVES, WIDTH, RANKS, CHILDREN, BLOCK_SIZE, SHIFT,
        )  # fmt: skip
    else:
        last = (last_tokens, last_positions, last_slots, last_seq_ids, last_prefix_lens, last_masks)
        _repeat_rows(last, rows, source, tree, WIDTH, RANKS)


@triton.jit(do_not_specialize=["num_kept"], do_not_specialize_on_alignment=["budgets"])
def _keep_kernel(
    columns, leaves, budgets, ids, log_chances, grown, leaves_out, out, num_kept,
    LEAVES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, CHILDREN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tree, node = tl.program_id(0), tl.arange(0, NODES)
    kept, new_kept, order, is_leaf = _kept(
        columns, leaves, budgets, ids, log_chances, tree, LEAVES, WIDTH, RANKS, CHILDREN, CHUNK
    )
    is_free, free_rank = _free_places(columns, tree, kept)
    _store_nodes(
        columns, leaves, ids, log_chances, grown, leaves_out, tree, kept, new_kept, order, is_leaf & False,
        is_free, free_rank, LEAVES, WIDTH, RANKS, CHILDREN,
    )  # fmt: skip
    tl.debug_barrier()  # what is read now, other threads of this program wrote
    to, plane = out + tree * num_kept + node - 1, tl.num_programs(0) * num_kept
    inside = (node > 0) & (node <= num_kept)
    is_there = tl.load(_column(grown, tree, TOKENS) + node) >= 0
    parent = tl.load(_column(grown, tree, PARENTS) + node)
    for column in tl.static_range(4):
        at = _column(grown, tree, TOLD[column])
        tl.store(to + column * plane, tl.where(is_there, tl.load(at + node), -1), inside)
    tl.store(to + 4 * plane, tl.where(is_there, tl.load(_column(grown, tree, DEPTHS) + node), 1), inside)
    tl.store(to + 5 * plane, _ancestors(node, parent), inside)


@triton.jit
def _ancestors(node, parent):
    """Ancestors and self by bits, from parents: twice as many generations at a time."""
    mask = tl.full([NODES], 1, tl.int64) << node
    for _ in range(DOUBLINGS):
        is_parent = parent[:, None] == node[None, :]
        mask = mask | tl.sum(tl.where(is_parent, mask[None, :], 0), 1)
        parent = tl.sum(tl.where(is_parent, parent[None, :], 0), 1)
    return mask
