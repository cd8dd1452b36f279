"""Draft trees that grow level by level where their logits lie: the form of a tree, and growth in plain torch.

Knows: log chances of nodes, which nodes are kept and expanded, the places of rows, what a finished tree computes. Does
not know: passes, logits, requests. Nothing here asks a device anything, and shapes depend on sizes alone.

The rules are those of `speculation.best_first`, node by node (EAGLE-2, arXiv 2406.16858): of all nodes ever drawn the
likeliest are kept, and of the new ones those are expanded that are kept and may have children worth keeping. A child is
at most as likely as its parent and younger, so what was once not kept never will be, and what is kept has its
ancestors: a tree is the nodes kept so far. They stay in the order in which they were drawn (by level, leaf and rank),
so ties fall as on the host, which numbers them so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_NODES = 64  # of a tree, the root among them: each has a bit of a mask
NONE = -1  # a token, a place or a leaf that is not there
TOKENS, PARENTS, DEPTHS, CHANCES, PLACES, MASKS = range(6)  # columns of a node
_NEVER = float("-inf")


class TreeNodes(NamedTuple):
    """R trees, as far as they are kept: node 0 is the root, the others follow in the order they were drawn."""

    columns: Tensor  # [R, 6, 64] int64: token; parent; depth; log chance of the path, float64 by its bits; place of its
    # row behind the root's, -1 if it is not computed; places of ancestors and self by bits, 0 likewise.
    # Behind the last node: -1, 0, 0, -inf, -1, 0
    leaves: Tensor  # [R, L] int64: whose children are drawn next, in the order of their rows; -1 for none


class TreeRoom(NamedTuple):
    """Where the rows of trees lie."""

    starts: Tensor  # [R] int32: logical row of the root
    tables: Tensor  # [R, blocks] int32
    block_size: int
    shift: int  # added to positions


class NodeRows(NamedTuple):
    """What a pass over leaves computes, each [R * width]; a leaf that is not there repeats another row."""

    token_ids: Tensor  # int64
    positions: Tensor  # int32
    slots: Tensor  # int32
    seq_ids: Tensor  # int32: the tree whose row it is
    prefix_lens: Tensor  # int32
    tree_masks: Tensor  # int64
    sources: Tensor  # int64: row whose features it is fed: of the last pass's inputs, if below the roots, and outputs


def new_trees(num_trees: int, device: torch.device) -> TreeNodes:
    """Roots, and nothing below them yet."""
    nodes = _absent(num_trees, MOST_NODES, torch.zeros(num_trees, 1, dtype=torch.int64, device=device))
    for column, of_root in ((CHANCES, 0), (PLACES, 0), (MASKS, 1)):  # the bits of 0.0 are 0
        nodes[:, column, 0] = of_root
    return TreeNodes(nodes, torch.zeros(num_trees, 1, dtype=torch.int64, device=device))


def grow_trees(
    nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, room: TreeRoom, last: NodeRows | None
) -> tuple[TreeNodes, NodeRows]:
    """See `Kernels.grow_trees`."""
    width = ids.shape[2]
    drawn = _with_children(nodes, ids, log_chances)  # [R, 6, 64 + C]
    kept = _is_kept(drawn, budgets)
    chosen, is_leaf = _likeliest(drawn, kept, budgets, width)  # children, each [R, width]
    places = _free_places(drawn[:, PLACES, :MOST_NODES], kept[:, :MOST_NODES], is_leaf)
    parents = drawn[:, PARENTS, MOST_NODES:].gather(1, chosen)
    masks = drawn[:, MASKS].gather(1, parents) | (1 << places)  # [R, width]
    children = drawn[:, :, MOST_NODES:]
    children[:, PLACES].scatter_(1, chosen, places.masked_fill(~is_leaf, NONE))
    children[:, MASKS].scatter_(1, chosen, masks.masked_fill(~is_leaf, 0))
    grown, numbers = _compacted(drawn, kept)
    leaves = numbers.gather(1, MOST_NODES + chosen).masked_fill(~is_leaf, NONE)
    tree = torch.arange(len(ids), device=ids.device)[:, None].expand_as(chosen)
    sources = tree * ids.shape[1] + chosen // width + (0 if last is None else chosen.numel())
    tokens, depths = (children[:, column].gather(1, chosen) for column in (TOKENS, DEPTHS))
    own = _laid_out((tokens, depths, places, masks, tree, sources), is_leaf, room)
    return TreeNodes(grown, leaves), _idle_filled(own, is_leaf, last)


def keep_trees(nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, num_nodes: int) -> Tensor:
    """See `Kernels.keep_trees`."""
    drawn = _with_children(nodes, ids, log_chances)
    nodes_, _ = _compacted(drawn, _is_kept(drawn, budgets))
    below = nodes_[:, :, 1 : 1 + num_nodes]  # [R, 6, num_nodes]
    is_there = below[:, TOKENS] >= 0
    told = [below[:, column].masked_fill(~is_there, NONE) for column in (TOKENS, PARENTS, CHANCES, PLACES)]
    return torch.stack([*told, *ancestry(told[1], num_nodes)])


def ancestry(parents: Tensor, num_levels: int) -> Tensor:
    """Depths and ancestors of kept nodes, `parents` [R, nodes] as `keep_trees` has them -> [2, R, nodes] int64.

    Ancestors and self by bits: bit 0 is the root, bit i the node of column i - 1. What is not there is a child of the
    root's.
    """
    bits = (1 << torch.arange(1, parents.shape[1] + 1, device=parents.device)).expand_as(parents)
    depths, masks, has_node = torch.ones_like(parents), bits | 1, parents > 0
    above = (parents - 1).clamp(min=0)  # columns
    for _ in range(num_levels - 1):
        depths = 1 + depths.gather(1, above).masked_fill(~has_node, 0)
        masks = bits | torch.where(has_node, masks.gather(1, above), 1)
    return torch.stack([depths, masks])


# -- nodes -----------------------------------------------------------------------------------------------------------


def _with_children(nodes: TreeNodes, ids: Tensor, log_chances: Tensor) -> Tensor:
    """The nodes and behind them the children drawn, with their parents' numbers of before -> [R, 6, 64 + C]."""
    parents = nodes.leaves[:, :, None].expand_as(ids).flatten(1)  # [R, C]
    tokens, is_leaf = ids.flatten(1), parents >= 0
    parents = parents.clamp(min=0)
    above = nodes.columns[:, CHANCES].view(torch.float64).gather(1, parents)
    chances = above + log_chances.flatten(1).clamp(max=0.0)
    is_there = is_leaf & (tokens >= 0) & (chances > _NEVER)  # False for NaN
    chances = chances.masked_fill(~is_there, _NEVER).view(torch.int64)
    depths = nodes.columns[:, DEPTHS].gather(1, parents) + 1
    fresh = (tokens, parents, depths, chances, torch.full_like(tokens, NONE), torch.zeros_like(tokens))
    return torch.cat([nodes.columns, torch.stack(fresh, dim=1)], dim=2)


