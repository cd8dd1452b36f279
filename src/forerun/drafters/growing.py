"""Trees that are grown larger than what is kept of them, level by level: EAGLE-2's (arXiv 2406.16858).

Knows: which nodes of one request's tree to expand next and which to keep, where the KV of each lies. Does not know:
who computes logits, or where the known tokens' states are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.device import indices_on, to_device, to_host
from forerun.models.batch import SequenceRows
from forerun.speculation.growth import Draft, Leaf
from forerun.speculation.tree import ROOT, DraftTree


class Growth:
    """One request's tree while it grows, larger than what is kept of it in the end."""

    def __init__(self, draft: Draft, width: int) -> None:
        self.draft = draft
        self.scratch = _scratch(draft, width)
        self.places = {ROOT: 0}  # node -> row behind the root where the head's KV of it lies
        self._budget = draft.num_free
        self._width = width

    def next_leaves(self, new: Sequence[int]) -> list[int]:
        """Which of the nodes just drawn to expand: those whose children may be among the kept."""
        kept = self._kept()
        survival, is_full = self.scratch.survival, len(kept) == self._budget
        worst = min((survival[node] for node in kept), default=0.0)
        useful = [node for node in new if node in kept and (not is_full or survival[node] > worst)]
        leaves = sorted(useful, key=lambda node: -survival[node])[: self._width]
        self._place(leaves, kept)
        return sorted(leaves, key=self.places.__getitem__)

    def _kept(self) -> set[int]:
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

    def rows(self, nodes: Sequence[int], start: int) -> SequenceRows:
        """Known tokens from `start` on, then these nodes."""
        request, tree = self.draft.request, self.scratch.tree
        return SequenceRows(
            request_id=request.request_id,
            block_table=request.block_ids,
            start=start,
            span=request.token_ids[start : request.root_position],
            tree_start=request.root_position,
            tree_tokens=[tree.tokens[node] for node in nodes],
            tree_rows=[self.places[node] for node in nodes],
            tree_masks=[sum(1 << self.places[i] for i in tree.path(node)) for node in nodes],
            tree_depths=[tree.depths[node] for node in nodes],
        )

    def finish(self) -> None:
        """Hand the kept nodes over, in the order they were drawn, with what they were drawn from."""
        tree, here = self.scratch.tree, {ROOT: ROOT}
        for node in sorted(self._kept()):
            parent = here[tree.parents[node]]
            here[node] = self.draft.add(parent, tree.tokens[node], self.scratch.survival[node], tree.sources[node])
        for node, place in here.items():
            if self.draft.tree.children(place):
                self.draft.tree.adopt_proposal(place, tree.proposal(node))


def _scratch(draft: Draft, width: int) -> Draft:
    """A draft of the same request with room for everything that is drawn: `width` leaves a level, at most as many
    levels as nodes are kept."""
    room = 1 + width + width * width * draft.num_free
    scratch = Draft(draft.request, room)
    scratch.tree = DraftTree(draft.request.token_ids[-1], room)
    return scratch


def judge_greedy(leaves: Sequence[Leaf], drawn: Sequence[Sequence[int]], logits: Tensor, may_rank: bool) -> None:
    """Without randomness a child's chance is the head's own probability, as EAGLE-2 has it; logits [num_leaves, V].

    `may_rank`: judge also those drawn with noise, see `judge_chains`.
    """
    greedy = [i for i, leaf in enumerate(leaves) if drawn[i] and (may_rank or leaf.draft.request.params.greedy)]
    if not greedy:
        return
    rows = logits if len(greedy) == len(leaves) else logits[indices_on(greedy, logits.device)]
    tokens = [[leaves[i].draft.tree.tokens[child] for child in drawn[i]] for i in greedy]
    width = max(map(len, tokens))
    ids = to_device(torch.tensor([own + [0] * (width - len(own)) for own in tokens]), logits.device)  # [greedy, width]
    chances = to_host(rows.gather(1, ids).double() - rows.logsumexp(dim=1, keepdim=True).double()).tolist()
    for i, values in zip(greedy, chances, strict=True):
        draft, node = leaves[i]
        for child, value in zip(drawn[i], values, strict=False):
            draft.survival[child] = draft.survival[node] + min(value, 0.0)


def judge_chains(drafts: Sequence[Draft], log_chances: Tensor, may_rank: bool) -> None:
    """The same of chains drawn whole; log_chances [steps, num_drafts], the head's own for each token.

    `may_rank`: also of those drawn with noise. There a token the head thinks unlikely tells that it was unsure, and the
    target's choice is the less likely to be the same; how much less is for a policy to learn.
    """
    for draft, chances in zip(drafts, log_chances.T.tolist(), strict=True):
        if may_rank or draft.request.params.greedy:
            for node, chance in enumerate(chances[: len(draft.tree) - 1], 1):
                draft.survival[node] = draft.survival[node - 1] + min(chance, 0.0)


def parent_rows(growths: Sequence[Growth], leaves: Sequence[Sequence[int]], grown: Sequence[Sequence[int]]) -> Tensor:
    """Which row of the last pass each new leaf hangs from -> [number of new leaves] int64."""
    found, first = [], 0
    for growth, old, new in zip(growths, leaves, grown, strict=True):
        rows = {node: first + index for index, node in enumerate(old)}
        found += [rows[growth.scratch.tree.parents[node]] for node in new]
        first += len(old)
    return torch.tensor(found, dtype=torch.int64)
