"""Trees of logits that were computed for all depths at once, by heads beside the output layer or in blocks.

Knows: which candidates a depth has. Does not know: what computed the logits, which paths are kept
(`speculation.best_first`).

Every node of a depth has the same logits, or those that follow from the token above (`SlotPairs`). Where it has the
same candidates, too (no noise or shaping of its own), the likeliest paths are kept; else trees are filled level by
level. Logits that follow from all tokens above (`draw_in_order`) are made level by level, as by a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from forerun.kernels.chances import LEAST_RANKS, head_log_chances
from forerun.kernels.device import all_to_host, indices_on, to_device
from forerun.models.base import GuessedBlocks, PairScores, PassOutput, SlotOrder
from forerun.runtime.eager import grow_levels
from forerun.speculation.best_first import Candidates, best_paths, best_products
from forerun.speculation.drawn import DrawnTree
from forerun.speculation.growth import Place, TreeNoise
from forerun.speculation.tree import ROOT

_LEVEL_WIDTH = 4  # children where a tree is filled level by level and would else end at its first


@dataclass(frozen=True, slots=True)
class SlotPairs:
    """How well a token of one slot follows each of the slot before."""

    scores: PairScores
    states: Tensor  # [R, depths, H]
    roots: Tensor  # [R] int64: the tokens before the first slots

    def of(self, chosen: Tensor) -> SlotPairs:
        """Those of some trees [n]."""
        return SlotPairs(self.scores, self.states[chosen], self.roots[chosen])

    def among(self, ids: Tensor) -> Tensor:
        """What is added to the logits of candidates [R, depths, n], by the one above -> [R, depths, n above, n]."""
        (num_trees, depths, num), known = ids.shape, ids.clamp(min=0)
        first = self.roots[:, None, None].expand(-1, 1, num)
        above = torch.cat([first, known[:, :-1]], dim=1).flatten(0, 1)  # [R * depths, n]
        added = self.scores(self.states.flatten(0, 1), above, known.flatten(0, 1))
        return added.view(num_trees, depths, num, num)

    def rows(self, trees: Tensor, depth: int, above: Tensor, logits: Tensor) -> Tensor:
        """Logits [n, V] of a depth's nodes below the tokens `above` [n], of trees [n]; -inf but for the candidates."""
        best = logits.topk(min(self.scores.num_candidates, logits.shape[1]))
        added = self.scores(self.states[trees, depth], above[:, None], best.indices)[:, 0]
        return torch.full_like(logits, -torch.inf).scatter_(1, best.indices, best.values + added)


def draw_depths(noise: TreeNoise, logits: Tensor, width: int, pairs: SlotPairs | None = None) -> list[DrawnTree]:
    """Trees of what was computed at once, from logits [R, depths, V], -inf where a tree ends before."""
    ranked, drawn = can_rank(noise), dict[int, DrawnTree]()
    for draw, wanted in ((_likeliest, True), (_levels, False)):
        chosen = [index for index, can in enumerate(ranked) if can is wanted]
        if len(chosen) == len(ranked):
            return draw(noise.of(chosen), logits, width, pairs)
        if chosen:
            rows = indices_on(chosen, logits.device)
            of_chosen = None if pairs is None else pairs.of(rows)
            drawn |= zip(chosen, draw(noise.of(chosen), logits[rows], width, of_chosen), strict=True)
    return [drawn[index] for index in range(len(ranked))]


def draw_in_order(noise: TreeNoise, blocks: GuessedBlocks, order: SlotOrder, width: int) -> list[DrawnTree]:
    """Trees behind the roots of blocks whose slots' logits follow from the tokens above, in the order of the slots."""
    logits_of, device, depths = order(blocks), blocks.logits.device, count(1)

    def below(trees: Sequence[Candidates], leaves: Sequence[Sequence[int]], given: Tensor | None) -> PassOutput:
        of_trees = [(index, tree.tokens[node]) for index, tree in enumerate(trees) for node in leaves[index]]
        chosen, above = (indices_on(column, device) for column in zip(*of_trees, strict=True))
        return logits_of(chosen, next(depths), above, given)

    first = logits_of(torch.arange(len(blocks.roots), device=device), 0, blocks.roots, None)
    drawn = grow_levels(noise, width, first, below, blocks.logits.shape[1])
    return [tree._replace(places=[-1] * len(tree.tokens)) for tree in drawn]  # nodes have no KV


