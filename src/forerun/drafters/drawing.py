"""Trees drawn with a causal model whose KV lies in the pool: chains in one native call, all else level by level.

Knows: how a model's logits become nodes. Does not know: whose model it is, or how its KV follows the requests; the
drafter says which rows a level takes.

Source: best-first growth by cumulative draft probability as in EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.drafters.growing import LEAST_TREE, Grove, adopt_chains, wants_chances
from forerun.drafters.grown import hand_over, wants_enqueued
from forerun.kernels.ops import LayerKV
from forerun.models.base import Model
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.bound import BoundModel
from forerun.speculation.growth import Draft, TreeGrower

Roots = Callable[[Draft], SequenceRows]  # known tokens that are to be computed, then the root


class TreeDrawer:
    """Draws trees of `width` children a node (1: a chain)."""

    def __init__(self, grower: TreeGrower, block_size: int, width: int, source: str) -> None:
        self._grower = grower
        self._block_size = block_size
        self._width = width
        self._source = source

    def draw(self, model: Model, kvs: Sequence[LayerKV], drafts: Sequence[Draft], roots: Roots) -> list[set[int]]:
        """Grow all drafts with `model` over `kvs` -> of each, the nodes whose KV lies in the row of their number."""
        rows = [roots(draft) for draft in drafts]
        gains = wants_enqueued(self._grower, drafts, self._width)
        if gains and isinstance(model, BoundModel) and model.enqueues_drafts:
            return self._enqueue(model, drafts, rows)
        if not self._draw_chains(model, drafts, rows):
            return self._draw_levels(model, kvs, drafts, rows)
        # the last token of the longest possible chain has not been through the model
        return [set(range(min(len(draft.tree), draft.max_nodes - 1))) for draft in drafts]

    def _draw_chains(self, model: Model, drafts: Sequence[Draft], rows: Sequence[SequenceRows]) -> bool:
        """Chains in one call of a model bound to its pool; False, and nothing done, where that does not go."""
        num_rows = sum(len(of_one.span) + 1 for of_one in rows)
        is_tree = self._width > 1 and any(draft.num_free >= LEAST_TREE for draft in drafts)
        if is_tree or not isinstance(model, BoundModel) or num_rows > model.max_chain_rows:
            return False
        order = sorted(range(len(drafts)), key=lambda index: -drafts[index].num_free)
        longest_first = [drafts[index] for index in order]
        noise = self._grower.chain_noise(longest_first)
        if noise is None:
            return False
        batch = ForwardBatch.build([rows[index] for index in order], self._block_size)
        judged = wants_chances(self._grower, drafts)
        drawn = model.draft_chains(batch, noise, self._grower.must_keep_logits(drafts), judged)
        adopt_chains(self._grower, longest_first, *drawn, self._source)
        return True

    def _enqueue(self, model: BoundModel, drafts: Sequence[Draft], rows: Sequence[SequenceRows]) -> list[set[int]]:
        """All levels in one go of a model whose passes are enqueued."""
        order = sorted(range(len(drafts)), key=lambda index: -drafts[index].num_free)
        largest_first = [drafts[index] for index in order]
        noise = self._grower.chain_noise(largest_first)
        assert noise is not None, "whoever can rank has plain parameters"
        batch = ForwardBatch.build([rows[index] for index in order], self._block_size)
        computed = hand_over(largest_first, model.enqueue_drafts(batch, noise, self._width), self._source)
        return [computed[order.index(index)] for index in range(len(drafts))]

    def _draw_levels(
        self, model: Model, kvs: Sequence[LayerKV], drafts: Sequence[Draft], rows: list[SequenceRows]
    ) -> list[set[int]]:
        """Each level drawn and shaped in Python."""
        grove = Grove(self._grower, drafts, self._width, self._source)
        while rows:
            grove.grow(model.forward(ForwardBatch.build(rows, self._block_size), kvs).logits)
            rows = grove.rows()
        return grove.finish()


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
