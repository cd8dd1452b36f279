"""Trees of several requests that grow together: a level a pass, for whoever computes logits.

Knows: which rows a level's pass computes, when another level is worth its pass. Does not know: who computes logits,
which nodes are likely (`speculation.best_first`), or where the known tokens' states are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.models.batch import SequenceRows
from forerun.speculation.best_first import Candidates
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Place, TreeGrower, least_of
from forerun.speculation.tree import ROOT

LEAST_TREE = 4  # drafts from which a tree finds more than a chain, whose levels cost less


class Grove:
    """Trees of several requests that grow together, a level a pass of whoever computes logits."""

    def __init__(self, grower: TreeGrower, drafts: Sequence[Draft], width: int, source: str) -> None:
        """`width` children a node (1: chains), at most so many leaves a level and request."""
        self._grower = grower
        self._width = width
        self._source = source
        self._drafts = drafts
        self._trees = [Candidates(draft.request.token_ids[-1], draft.num_free, width) for draft in drafts]
        self._least = least_of(drafts)
        self._leaves: list[list[int]] = [[ROOT] for _ in drafts]

    def grow(self, logits: Tensor) -> Tensor:
        """Draw the children of all leaves from logits [number of leaves, V], and choose the next leaves of them: none
        where they promise too little for a level's pass.

        -> the rows of `logits` that the next leaves hang from [number of next leaves] int64.
        """
        places = [
            Place(draft.request, node, [tree.tokens[above] for above in tree.path(node)])
            for draft, tree, nodes in zip(self._drafts, self._trees, self._leaves, strict=True)
            for node in nodes
        ]
        drawn = iter(self._grower.draw(places, logits, self._width))
        hung = zip(self._trees, self._leaves, strict=True)
        new = [[child for node in nodes for child in tree.hang(node, next(drawn))] for tree, nodes in hung]
        grown = self._next_leaves(new)
        parents = self._rows_above(grown)
        self._leaves = grown
        return torch.tensor(parents, dtype=torch.int64)

    def _next_leaves(self, new: Sequence[Sequence[int]]) -> list[list[int]]:
        """Of the nodes just drawn for each request."""
        kept = [(tree, tree.kept()) for tree in self._trees]
        leaves = [tree.useful(nodes, known) for (tree, known), nodes in zip(kept, new, strict=True)]
        if sum(tree.chance(nodes) for tree, nodes in zip(self._trees, leaves, strict=True)) < self._least:
            return [[] for _ in leaves]
        return [tree.expand(nodes, known) for (tree, known), nodes in zip(kept, leaves, strict=True)]

    def _rows_above(self, grown: Sequence[Sequence[int]]) -> list[int]:
        found, first = [], 0
        for tree, old, new in zip(self._trees, self._leaves, grown, strict=True):
            rows = {node: first + index for index, node in enumerate(old)}
            found += [rows[tree.parents[node]] for node in new]
            first += len(old)
        return found

    def rows(self) -> list[SequenceRows]:
        """The leaves, by request; none when there is nothing to expand."""
        found = zip(self._drafts, self._trees, self._leaves, strict=True)
        return [_rows(draft, tree, nodes) for draft, tree, nodes in found if nodes]

    def finish(self) -> list[set[int]]:
        """Add the kept nodes to the drafts -> of each, the nodes whose KV lies in their own row."""
        return [tree.finish(draft, self._source) for draft, tree in zip(self._drafts, self._trees, strict=True)]


def _rows(draft: Draft, tree: Candidates, nodes: Sequence[int]) -> SequenceRows:
    """These nodes, behind all known tokens."""
    request, paths = draft.request, [tree.path(node) for node in nodes]
    return SequenceRows(
        request_id=request.request_id,
        block_table=request.block_ids,
        start=request.root_position,
        span=(),
        tree_start=request.root_position,
        tree_tokens=[tree.tokens[node] for node in nodes],
        tree_rows=[tree.places[node] for node in nodes],
        tree_masks=[1 | sum(1 << tree.places[above] for above in path) for path in paths],
        tree_depths=[len(path) for path in paths],
    )


def wants_chances(grower: TreeGrower, drafts: Sequence[Draft]) -> bool:
    """Whether chains drawn for these are to come with their chances."""
    return grower.coupled or any(draft.request.params.greedy for draft in drafts)