def _is_kept(drawn: Tensor, budgets: Tensor) -> Tensor:
    """Whether a node is kept: the root, and the likeliest others, of equals the older -> [R, n]."""
    chances = drawn[:, CHANCES].view(torch.float64)
    order = chances.sort(dim=1, descending=True, stable=True).indices
    every = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, every)
    return (ranks <= budgets[:, None]) & (chances > _NEVER)


def _compacted(drawn: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept [R, 6, 64], with its new numbers, and these [R, n]."""
    numbers = kept.cumsum(1) - 1
    columns = list(drawn.unbind(1))
    columns[PARENTS] = numbers.gather(1, columns[PARENTS])
    values = torch.stack(columns, dim=1)
    places = numbers.masked_fill(~kept, MOST_NODES)[:, None].expand_as(values)  # what is not kept goes last
    return _absent(len(drawn), MOST_NODES + 1, drawn).scatter_(2, places, values)[:, :, :-1], numbers


def _absent(num_trees: int, num_nodes: int, like: Tensor) -> Tensor:
    """Nodes that are not there."""
    nodes = like.new_zeros(num_trees, 6, num_nodes)
    nodes[:, TOKENS] = nodes[:, PLACES] = NONE
    nodes[:, CHANCES] = torch.full_like(nodes[:, CHANCES], _NEVER, dtype=torch.float64).view(torch.int64)
    return nodes


# -- leaves and their rows -------------------------------------------------------------------------------------------


def _likeliest(drawn: Tensor, kept: Tensor, budgets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The likeliest children whose own children may be kept, and which of these entries are used -> each [R, width]."""
    chances = drawn[:, CHANCES].view(torch.float64)
    worst = chances.masked_fill(~kept, -_NEVER).amin(1, keepdim=True)
    is_full = kept.sum(1, keepdim=True) == budgets[:, None] + 1
    children = slice(MOST_NODES, None)
    useful = kept[:, children] & (~is_full | (chances[:, children] > worst))
    best = chances[:, children].masked_fill(~useful, _NEVER).sort(dim=1, descending=True, stable=True).indices
    return best[:, :width], useful.gather(1, best[:, :width])


def _free_places(places: Tensor, kept: Tensor, is_leaf: Tensor) -> Tensor:
    """The first places that no kept node has; the likeliest leaf gets the first -> [R, width]."""
    is_used = kept & (places >= 0)
    bits = (1 << places.clamp(min=0)).masked_fill(~is_used, 0).sum(1, keepdim=True)  # [R, 1]
    place = torch.arange(MOST_NODES, device=bits.device)
    is_free = (bits >> place) & 1 == 0  # [R, 64]
    wanted = torch.arange(1, is_leaf.shape[1] + 1, device=bits.device)[:, None]  # [width, 1]
    is_mine = is_free[:, None] & (is_free.cumsum(1)[:, None] == wanted)  # [R, width, 64]
    return is_mine.long().argmax(2)


def _laid_out(columns: tuple[Tensor, ...], is_leaf: Tensor, room: TreeRoom) -> NodeRows:
    """Rows of leaves from columns [R, width] each; where there is no leaf, the tree's first leaf again."""
    leaf = torch.arange(is_leaf.shape[1], device=is_leaf.device)
    first = torch.where(is_leaf, leaf, 0)
    tokens, depths, places, masks, trees, sources = (column.gather(1, first).flatten() for column in columns)
    starts = room.starts.long().index_select(0, trees)
    logical = starts + places
    slots = room.tables[trees, logical // room.block_size] * room.block_size + logical % room.block_size
    narrow = (starts + depths + room.shift, slots, trees, starts)
    positions, slots, trees, starts = (column.int() for column in narrow)
    return NodeRows(tokens.clamp(min=0), positions, slots, trees, starts, masks, sources)


def _idle_filled(own: NodeRows, is_leaf: Tensor, last: NodeRows | None) -> NodeRows:
    """Rows for trees without leaves: each repeats another row, into the same slot, so nothing changes.

    A tree that had leaves repeats its row of the last pass, with the same feature. A tree that never had one repeats
    what the first tree, the largest, computes in this pass: that tree's earlier slots may hold other nodes by now.
    """
    num_trees, width = is_leaf.shape
    row = torch.arange(is_leaf.numel(), device=is_leaf.device)
    has_leaf = is_leaf[:, 0].repeat_interleave(width)  # [R * width]
    if last is not None:
        own = _chosen(has_leaf, own, NodeRows(*last[:-1], row))
        has_leaf = has_leaf | (last.seq_ids == row // width)
    return _chosen(has_leaf, own, NodeRows(*(column[:width].repeat(num_trees) for column in own)))


def _chosen(condition: Tensor, these: NodeRows, others: NodeRows) -> NodeRows:
    """Column by column."""
    return NodeRows(*(torch.where(condition, one, other) for one, other in zip(these, others, strict=True)))
