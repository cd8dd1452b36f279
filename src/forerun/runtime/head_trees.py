"""Trees from Medusa-like heads, grown on a GPU: heads, draws and choice of nodes in one graph.

Knows: where a program's states and noise lie, which of all paths are kept, in plain tensors. Does not know: what a head
computes, how work is captured, requests.

All heads read the same state, so every node of a level has the same candidates, and of all paths of ranks those with
the largest sums of log chances are kept: the tree `speculation.best_first` finds on the host with a heap, node by node
and in its order, ties alike. Here it is found level by level. A tree of n nodes keeps n of a level at most, and no
child is likelier than its parent: the n likeliest of a level hang from the n likeliest above. Nothing here asks the
device anything, and shapes depend on sizes alone.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.chances import LEAST_RANKS, head_log_chances
from forerun.kernels.draws import ChainTensors
from forerun.kernels.ops import Kernels, NoiseKeys
from forerun.kernels.tree_growth import ancestry
from forerun.kernels.triton.graphs import Capture, size_for
from forerun.models.base import RowPasses
from forerun.runtime.programs import Programs, room_for
from forerun.runtime.static import StaticColumns, padded
from forerun.speculation.drawn import DrawnTree, PendingTrees, trees_of

_NONE = -1  # a missing token
_NEVER = float("-inf")


class HeadTreeSize(NamedTuple):
    """What trees are captured for."""

    num_trees: int
    num_heads: int
    num_nodes: int  # of the largest tree that fits
    width: int


class HeadTrees:
    """Grows trees by programs that are captured, one for every size, when first met."""

    def __init__(self, passes: RowPasses, kernels: Kernels, capture: Capture) -> None:
        self._num_heads = passes.num_depths
        self._programs = Programs(partial(_HeadTreeProgram, passes, kernels), capture)

    def enqueue(self, x: Tensor, noise: ChainTensors, width: int) -> PendingTrees:
        """A tree below the token chosen from each of the states x [R, H], the largest tree first.

        `noise`: of chains as long as the trees may have nodes, whose positions are those of the levels.
        """
        num_nodes, num = noise.positions.shape
        usual = size_for(num, 1, 1)
        rows = num if usual is None else usual.num_rows
        size = HeadTreeSize(rows, min(self._num_heads, num_nodes), room_for(num_nodes), width)
        return self._programs.run(size, lambda program: program.fill(x, noise), usual is not None).drafts(num)


class _HeadTreeProgram:
    """The tensors of one size, and the work between them."""

    def __init__(self, passes: RowPasses, kernels: Kernels, size: HeadTreeSize) -> None:
        self._passes, self._kernels, self._size = passes, kernels, size
        num, num_heads, num_nodes, _ = size
        device = kernels.device
        self._columns = StaticColumns([num] * 3 + [num * num_heads], [num], device)
        self._states = torch.zeros(num, passes.feature_size, device=device)
        self._out = torch.zeros(3, num, num_nodes, dtype=torch.int64, device=device)
        self._shape = torch.zeros(2, num, num_nodes, dtype=torch.int64, device=device)  # depths, masks

    def fill(self, x: Tensor, noise: ChainTensors) -> None:
        """Copy states [R, H] and what is known of their trees over; the host does not wait.

        Unused trees have no nodes.
        """
        num, num_heads, _, _ = self._size
        budgets = (noise.num_active[:, None] > torch.arange(len(x))).sum(0)  # [R]
        positions = torch.stack([padded(level, num) for level in noise.positions[:num_heads]], dim=1)  # [trees, heads]
        of_trees = [padded(column, num) for column in (noise.temperatures.view(torch.int64), *noise[1:3])]
        self._columns.fill([*of_trees, positions], [padded(budgets.int(), num)])
        self._states[: len(x)].copy_(x)
        self._states[len(x) :] = x[-1:]

    def run(self) -> None:
        """Heads, draws, trees; asks the device nothing."""
        num, num_heads, num_nodes, width = self._size
        best = min(width, num_nodes)  # no tree keeps a token without all of better rank
        tokens, chances = (column.view(num, num_heads, -1)[:, :, :best] for column in self._ranks())
        self._out.copy_(best_products(tokens, chances, self._columns.narrow[0], num_nodes))
        self._shape.copy_(ancestry(self._out[1], num_heads))

    def _ranks(self) -> tuple[Tensor, Tensor]:
        """The best tokens of every head and their log chances, each [trees * heads, ranks]."""
        _, num_heads, _, width = self._size
        logits = self._passes.run(self._states, num_heads)  # [trees * heads, V]
        of_trees = [column[:, None].repeat(1, num_heads).flatten() for column in self._columns.wide[:3]]
        heat, seeds, streams = of_trees[0].view(torch.float64), *of_trees[1:]  # each [trees * heads]
        keys = NoiseKeys(seeds, self._columns.wide[3], streams)
        num_ranks = min(max(width, LEAST_RANKS), logits.shape[1])
        ids, scores = self._kernels.gumbel_topk(logits, heat, keys, num_ranks)
        return ids, head_log_chances(logits, scores, heat[:, None] == 0.0)

    def drafts(self, num_trees: int) -> PendingTrees:
        """What will have been kept of the first trees."""
        out, (depths, masks) = self._out[:, :num_trees], self._shape[:, :num_trees]
        return PendingTrees(out, out[0], depths, masks, _read)


def _read(out: Tensor) -> list[DrawnTree]:
    tokens, parents, chances = out  # each [R, nodes]
    return trees_of(tokens, parents, chances, torch.full_like(tokens, _NONE))


def best_products(tokens: Tensor, log_chances: Tensor, budgets: Tensor, num_nodes: int) -> Tensor:
    """The likeliest paths of ranks, the likeliest first, -1 after the last -> [3, R, num_nodes] int64.

    tokens and log_chances [R, depths, ranks], best first, -1 for no token; budgets [R], at most num_nodes. Tokens;
    parents, 0 for the root, by their place here plus 1; log chances of whole paths, float64 by their bits.
    """
    columns = _levels(tokens, log_chances.masked_fill(tokens < 0, _NEVER), num_nodes)
    drawn, parents, survival = (torch.cat(column, dim=1) for column in zip(*columns, strict=True))  # [R, N] each
    order = survival.sort(dim=1, descending=True, stable=True).indices
    every = torch.arange(order.shape[1], device=order.device).expand_as(order)
    numbers = torch.nn.functional.pad(torch.empty_like(order).scatter_(1, order, every) + 1, (1, 0))  # [R, 1 + N]
    values = torch.stack([drawn, numbers.gather(1, parents), survival.view(torch.int64)])
    kept = values.gather(2, order.expand_as(values))[:, :, :num_nodes]
    likely = survival.gather(1, order)[:, :num_nodes]
    is_kept = (every[:, :num_nodes] < budgets[:, None]) & (likely > _NEVER)
    missing = num_nodes - kept.shape[2]  # where there are no more paths
    return torch.nn.functional.pad(kept.masked_fill(~is_kept, _NONE), (0, missing), value=_NONE)


def _levels(tokens: Tensor, log_chances: Tensor, most: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every level the `most` likeliest paths, each [R, paths]: last tokens, parents' numbers, log chances.

    Numbers count all levels' paths from 1; of equal paths the one whose parent comes first does, then the better rank.
    """
    num_ranks, found = tokens.shape[2], []
    first = 0  # number of the level above's first
    survival = log_chances.new_zeros(len(tokens), 1)  # [R, leaves]
    for depth in range(tokens.shape[1]):
        above = survival.shape[1]
        paths = (survival[:, :, None] + log_chances[:, depth, None]).flatten(1)  # [R, leaves * ranks]
        sorted_ = paths.sort(dim=1, descending=True, stable=True)
        survival, places = sorted_.values[:, :most], sorted_.indices[:, :most]
        found.append((tokens[:, depth].gather(1, places % num_ranks), first + places // num_ranks, survival))
        first += above
    return found
