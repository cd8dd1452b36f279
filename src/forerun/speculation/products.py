"""Trees from logits that do not depend on the drafted prefix: one row a depth, as heads beside the output layer give.

Knows: depths, ranks, room. Does not know: what computed the logits, and draws nothing itself (`growth` does).

Such a tree is a product: every node of a depth has the same candidates, so the best tree of n nodes consists of the n
paths of ranks with the largest sums of log chances, found one by one with a heap (Medusa, arXiv 2401.10774, section
2.3.3, has such a tree fixed beforehand; here it is new for every step). A path's prefixes and its siblings of better
rank have no smaller sums, so they come before it. Of equal sums the shorter path comes first, then the one whose parent
does, then the better rank: an order that can be found level by level as well (`runtime.head_trees`, on a device).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.chances import LEAST_RANKS, head_log_chances
from forerun.kernels.device import all_to_host, indices_on, to_device
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Leaf, TreeGrower
from forerun.speculation.tree import ROOT

_LEVEL_WIDTH = 4  # children where a tree is filled level by level and would else end at its first


class Ranks(NamedTuple):
    """One draft's candidates: at every depth the best tokens, best first, and the log chance of each."""

    tokens: list[list[int]]  # -1 behind the last token that is possible
    log_chances: list[list[float]]


def grow_products(grower: TreeGrower, drafts: Sequence[Draft], logits: Tensor, width: int, source: str) -> None:
    """Grow all drafts, up to `width` children a node, from logits [num_drafts, depths, vocab_size]."""
    ranked = [index for index, draft in enumerate(drafts) if grower.can_rank(draft.request)]
    drawn = [index for index, draft in enumerate(drafts) if not grower.can_rank(draft.request)]
    if ranked:
        chosen = [drafts[index] for index in ranked]
        rows = logits[indices_on(ranked, logits.device)] if drawn else logits  # a copy only where some must be left out
        for draft, ranks in zip(chosen, _rank(grower, chosen, rows, width), strict=True):
            _grow_best_first(draft, ranks, source)
    if drawn:
        rows = logits[indices_on(drawn, logits.device)]
        _grow_levels(grower, [drafts[index] for index in drawn], rows, width, source)


def next_frontier(frontier: Sequence[Leaf], grown: Sequence[Sequence[int]], width: int) -> list[Leaf]:
    """The new nodes worth expanding, while there is room: the `width` likeliest of each draft, ascending."""
    by_draft: dict[int, list[Leaf]] = {}
    for leaf, nodes in zip(frontier, grown, strict=True):
        by_draft.setdefault(id(leaf.draft), []).extend(Leaf(leaf.draft, node) for node in nodes)
    kept = []
    for leaves in by_draft.values():
        if leaves and leaves[0].draft.num_free > 0:
            best = sorted(leaves, key=lambda leaf: -leaf.draft.survival[leaf.node])[:width]
            kept.extend(sorted(best, key=lambda leaf: leaf.node))
    return kept


def _rank(grower: TreeGrower, drafts: Sequence[Draft], logits: Tensor, width: int) -> list[Ranks]:
    ids, scores = grower.rank_depths([draft.request for draft in drafts], logits, max(width, LEAST_RANKS))
    is_greedy = to_device(torch.tensor([draft.request.params.greedy for draft in drafts]), logits.device)
    chances = head_log_chances(logits, scores, is_greedy[:, None, None])
    log_chances = chances.masked_fill(ids < 0, -torch.inf)  # also heads without an answer
    found = all_to_host(ids, log_chances)  # each [num_drafts, depths, ranks]
    best = (ranks[:, :, :width].tolist() for ranks in found)
    return [Ranks(*lists) for lists in zip(*best, strict=True)]


def _grow_best_first(draft: Draft, ranks: Ranks, source: str) -> None:
    chances, survival = ranks.log_chances, {ROOT: 0.0}
    heap = [(-chances[0][0], 0, ROOT, 0)]  # (minus the path's log chance, depth, parent, rank)
    while heap and draft.num_free > 0:
        cost, depth, parent, rank = heappop(heap)
        token = ranks.tokens[depth][rank]
        if token < 0:
            continue
        node = draft.add(parent, token, -cost, source)
        survival[node] = -cost
        if rank + 1 < len(chances[depth]):
            heappush(heap, (-(survival[parent] + chances[depth][rank + 1]), depth, parent, rank + 1))
        if depth + 1 < len(chances):
            heappush(heap, (-(survival[node] + chances[depth + 1][0]), depth + 1, node, 0))


def _grow_levels(grower: TreeGrower, drafts: Sequence[Draft], logits: Tensor, width: int, source: str) -> None:
    """Node by node, where noise or shaping is each node's own."""
    places = {id(draft): index for index, draft in enumerate(drafts)}
    frontier, width = [Leaf(draft, ROOT) for draft in drafts], min(width, _LEVEL_WIDTH)
    for depth in range(logits.shape[1]):
        if frontier:
            of_leaves = indices_on([places[id(leaf.draft)] for leaf in frontier], logits.device)
            rows = logits[of_leaves, depth]  # [num_leaves, vocab_size]
            frontier = next_frontier(frontier, grower.grow(frontier, rows, width, source), width)
