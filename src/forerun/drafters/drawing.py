"""Drafts drawn by a network whose passes a runner executes.

Knows: how what was drawn becomes nodes of drafts, which drafts may be pending. Does not know: whose network it is, how
its KV follows the requests (the drafter says which rows are computed), how trees are drawn (`runtime`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from torch import Tensor

from forerun.models.batch import SequenceRows
from forerun.runtime.runner import Drawer
from forerun.speculation.draft import Draft, PendingDrafts
from forerun.speculation.drawn import DrawnTree, PendingTrees
from forerun.speculation.growth import TreeGrower
from forerun.speculation.tree import ROOT

LEAST_TREE = 4  # drafts from which a tree finds more than a chain, whose levels cost less

Roots = Callable[[Draft], SequenceRows]  # known tokens that are to be computed, then the root
Features = Callable[[Sequence[Draft]], Tensor | None]  # what these rows are fed beside tokens


class TreeDrawer:
    """Draws trees of `width` children a node (1: a chain)."""

    def __init__(self, grower: TreeGrower, width: int, source: str) -> None:
        self._grower = grower
        self._width = width
        self._source = source

    def draw(
        self, runner: Drawer, drafts: Sequence[Draft], roots: Roots, features: Features = lambda _: None
    ) -> list[set[int]]:
        """Grow all drafts -> of each, the nodes whose KV lies in their own row; filled in when they are read."""
        largest_first = sorted(drafts, key=lambda draft: -draft.num_free)
        rows, fed = [roots(draft) for draft in largest_first], features(largest_first)
        noise = self._grower.noise(largest_first)
        is_small = largest_first[0].num_free < LEAST_TREE and (noise.by_depth is not None or fed is not None)
        drawn = runner.draw(rows, fed, noise, 1 if is_small else self._width)
        computed = hand_over(largest_first, drawn, self._source)
        by_draft = {id(draft): nodes for draft, nodes in zip(largest_first, computed, strict=True)}
        return [by_draft[id(draft)] for draft in drafts]


def hand_over(drafts: Sequence[Draft], drawn: Sequence[DrawnTree] | PendingTrees, source: str) -> list[set[int]]:
    """Add what was drawn for these drafts, now or when it is read -> as `TreeDrawer.draw`."""
    computed = [{ROOT} for _ in drafts]

    def add(trees: Sequence[DrawnTree]) -> None:
        for nodes, draft, tree in zip(computed, drafts, trees, strict=True):
            nodes |= _add(draft, tree, source)

    if not isinstance(drawn, PendingTrees):
        add(drawn)
    elif _may_be_pending(drafts):
        reading = drawn.reading
        PendingDrafts(drafts, drawn.unread, lambda host: add(reading(host)), drawn.tokens, drawn.depths, drawn.masks)
    else:
        add(drawn.read())
    return computed


def _may_be_pending(drafts: Sequence[Draft]) -> bool:
    """Whether these drafts may be read with the target's choices.

    Not after reading what a drafter had missed, a prompt most often: what that takes decides whether drafting pays, and
    in the time of the pass it could not be told from it. It happens once a request.
    """
    return all(draft.may_be_pending and draft.num_caught_up == 0 for draft in drafts)


def _add(draft: Draft, tree: DrawnTree, source: str) -> set[int]:
    """Add a tree below the root -> the new nodes whose KV lies in their own row."""
    nodes, first = [ROOT], 0
    for parent, siblings in groupby(tree.parents):
        last = first + len(list(siblings))
        tokens, survival = tree.tokens[first:last], tree.log_chances[first:last]
        nodes += draft.add_drawn(nodes[parent], tokens, survival, tree.drawn_from.get(parent), source)
        first = last
    return {node for node, place in zip(nodes[1:], tree.places, strict=True) if node == place}


def tree_rows(draft: Draft, start: int, end: int, nodes: Sequence[int]) -> SequenceRows:
    """Known tokens start .. end-1, then tree nodes."""
    request, tree = draft.request, draft.tree
    return SequenceRows(
        request_id=request.request_id,
        block_table=request.block_ids,
        start=start,
        span=request.token_ids[start:end],
        tree_start=request.root_position,
        tree_tokens=[tree.tokens[node] for node in nodes],
        tree_rows=nodes,
        tree_masks=[tree.masks[node] for node in nodes],
        tree_depths=[tree.depths[node] for node in nodes],
    )
