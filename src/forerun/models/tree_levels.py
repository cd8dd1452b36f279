"""Draft trees of several requests while they grow on a device: who is expanded next, what is kept, in plain tensors.

Knows: log chances of nodes, the places their rows take, how a tree that is done goes on idly. Does not know: passes,
how work is captured, what draws tokens. Nothing here asks the device anything, and shapes depend on sizes alone.

The rules are `drafters.growing`'s, node by node (EAGLE-2, arXiv 2406.16858): of all nodes ever drawn the likeliest are
kept, and of the new ones those are expanded that are kept and may have children worth keeping. Nodes have fixed numbers
by level, leaf and rank, in the order in which the host numbers those that are there, so ties fall alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NONE = -1  # a place or a token that is not there
_NEVER = float("-inf")


class LevelRows(NamedTuple):
    """What one pass below the roots computes, each [R, width]; a leaf that is not there repeats another row."""

    tokens: Tensor  # int64
    depths: Tensor
    places: Tensor  # row behind the root's
    masks: Tensor  # places of ancestors and self, by bits
    trees: Tensor  # whose row it is
    sources: Tensor  # row whose features it is fed: of the last pass's inputs, then of its outputs


class TreeLevels:
    """R trees of up to `width` children a node, at most so many leaves a level."""

    def __init__(self, budgets: Tensor, width: int, num_levels: int) -> None:
        """`budgets` [R] int64: nodes that are kept of each, without the root."""
        num_trees, num_nodes = len(budgets), 1 + width + width * width * (num_levels - 1)
        self._width = width
        self._budgets = budgets[:, None]  # [R, 1]
        self._tokens = budgets.new_full((num_trees, num_nodes), NONE)
        self._parents = torch.zeros_like(self._tokens)
        self._survival = torch.full_like(self._tokens, _NEVER, dtype=torch.float64)
        self._places, self._masks = self._tokens.clone(), torch.zeros_like(self._tokens)
        for column, of_root in ((self._survival, 0), (self._places, 0), (self._masks, 1)):
            column[:, 0] = of_root
        self._first, self._end = 0, 1  # nodes of the newest level
        self._level = 0  # its depth
        self._leaves = torch.zeros_like(self._budgets)  # [R, leaves]: nodes
        self._is_leaf = torch.ones_like(self._leaves, dtype=torch.bool)

    def add(self, ids: Tensor, log_chances: Tensor) -> None:
        """Hang children below the leaves: their tokens, -1 for none, and chances, best first, [R, leaves, width]."""
        above = self._survival.gather(1, self._leaves)[:, :, None]  # [R, leaves, 1]
        is_there = (ids >= 0) & self._is_leaf[:, :, None]
        survival = (above + log_chances.clamp(max=0.0)).masked_fill(~is_there, _NEVER)
        self._first, self._end = self._end, self._end + ids.shape[1] * ids.shape[2]
        self._level += 1
        fresh = slice(self._first, self._end)
        self._tokens[:, fresh] = ids.flatten(1)
        self._parents[:, fresh] = self._leaves[:, :, None].expand(ids.shape).flatten(1)
        self._survival[:, fresh] = survival.flatten(1)

    def next_rows(self, last: LevelRows | None) -> LevelRows:
        """Choose the next leaves and say what their pass computes; `last`: the pass before, None if that was roots."""
        num_rows = self._leaves.shape[1]
        chosen, is_leaf = self._useful()  # each [R, width]
        places = self._free_places(is_leaf)
        chosen, is_leaf, places = _sorted_by_place(chosen, is_leaf, places)
        above = (chosen - self._first) // self._width  # [R, width]: leaves of the last pass
        masks = self._masks.gather(1, self._parents.gather(1, chosen)) | (1 << places)
        self._places.scatter_(1, chosen, places.masked_fill(~is_leaf, NONE))
        self._masks.scatter_(1, chosen, masks)
        self._leaves, self._is_leaf = chosen, is_leaf
        tree = torch.arange(len(chosen), device=chosen.device)[:, None].expand(chosen.shape)
        sources = tree * num_rows + above + (0 if last is None else chosen.numel())
        tokens = self._tokens.gather(1, chosen)
        rows = LevelRows(tokens, torch.full_like(tokens, self._level), places, masks, tree, sources)
        return _idle_filled(rows, is_leaf, last)

    def kept(self, num_nodes: int) -> Tensor:
        """The nodes kept, in the order they were drawn, -1 behind the last -> [4, R, num_nodes] int64.

        Tokens; parents, 0 for the root, by their place here plus 1; log chances, float64 by their bits; and the places
        of those whose row was computed, -1 for the others.
        """
        kept, drawn = self._is_kept(), slice(1, self._end)  # [R, nodes - 1]
        numbers = torch.nn.functional.pad(kept.cumsum(1), (1, 0))  # [R, nodes]
        parents = numbers.gather(1, self._parents[:, drawn])
        columns = (self._tokens[:, drawn], parents, self._survival[:, drawn].view(torch.int64), self._places[:, drawn])
        values = torch.stack(columns)
        places = (numbers[:, 1:] - 1).masked_fill(~kept, num_nodes).expand_as(values)  # what is not kept goes last
        return values.new_full((*values.shape[:2], num_nodes + 1), NONE).scatter_(2, places, values)[:, :, :-1]

    # -- who is kept, who is expanded, and where -------------------------------------------------------------------

    def _is_kept(self) -> Tensor:
        """Whether a node is among the likeliest, the older of equals first -> [R, nodes - 1]."""
        survival = self._survival[:, 1 : self._end]
        order = survival.sort(dim=1, descending=True, stable=True).indices
        every = torch.arange(order.shape[1], device=order.device).expand_as(order)
        ranks = torch.empty_like(order).scatter_(1, order, every)
        return (ranks < self._budgets) & (survival > _NEVER)

    def _useful(self) -> tuple[Tensor, Tensor]:
        """The likeliest of the new nodes whose children may be kept, and whether there are so many, [R, width]."""
        kept = self._is_kept()
        self._places[:, 1 : self._end].masked_fill_(~kept, NONE)  # what is not kept frees its place
        survival = self._survival[:, 1 : self._end]
        worst = survival.masked_fill(~kept, -_NEVER).amin(1, keepdim=True)
        is_full = kept.sum(1, keepdim=True) == self._budgets
        new = slice(self._first - 1, None)
        useful = kept[:, new] & (~is_full | (survival[:, new] > worst))
        best = survival[:, new].masked_fill(~useful, _NEVER).sort(dim=1, descending=True, stable=True).indices
        best = best[:, : self._width]
        return best + self._first, useful.gather(1, best)

    def _free_places(self, is_leaf: Tensor) -> Tensor:
        """The first places that no kept node has, the likeliest leaf the first of them -> [R, width]."""
        bits = (1 << self._places.clamp(min=0)).masked_fill(self._places < 0, 0).sum(1, keepdim=True)  # [R, 1]
        place = torch.arange(64, device=bits.device)
        is_free = (bits >> place) & 1 == 0  # [R, 64]
        wanted = torch.arange(1, is_leaf.shape[1] + 1, device=bits.device)[:, None]  # [width, 1]
        is_mine = is_free[:, None] & (is_free.cumsum(1)[:, None] == wanted)  # [R, width, 64]
        return is_mine.long().argmax(2)


def ancestry(parents: Tensor, num_levels: int) -> Tensor:
    """Depths and ancestors of kept nodes, `parents` [R, nodes] as `TreeLevels.kept` has them -> [2, R, nodes] int64.

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


