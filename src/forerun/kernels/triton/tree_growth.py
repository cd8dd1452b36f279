"""Draft trees on the device: a launch a level chooses what is kept and expanded and says what the next pass computes.

Knows: what `kernels.tree_growth` does in torch, here by one program a tree. Does not know: passes, logits, requests.

A tree has 64 nodes and a level up to 256 children, few enough to count: a node's rank is how many go before it.
Sums of integers have no order and a log chance is one sum, so numbers and ties are those of torch, bit by bit.

A tree that never had a leaf repeats a row of the first tree, which another program chooses at the same time: it chooses
for the first tree once more. Nothing that a launch reads is written by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import tree_growth as trees
from forerun.kernels.tree_growth import NodeRows, TreeNodes, TreeRoom
from forerun.kernels.triton.common import EXACT, power_of_two

NODES, COLUMNS = tl.constexpr(trees.MOST_NODES), tl.constexpr(6)
TOKENS, PARENTS, DEPTHS = tl.constexpr(trees.TOKENS), tl.constexpr(trees.PARENTS), tl.constexpr(trees.DEPTHS)
CHANCES, PLACES, MASKS = tl.constexpr(trees.CHANCES), tl.constexpr(trees.PLACES), tl.constexpr(trees.MASKS)
NEVER = tl.constexpr(float("-inf"))
NEVER_BITS = tl.constexpr(-(1 << 52))  # of -inf as float64
ABSENT = tl.constexpr((-1, 0, 0, -(1 << 52), -1, 0))  # columns of a node that is not there
CHUNK = 16  # children of a larger level that are compared with the others at once
ONE_TILE = 64  # up to here all children of a level are compared at once
TOLD = tl.constexpr((trees.TOKENS, trees.PARENTS, trees.CHANCES, trees.PLACES))  # of a node, as they are
DOUBLINGS = tl.constexpr(6)  # 2^6 levels


class Level(NamedTuple):
    """Constants of a level."""

    leaves: int
    width: int  # children a leaf
    ranks: int  # the same, filled up to a power of two
    children: int  # of all leaves, both filled up
    chunk: int  # children that are compared with the others at once

    @classmethod
    def of(cls, ids: Tensor) -> Level:
        """That of children [R, leaves, width]."""
        _, leaves, width = ids.shape
        ranks = power_of_two(width)
        children = power_of_two(leaves) * ranks
        return cls(leaves, width, ranks, children, children if children <= ONE_TILE else CHUNK)

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return 4 if self.children < ONE_TILE else 8


def grow_trees(
    nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, room: TreeRoom, last: NodeRows | None
) -> tuple[TreeNodes, NodeRows]:
    """See `Kernels.grow_trees`."""
    (num_trees, _, width), level = ids.shape, Level.of(ids)
    grown = TreeNodes(torch.empty_like(nodes.columns), nodes.leaves.new_empty(num_trees, width))
    rows = _new_rows(num_trees * width, ids.device)
    _grow_kernel[(num_trees,)](
        nodes, budgets, ids.contiguous(), log_chances.contiguous(), room.starts, room.tables, room.tables.shape[1],
        last or rows, grown, rows, level, room.block_size, room.shift, last is not None,
        num_warps=level.num_warps, **EXACT,
    )  # fmt: skip
    return grown, rows


def keep_trees(nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, num_nodes: int) -> Tensor:
    """See `Kernels.keep_trees`."""
    out, level = ids.new_empty(6, len(ids), num_nodes), Level.of(ids)
    grown = TreeNodes(torch.empty_like(nodes.columns), ids.new_empty(len(ids), ids.shape[2]))
    _keep_kernel[(len(ids),)](
        nodes, budgets, ids.contiguous(), log_chances.contiguous(), grown, out, num_nodes,
        level, num_warps=level.num_warps, **EXACT,
    )  # fmt: skip
    return out


def _new_rows(num: int, device: torch.device) -> NodeRows:
    wide, narrow = torch.int64, torch.int32
    types = (wide, narrow, narrow, narrow, narrow, wide, wide)
    return NodeRows(*(torch.empty(num, dtype=dtype, device=device) for dtype in types))


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
def _parents_of(leaves, tree, child, LEVEL: tl.constexpr):
    """The leaf above each child, -1 for none."""
    leaf = child // LEVEL.ranks
    return tl.load(leaves + tree * LEVEL.leaves + leaf, leaf < LEVEL.leaves, -1)


@triton.jit
def _drawn_at(tree, child, LEVEL: tl.constexpr):
    """Where what was drawn for children lies, and whether anything does."""
    leaf, rank = child // LEVEL.ranks, child % LEVEL.ranks
    return (tree * LEVEL.leaves + leaf) * LEVEL.width + rank, (leaf < LEVEL.leaves) & (rank < LEVEL.width)


@triton.jit
def _child_chances(nodes, ids, log_chances, tree, child, LEVEL: tl.constexpr):
    """Log chances of the paths to children, -inf for those that are not there."""
    parent = _parents_of(nodes.leaves, tree, child, LEVEL)
    at, inside = _drawn_at(tree, child, LEVEL)
    is_there = inside & (parent >= 0)
    is_there = is_there & (tl.load(ids + at, is_there, -1) >= 0)
    above = _chances_of(nodes.columns, tree, parent, is_there)
    own = tl.load(log_chances + at, is_there, 0.0)
    chance = above + tl.where(own > 0.0, 0.0, own)
    return tl.where(is_there & (chance > NEVER), chance, NEVER)


@triton.jit
def _goes_before(chance, index, other, other_index):
    """Whether the others [1, n] rank before [m, 1]: they are likelier, or as likely and older -> [m, n] int32."""
    return ((other > chance) | ((other == chance) & (other_index < index))).to(tl.int32)


@triton.jit
def _kept(nodes, budgets, ids, log_chances, tree, LEVEL: tl.constexpr):
    """Who is kept of the nodes [64] and the children [children], these' order, and whether they may have children.

    Children go behind nodes, so a child is before a node only if it is likelier.
    """
    node, child = tl.arange(0, NODES), tl.arange(0, LEVEL.children)
    chance = _chances_of(nodes.columns, tree, node, node < NODES)
    new = _child_chances(nodes, ids, log_chances, tree, child, LEVEL)
    node_rank = tl.sum(_goes_before(chance[:, None], node[:, None], chance[None, :], node[None, :]), 1)
    older = tl.sum((chance[None, :] >= new[:, None]).to(tl.int32), 1)  # [children]
    order = tl.zeros([LEVEL.children], tl.int32)
    for start in range(0, LEVEL.children, LEVEL.chunk):
        other = start + tl.arange(0, LEVEL.chunk)
        others = _child_chances(nodes, ids, log_chances, tree, other, LEVEL)
        node_rank += tl.sum((others[None, :] > chance[:, None]).to(tl.int32), 1)
        order += tl.sum(_goes_before(new[:, None], child[:, None], others[None, :], other[None, :]), 1)
    most = tl.load(budgets + tree)
    kept, new_kept = (node_rank <= most) & (chance > NEVER), (older + order <= most) & (new > NEVER)
    is_full = tl.sum(kept.to(tl.int32), 0) + tl.sum(new_kept.to(tl.int32), 0) == most + 1
    infinite = float("inf")
    worst = tl.minimum(tl.min(tl.where(kept, chance, infinite), 0), tl.min(tl.where(new_kept, new, infinite), 0))
    is_leaf = new_kept & (new > tl.where(is_full, worst, NEVER)) & (order < LEVEL.width)
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
def _free_places(nodes, tree, kept):
    """Of every place behind the root whether no kept node has it, and how many free ones go before it."""
    place = tl.arange(0, NODES)
    own = tl.load(_column(nodes.columns, tree, PLACES) + place)
    one = tl.full([NODES], 1, tl.int64)
    used = tl.sum(tl.where(kept & (own >= 0), one << tl.maximum(own, 0), 0), 0)
    is_free = ((used >> place.to(tl.int64)) & 1) == 0
    return is_free, tl.cumsum(is_free.to(tl.int32), 0) - 1


@triton.jit
def _nth_free(free, nth):
    """The free place that so many go before."""
    is_mine = free[0][None, :] & (free[1][None, :] == nth[:, None])
    return tl.sum(tl.where(is_mine, tl.arange(0, NODES)[None, :], 0), 1)


# -- what it leaves --------------------------------------------------------------------------------------------------


@triton.jit
def _store_nodes(nodes, ids, log_chances, grown, tree, chosen, free, LEVEL: tl.constexpr):
    """The nodes kept, in their order, nothing behind them, and the leaves."""
    kept, new_kept, order, is_leaf = chosen
    old, new = nodes.columns, grown.columns
    node, child = tl.arange(0, NODES), tl.arange(0, LEVEL.children)
    number, new_number, num = _numbers(kept, new_kept)
    old_parent = tl.load(_column(old, tree, PARENTS) + node)
    tl.store(_column(new, tree, PARENTS) + number, _numbers_of(old_parent, kept).to(tl.int64), kept)
    for column in tl.static_range(COLUMNS):
        if column != PARENTS:
            tl.store(_column(new, tree, column) + number, tl.load(_column(old, tree, column) + node), kept)
        tl.store(_column(new, tree, column) + node, tl.full([NODES], ABSENT[column], tl.int64), node >= num)
    parent = _parents_of(nodes.leaves, tree, child, LEVEL)
    at, _ = _drawn_at(tree, child, LEVEL)
    chance = _child_chances(nodes, ids, log_chances, tree, child, LEVEL)
    place = _nth_free(free, order).to(tl.int64)
    mask = tl.load(_column(old, tree, MASKS) + parent, is_leaf, 0) | (tl.full([LEVEL.children], 1, tl.int64) << place)
    depth = tl.load(_column(old, tree, DEPTHS) + parent, new_kept, 0) + 1
    tl.store(_column(new, tree, TOKENS) + new_number, tl.load(ids + at, new_kept, 0), new_kept)
    tl.store(_column(new, tree, PARENTS) + new_number, _numbers_of(parent, kept).to(tl.int64), new_kept)
    tl.store(_column(new, tree, DEPTHS) + new_number, depth, new_kept)
    tl.store(_column(new, tree, CHANCES) + new_number, chance.to(tl.int64, bitcast=True), new_kept)
    tl.store(_column(new, tree, PLACES) + new_number, tl.where(is_leaf, place, -1), new_kept)
    tl.store(_column(new, tree, MASKS) + new_number, tl.where(is_leaf, mask, 0), new_kept)
    tl.store(grown.leaves + tree * LEVEL.width + order, new_number.to(tl.int64), is_leaf)
    leaf = tl.arange(0, LEVEL.ranks)
    is_none = (leaf >= tl.sum(is_leaf.to(tl.int32), 0)) & (leaf < LEVEL.width)
    tl.store(grown.leaves + tree * LEVEL.width + leaf, tl.full([LEVEL.ranks], -1, tl.int64), is_none)


@triton.jit
def _store_rows(
    nodes, ids, room, rows, tree, into, chosen, free,
    LEVEL: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHIFT: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    """The rows of a tree's leaves, the first for those that are not there, as the rows of tree `into`."""
    starts, tables, num_blocks = room
    _, _, order, is_leaf = chosen
    row, child = tl.arange(0, LEVEL.ranks), tl.arange(0, LEVEL.children)
    nth = tl.where(row < tl.sum(is_leaf.to(tl.int32), 0), row, 0)
    is_mine = is_leaf[None, :] & (order[None, :] == nth[:, None])
    mine = tl.sum(tl.where(is_mine, child[None, :], 0), 1)  # [ranks]; the first child without any leaf
    place = _nth_free(free, nth).to(tl.int64)
    parent = tl.maximum(_parents_of(nodes.leaves, tree, mine, LEVEL), 0)
    at, _ = _drawn_at(tree, mine, LEVEL)
    mask = tl.load(_column(nodes.columns, tree, MASKS) + parent) | (tl.full([LEVEL.ranks], 1, tl.int64) << place)
    depth = tl.load(_column(nodes.columns, tree, DEPTHS) + parent) + 1
    start = tl.load(starts + tree)
    logical = start + place.to(tl.int32)
    block = tl.load(tables + tree * num_blocks + logical // BLOCK_SIZE)
    to, inside = into * LEVEL.width + row, row < LEVEL.width
    none = tl.zeros([LEVEL.ranks], tl.int32)
    fed = tree * LEVEL.leaves + mine // LEVEL.ranks
    if HAS_LAST:
        fed += tl.num_programs(0) * LEVEL.width  # behind the last pass's inputs
    tl.store(rows.token_ids + to, tl.maximum(tl.load(ids + at), 0), inside)
    tl.store(rows.positions + to, start + depth.to(tl.int32) + SHIFT, inside)
    tl.store(rows.slots + to, block * BLOCK_SIZE + logical % BLOCK_SIZE, inside)
    tl.store(rows.seq_ids + to, none + tree, inside)
    tl.store(rows.prefix_lens + to, none + start, inside)
    tl.store(rows.tree_masks + to, mask, inside)
    tl.store(rows.sources + to, fed.to(tl.int64), inside)


@triton.jit
def _repeat_rows(last, rows, tree, into, LEVEL: tl.constexpr):
    """A tree's rows of the last pass once more, with the same features, as the rows of tree `into`."""
    row = tl.arange(0, LEVEL.ranks)
    own, to, inside = tree * LEVEL.width + row, into * LEVEL.width + row, row < LEVEL.width
    for column in tl.static_range(6):
        tl.store(rows[column] + to, tl.load(last[column] + own, inside), inside)
    tl.store(rows.sources + to, own.to(tl.int64), inside)


# -- programs --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["budgets", "starts", "tables"])
def _grow_kernel(
    nodes, budgets, ids, log_chances, starts, tables, num_blocks, last, grown, rows,
    LEVEL: tl.constexpr, BLOCK_SIZE: tl.constexpr, SHIFT: tl.constexpr, HAS_LAST: tl.constexpr,
):  # fmt: skip
    tree, room = tl.program_id(0), (starts, tables, num_blocks)  # apart: Triton specializes what comes in a tuple
    chosen = _kept(nodes, budgets, ids, log_chances, tree, LEVEL)
    free = _free_places(nodes, tree, chosen[0])
    _store_nodes(nodes, ids, log_chances, grown, tree, chosen, free, LEVEL)
    has_leaf, had_row = tl.sum(chosen[3].to(tl.int32), 0) > 0, tree == 0
    if HAS_LAST:
        had_row = tl.load(last.seq_ids + tree * LEVEL.width) == tree
    source = tree
    if (has_leaf == 0) & (had_row == 0):
        source = tree * 0
        chosen = _kept(nodes, budgets, ids, log_chances, source, LEVEL)
        free = _free_places(nodes, source, chosen[0])
        has_leaf = tl.sum(chosen[3].to(tl.int32), 0) > 0
    if has_leaf | (HAS_LAST == 0):
        _store_rows(nodes, ids, room, rows, source, tree, chosen, free, LEVEL, BLOCK_SIZE, SHIFT, HAS_LAST)
    else:
        _repeat_rows(last, rows, source, tree, LEVEL)


@triton.jit(do_not_specialize=["num_kept"], do_not_specialize_on_alignment=["budgets"])
def _keep_kernel(nodes, budgets, ids, log_chances, grown, out, num_kept, LEVEL: tl.constexpr):
    tree, node = tl.program_id(0), tl.arange(0, NODES)
    kept, new_kept, order, is_leaf = _kept(nodes, budgets, ids, log_chances, tree, LEVEL)
    free = _free_places(nodes, tree, kept)
    _store_nodes(nodes, ids, log_chances, grown, tree, (kept, new_kept, order, is_leaf & False), free, LEVEL)
    tl.debug_barrier()  # what is read now, other threads of this program wrote
    to, plane = out + tree * num_kept + node - 1, tl.num_programs(0) * num_kept
    inside = (node > 0) & (node <= num_kept)
    is_there = tl.load(_column(grown.columns, tree, TOKENS) + node) >= 0
    parent = tl.load(_column(grown.columns, tree, PARENTS) + node)
    for column in tl.static_range(4):
        at = _column(grown.columns, tree, TOLD[column])
        tl.store(to + column * plane, tl.where(is_there, tl.load(at + node), -1), inside)
    tl.store(to + 4 * plane, tl.where(is_there, tl.load(_column(grown.columns, tree, DEPTHS) + node), 1), inside)
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
