"""Trees drawn by a network whose passes a runner executes: whole in one call where that goes, else level by level.

Knows: how logits become nodes. Does not know: whose network it is, or how its KV follows the requests; the drafter says
which rows a level takes.

Source: best-first growth by cumulative draft probability as in EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from forerun.drafters.growing import LEAST_TREE, Grove, wants_chances
from forerun.drafters.grown import hand_over, wants_enqueued
from forerun.kernels.device import to_device
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower

Roots = Callable[[Draft], SequenceRows]  # known tokens that are to be computed, then the root
Features = Callable[[Sequence[Draft]], Tensor | None]  # what these rows are fed beside tokens


class TreeDrawer:
    """Draws trees of `width` children a node (1: a chain)."""

    def __init__(self, grower: TreeGrower, block_size: int, width: int, source: str, shift: int = 0) -> None:
        """`shift`: added to the positions of all rows."""
        self._grower = grower
        self._block_size = block_size
        self._width = width
        self._source = source
        self._shift = shift

    def draw(
        self, runner: Runner, drafts: Sequence[Draft], roots: Roots, features: Features = lambda _: None
    ) -> list[set[int]]:
        """Grow all drafts -> of each, the nodes whose KV lies in the row of their number."""
        largest_first = sorted(drafts, key=lambda draft: -draft.num_free)
        batch, fed = self._batch([roots(draft) for draft in largest_first]), features(largest_first)
        width = self._width if largest_first[0].num_free >= LEAST_TREE else 1
        computed = self._draw_at_once(runner, largest_first, batch, fed, width)
        if computed is None:
            of_levels = self._width if fed is None else width  # a head's small trees are chains here, too
            computed = self._draw_levels(runner, largest_first, batch, fed, of_levels)
        by_draft = {id(draft): nodes for draft, nodes in zip(largest_first, computed, strict=True)}
        return [by_draft[id(draft)] for draft in drafts]

    def _draw_at_once(
        self, runner: Runner, drafts: Sequence[Draft], batch: ForwardBatch, features: Tensor | None, width: int
    ) -> list[set[int]] | None:
        """All levels in one call; None, and nothing done, where that does not go."""
        noise = self._grower.chain_noise(drafts)
        if noise is None:
            return None
        if wants_enqueued(self._grower, drafts, width):
            enqueued = runner.enqueue(batch, features, noise, width)
            if enqueued is not None:
                return hand_over(drafts, enqueued, self._source)
        judged, keep_logits = wants_chances(self._grower, drafts), self._grower.must_keep_logits(drafts)
        drawn = runner.draw_chains(batch, features, noise, keep_logits, judged) if width == 1 else None
        if drawn is None:
            return None
        chains = self._grower.add_chains(drafts, *drawn, self._source)
        return [_computed(draft, chain) for draft, chain in zip(drafts, chains, strict=True)]

    def _draw_levels(
        self, runner: Runner, drafts: Sequence[Draft], batch: ForwardBatch, features: Tensor | None, width: int
    ) -> list[set[int]]:
        """One pass a level, which is drawn and shaped in Python."""
        grove = Grove(self._grower, drafts, width, self._source)
        out = runner.run(batch, features)
        while True:
            parents, rows = grove.grow(out.logits), grove.rows()
            if not rows:
                return grove.finish()
            made = out.features
            fed = None if made is None else made.index_select(0, to_device(parents, made.device))
            out = runner.run_below(self._batch(rows), fed)

    def _batch(self, rows: Sequence[SequenceRows]) -> ForwardBatch:
        return ForwardBatch.build(rows, self._block_size, self._shift)


def _computed(draft: Draft, chain: Sequence[int]) -> set[int]:
    """The nodes of a chain whose KV lies in their own row; the last of the longest possible was not computed."""
    return {node for place, node in enumerate(chain[: draft.num_wanted]) if node == place}


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