def can_rank(noise: TreeNoise) -> list[bool]:
    """Of each tree whether a depth's candidates are the same for all its nodes."""
    return [noise.can_rank(index) for index in range(len(noise.requests))]


def _likeliest(noise: TreeNoise, logits: Tensor, width: int, pairs: SlotPairs | None) -> list[DrawnTree]:
    """The likeliest paths of ranks, from logits [R, depths, V]."""
    num_ranks = max(width, LEAST_RANKS) if pairs is None else pairs.scores.num_candidates
    ids, scores = noise.rank_depths(logits, num_ranks)  # [R, depths, ranks]
    if pairs is not None:
        return _lattice_paths(noise, ids, scores, width, pairs)
    is_greedy = to_device(torch.tensor([request.params.greedy for request in noise.requests]), logits.device)
    chances = head_log_chances(logits, scores, is_greedy[:, None, None])
    log_chances = chances.masked_fill(ids < 0, -torch.inf)  # also heads without an answer
    tokens, best = (ranks[:, :, :width].tolist() for ranks in all_to_host(ids, log_chances))
    return [best_products(*of_tree) for of_tree in zip(tokens, best, noise.sizes, strict=True)]


def _lattice_paths(
    noise: TreeNoise, ids: Tensor, scores: Tensor, width: int, pairs: SlotPairs
) -> list[DrawnTree]:  # fmt: skip
    """The likeliest paths through candidates [R, depths, n] whose scores, noise included, depend on the one above."""
    heat = [1.0 if request.params.greedy else request.params.temperature for request in noise.requests]
    added = (
        pairs.among(ids).double() / to_device(torch.tensor(heat, dtype=torch.float64), ids.device)[:, None, None, None]
    )
    joint = (scores[:, :, None] + added).masked_fill(ids[:, :, None] < 0, -torch.inf)  # [R, depths, n above, n]
    chances = joint.log_softmax(-1).masked_fill(joint == -torch.inf, -torch.inf)
    best, places = (ranks[..., :width] for ranks in chances.sort(dim=-1, descending=True, stable=True))
    tokens = ids[:, :, None].expand(joint.shape).gather(-1, places)
    columns = (ranks.tolist() for ranks in all_to_host(tokens, best, places))
    return [best_paths(*of_tree) for of_tree in zip(*columns, noise.sizes, strict=True)]


def _levels(noise: TreeNoise, logits: Tensor, width: int, pairs: SlotPairs | None) -> list[DrawnTree]:
    """Node by node and level by level while there is room, from logits [R, depths, V]."""
    width = min(width, _LEVEL_WIDTH)
    trees = [Candidates(size, width) for size in noise.sizes]
    leaves = [[ROOT] for _ in trees]
    for depth in range(logits.shape[1]):
        places = [
            (index, Place(noise.requests[index], node, tree.path_tokens(node)))
            for index, (tree, nodes) in enumerate(zip(trees, leaves, strict=True))
            for node in nodes
        ]
        if not places:
            break
        chosen = indices_on([index for index, _ in places], logits.device)
        rows = logits[chosen, depth]  # [num_leaves, V]
        if pairs is not None:
            rows = pairs.rows(chosen, depth, _tokens_above(places, pairs), rows)
        children = iter(noise.draw([place for _, place in places], rows, width))
        leaves = [tree.fill(nodes, children) for tree, nodes in zip(trees, leaves, strict=True)]
    return [tree.finish() for tree in trees]


def _tokens_above(places: Sequence[tuple[int, Place]], pairs: SlotPairs) -> Tensor:
    """The token each place comes after [n]."""
    drawn = indices_on([place.path[-1] if place.path else -1 for _, place in places], pairs.roots.device)
    return torch.where(drawn < 0, pairs.roots[indices_on([index for index, _ in places], drawn.device)], drawn)
