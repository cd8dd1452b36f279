"""Trees that are grown larger than what is kept of them, level by level: EAGLE-2's (arXiv 2406.16858).

Knows: which nodes of a tree to expand next and which to keep, where the KV of each lies, how trees of several requests
grow together. Does not know: who computes logits, or where the known tokens' states are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.ops import Chains
from forerun.models.batch import SequenceRows
from forerun.speculation.growth import Draft, Leaf, TreeGrower, least_of
from forerun.speculation.tree import ROOT, DraftTree

LEAST_TREE = 4  # drafts from which a tree finds more than a chain, whose levels cost less


class Growth:
    """One request's tree while it grows, larger than what is kept of it in the end."""

    def __init__(self, draft: Draft, width: int) -> None:
        self.draft = draft
        self.scratch = _scratch(draft, width)
        self.places = {ROOT: 0}  # node -> row behind the root where the head's KV of it lies
        self._budget = draft.num_free
        self._width = width

    def useful(self, new: Sequence[int], kept: set[int]) -> list[int]:
        """Which of the nodes just drawn may have children that are kept, the likeliest first."""
        survival, is_full = self.scratch.survival, len(kept) == self._budget
        worst = min((survival[node] for node in kept), default=0.0)
        useful = [node for node in new if node in kept and (not is_full or survival[node] > worst)]
        return sorted(useful, key=lambda node: -survival[node])[: self._width]

    def chance(self, nodes: Sequence[int]) -> float:
        """That one of these, none of which is above another, is right."""
        return sum(math.exp(self.scratch.survival[node]) for node in nodes)

    def expand(self, leaves: Sequence[int], kept: set[int]) -> list[int]:
        """Give the leaves of the next level rows of their own -> the leaves by row."""
        self._place(leaves, kept)
        return sorted(leaves, key=self.places.__getitem__)

    def kept(self) -> set[int]:
        """The likeliest nodes; every one comes with its parent, since no child is likelier and parents come first."""
        survival = self.scratch.survival
        order = sorted(range(1, len(self.scratch.tree)), key=lambda node: (-survival[node], node))
        return set(order[: self._budget])

    def _place(self, leaves: Sequence[int], kept: set[int]) -> None:
        """Give leaves rows of their own; those of nodes that are not kept are free again."""
        self.places = {node: place for node, place in self.places.items() if node == ROOT or node in kept}
        taken = set(self.places.values())
        free = (place for place in range(self._budget + 1) if place not in taken)
        self.places.update(zip(leaves, free, strict=False))

    def rows(self, nodes: Sequence[int]) -> SequenceRows:
        """These nodes, behind all known tokens."""
        request, tree = self.draft.request, self.scratch.tree
        return SequenceRows(
            request_id=request.request_id,
            block_table=request.block_ids,
            start=request.root_position,
            span=(),
            tree_start=request.root_position,
            tree_tokens=[tree.tokens[node] for node in nodes],
            tree_rows=[self.places[node] for node in nodes],
            tree_masks=[sum(1 << self.places[i] for i in tree.path(node)) for node in nodes],
            tree_depths=[tree.depths[node] for node in nodes],
        )

    def finish(self) -> set[int]:
        """Hand the kept nodes over, in the order they were drawn, with what they were drawn from.

        -> those of the new nodes, and the root, whose KV lies in the row of their number.
        """
        tree, here = self.scratch.tree, {ROOT: ROOT}
        for node in sorted(self.kept()):
            parent = here[tree.parents[node]]
            here[node] = self.draft.add(parent, tree.tokens[node], self.scratch.survival[node], tree.sources[node])
        for node, place in here.items():
            if self.draft.tree.children(place):
                self.draft.tree.adopt_proposal(place, tree.proposal(node))
        return {number for node, number in here.items() if self.places.get(node) == number}