def _sorted_by_place(leaves: Tensor, is_leaf: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same [R, width] by place, leaves that are not there last."""
    behind = 64 + torch.arange(leaves.shape[1], device=leaves.device)
    order = torch.where(is_leaf, places, behind).argsort(dim=1)
    return leaves.gather(1, order), is_leaf.gather(1, order), places.gather(1, order)


def _idle_filled(rows: LevelRows, is_leaf: Tensor, last: LevelRows | None) -> LevelRows:
    """Rows for leaves that are not there: each computes what another does, into the same place, so nothing changes.

    That is the tree's first leaf; in a tree without leaves what the last pass computed in its stead, fed as then; and
    in one that never had any what the first tree, the largest, does now: its places of before may be another's by now.
    """
    leaf, row = (torch.arange(num, device=is_leaf.device) for num in (is_leaf.shape[1], is_leaf.numel()))
    filled = LevelRows(*(column.gather(1, torch.where(is_leaf, leaf, 0)) for column in rows))
    if last is None:
        return _chosen(is_leaf[:, :1], filled, [column[:1] for column in filled])
    again = LevelRows(*last[:-1], row.view(is_leaf.shape))
    grown = _chosen(is_leaf[:, :1], filled, again)
    had_some = is_leaf[:, :1] | (last.trees == rows.trees)
    return _chosen(had_some, grown, [column[:1] for column in grown])


def _chosen(condition: Tensor, these: Sequence[Tensor], others: Sequence[Tensor]) -> LevelRows:
    """Column by column."""
    return LevelRows(*(torch.where(condition, one, other) for one, other in zip(these, others, strict=True)))
