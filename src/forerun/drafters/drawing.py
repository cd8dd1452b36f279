"""Trees drawn with a causal model whose KV lies in the pool: chains in one native call, all else level by level.

Knows: how a model's logits become nodes. Does not know: whose model it is, or how its KV follows the requests; the
drafter says which rows a level takes.

Source: best-first growth by cumulative draft probability as in EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.kernels.ops import LayerKV
from forerun.models.base import Model
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.bound import BoundModel
from forerun.speculation.growth import Draft, Leaf, TreeGrower
from forerun.speculation.products import next_frontier
from forerun.speculation.tree import ROOT

Level = Callable[[Draft, Sequence[int]], SequenceRows]  # rows that give logits after these nodes


class TreeDrawer:
    """Draws trees of `width` children a node (1: a chain)."""

    def __init__(self, grower: TreeGrower, block_size: int, width: int, source: str) -> None:
        self._grower = grower
        self._block_size = block_size
        self._width = width
        self._source = source

    def draw(self, model: Model, kvs: Sequence[LayerKV], drafts: Sequence[Draft], level: Level, num_rows: int) -> bool:
        """Grow all drafts with `model` over `kvs`; whether in one native call, which asks for no level but the roots'.

        `num_rows`: what the first level takes.
        """
        native = self._draw_chains(model, drafts, level, num_rows)
        if not native:
            self._draw_levels(model, kvs, drafts, level)
        return native

    def _draw_chains(self, model: Model, drafts: Sequence[Draft], level: Level, num_rows: int) -> bool:
        """Chains in one call of a model bound to its pool; False, and nothing done, where that does not go."""
        if self._width > 1 or not isinstance(model, BoundModel) or num_rows > model.max_chain_rows:
            return False
        longest_first = sorted(drafts, key=lambda draft: -draft.num_free)
        noise = self._grower.chain_noise(longest_first)
        if noise is None:
            return False
        batch = ForwardBatch.build([level(draft, [ROOT]) for draft in longest_first], self._block_size)
        chains = model.draft_chains(batch, noise, self._grower.must_keep_logits(drafts))
        self._grower.append_chains(longest_first, chains, self._source)
        return True

    def _draw_levels(self, model: Model, kvs: Sequence[LayerKV], drafts: Sequence[Draft], level: Level) -> None:
        """Each level drawn and shaped in Python."""
        frontier = [Leaf(draft, ROOT) for draft in drafts]
        while frontier:
            rows = [level(draft, nodes) for draft, nodes in _by_draft(frontier)]
            logits = model.forward(ForwardBatch.build(rows, self._block_size), kvs).logits  # [num_leaves, vocab_size]
            grown = self._grower.grow(frontier, logits, self._width, self._source)
            frontier = next_frontier(frontier, grown, self._width)


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


def _by_draft(frontier: Sequence[Leaf]) -> list[tuple[Draft, list[int]]]:
    """Leaves of one draft stand together -> each draft with its leaves' nodes."""
    found: list[tuple[Draft, list[int]]] = []
    for leaf in frontier:
        if not found or found[-1][0] is not leaf.draft:
            found.append((leaf.draft, []))
        found[-1][1].append(leaf.node)
    return found