class Grove:
    """Trees of several requests that grow together, a level a pass of whoever computes logits."""

    def __init__(self, grower: TreeGrower, drafts: Sequence[Draft], width: int, source: str) -> None:
        """`width` children a node (1: chains), at most so many leaves a level and request."""
        self._grower = grower
        self._width = width
        self._source = source
        self._growths = [Growth(draft, width) for draft in drafts]
        self._least = least_of(drafts)
        self._leaves: list[list[int]] = [[ROOT] for _ in drafts]

    def grow(self, logits: Tensor) -> Tensor:
        """Draw the children of all leaves from logits [number of leaves, V], and choose the next leaves of them: none
        where they promise too little for a level's pass.

        -> the rows of `logits` that the next leaves hang from [number of next leaves] int64.
        """
        frontier = [
            Leaf(growth.scratch, node)
            for growth, nodes in zip(self._growths, self._leaves, strict=True)
            for node in nodes
        ]
        drawn = iter(self._grower.grow(frontier, logits, self._width, self._source))
        new = [[child for _ in nodes for child in next(drawn)] for nodes in self._leaves]
        grown = self._next_leaves(new)
        parents = self._rows_above(grown)
        self._leaves = grown
        return torch.tensor(parents, dtype=torch.int64)

    def _next_leaves(self, new: Sequence[Sequence[int]]) -> list[list[int]]:
        """Of the nodes just drawn for each request."""
        kept = [(growth, growth.kept()) for growth in self._growths]
        leaves = [growth.useful(nodes, known) for (growth, known), nodes in zip(kept, new, strict=True)]
        if sum(growth.chance(nodes) for growth, nodes in zip(self._growths, leaves, strict=True)) < self._least:
            return [[] for _ in leaves]
        return [growth.expand(nodes, known) for (growth, known), nodes in zip(kept, leaves, strict=True)]

    def _rows_above(self, grown: Sequence[Sequence[int]]) -> list[int]:
        found, first = [], 0
        for growth, old, new in zip(self._growths, self._leaves, grown, strict=True):
            rows = {node: first + index for index, node in enumerate(old)}
            found += [rows[growth.scratch.tree.parents[node]] for node in new]
            first += len(old)
        return found

    def rows(self) -> list[SequenceRows]:
        """The leaves, by request; none when there is nothing to expand."""
        pairs = zip(self._growths, self._leaves, strict=True)
        return [growth.rows(nodes) for growth, nodes in pairs if nodes]

    def finish(self) -> list[set[int]]:
        """Hand the kept nodes to the drafts -> of each, the nodes whose KV lies in the row of their number."""
        return [growth.finish() for growth in self._growths]


def _scratch(draft: Draft, width: int) -> Draft:
    """A draft of the same request with room for everything that is drawn: `width` leaves a level, at most as many
    levels as nodes are kept."""
    room = 1 + width + width * width * draft.num_free
    scratch = Draft(draft.request, room)
    scratch.tree = DraftTree(draft.request.token_ids[-1], room)
    return scratch


def wants_chances(grower: TreeGrower, drafts: Sequence[Draft]) -> bool:
    """Whether chains drawn for these are to come with their chances."""
    return grower.coupled or any(draft.request.params.greedy for draft in drafts)


def adopt_chains(
    grower: TreeGrower, drafts: Sequence[Draft], chains: Chains, log_chances: Tensor | None, source: str
) -> None:
    """Hang chains drawn whole into their drafts, the longest first, with their chances if they came."""
    grower.append_chains(drafts, chains, source)
    if log_chances is not None:
        judge_chains(drafts, log_chances, grower.coupled)


def judge_chains(drafts: Sequence[Draft], log_chances: Tensor, may_rank: bool) -> None:
    """What is known of chains drawn whole; log_chances [steps, num_drafts], as `TreeGrower` has them for each token.

    `may_rank`: also of those drawn with noise, which the coupled rule allows.
    """
    for draft, chances in zip(drafts, log_chances.T.tolist(), strict=True):
        if may_rank or draft.request.params.greedy:
            for node, chance in enumerate(chances[: len(draft.tree) - 1], 1):
                draft.survival[node] = draft.survival[node - 1] + min(chance, 0.0)
