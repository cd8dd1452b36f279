"""A small model that guesses for a large one: chains, or best-first trees.

Knows: a model of its own, how far its KV follows each request. Does not know: verification, paging, the target. Its
KV lies in extra layers of the target's pool under the same block table, so commits move it along.

Sources: Leviathan et al., arXiv 2211.17192 (chains); best-first growth by cumulative draft probability as in
EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, Observed
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import CommittedPath, Model
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.recorded import RecordedModel, record
from forerun.speculation.growth import Draft, Leaf, TreeGrower
from forerun.speculation.tree import ROOT


def build(context: DrafterContext) -> Drafter:
    """The draft model the options name."""
    options = context.options
    assert options.model is not None  # DrafterConfig makes sure
    return DraftModelDrafter(
        context.load_draft(options.model),
        context.grower,
        context.kernels,
        block_size=context.block_size,
        max_draft_tokens=options.max_draft_tokens,
        width=options.tree_width,
        max_rows=context.max_rows,
    )


@dataclass(slots=True)
class _Progress:
    """How far the draft model's KV follows a request."""

    num_computed: int = 0  # known tokens whose draft KV is in the pool
    nodes: set[int] = field(default_factory=set)  # tree nodes of the current step computed beyond that


class DraftModelDrafter:
    """Drafts with a model; `width` children a node (1: a chain)."""

    name = "draft"
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        grower: TreeGrower,
        kernels: Kernels,
        block_size: int,
        max_draft_tokens: int,
        width: int,
        max_rows: int,
    ) -> None:
        self.kv_specs = model.kv_specs
        self.max_nodes = max_draft_tokens + 1
        self.weight_bytes = model.weight_bytes
        self._model = model
        self._grower = grower
        self._kernels = kernels
        self._block_size = block_size
        self._width = width
        self._max_rows = max_rows
        self._kvs: Sequence[LayerKV] = ()
        self._progress: dict[str, _Progress] = {}

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Where the pool keeps this drafter's layers; the model's forward is recorded for them."""
        self._kvs = own
        self._model = record(self._model, self._kernels, own)

    def begin(self, request: Request) -> None:
        """Nothing is computed yet; the model catches up when it first drafts."""
        self._progress[request.request_id] = _Progress()

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Accepted nodes this model had computed are known tokens now; the rest is forgotten."""
        paths = []
        for seen in observed:
            progress = self._progress.get(seen.request.request_id)
            if progress is not None and progress.nodes:
                nodes = tuple(takewhile(progress.nodes.__contains__, seen.nodes))
                progress.num_computed += len(nodes)
                progress.nodes.clear()
                paths.append(CommittedPath(seen.request.request_id, nodes))
        self._model.commit(paths)

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._progress.pop(request_id, None)
        self._model.release(request_id)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow all trees level by level, one forward a level for all requests."""
        active = [draft for draft in drafts if self._can_draft(draft)]
        if not active:
            return
        self._catch_up(active)
        if not self._draft_chains(active):
            self._grow_levels(active)

    def _draft_chains(self, drafts: Sequence[Draft]) -> bool:
        """Chains in one call of the recorded model; False, and nothing done, where that does not go."""
        model = self._model
        if self._width > 1 or not isinstance(model, RecordedModel) or not self._fits(model, drafts):
            return False
        longest_first = sorted(drafts, key=lambda draft: -draft.num_free)
        noise = self._grower.chain_noise(longest_first)
        if noise is None:
            return False
        batch = ForwardBatch.build([self._level(draft, [ROOT]) for draft in longest_first], self._block_size)
        chains = model.draft_chains(batch, noise, self._grower.must_keep_logits(drafts))
        self._grower.append_chains(longest_first, chains, self.name)
        for draft in drafts:  # the last token drawn has not been through the model
            self._progress[draft.request.request_id].nodes.update(range(min(len(draft.tree), draft.max_nodes - 1)))
        return True

    def _fits(self, model: RecordedModel, drafts: Sequence[Draft]) -> bool:
        rows = [
            draft.request.root_position + 1 - self._progress[draft.request.request_id].num_computed for draft in drafts
        ]
        return sum(rows) <= model.max_chain_rows

    def _grow_levels(self, drafts: Sequence[Draft]) -> None:
        """Level by level, each drawn and shaped in Python."""
        frontier = [Leaf(draft, ROOT) for draft in drafts]
        while frontier:
            logits = self._forward(frontier)
            grown = self._grower.grow(frontier, logits, self._width, self.name)
            frontier = self._next_frontier(frontier, grown)

    def _can_draft(self, draft: Draft) -> bool:
        self._progress.setdefault(draft.request.request_id, _Progress()).nodes.clear()
        return draft.num_free > 0 and draft.request.root_position + draft.max_nodes <= self._model.max_position

    def _catch_up(self, drafts: Sequence[Draft]) -> None:
        """Compute known tokens in chunks until the rest fits into one pass with the root."""
        for draft in drafts:
            progress = self._progress[draft.request.request_id]
            while draft.request.root_position - progress.num_computed >= self._max_rows:
                end = progress.num_computed + self._max_rows
                self._run([_rows(draft, progress.num_computed, end, ())])
                draft.num_caught_up += end - progress.num_computed
                progress.num_computed = end

    def _forward(self, frontier: Sequence[Leaf]) -> Tensor:
        """Logits after every leaf -> [len(frontier), vocab_size]; leaves of one draft stand together."""
        drafts = list({id(leaf.draft): leaf.draft for leaf in frontier}.values())
        return self._run(
            [self._level(draft, [leaf.node for leaf in frontier if leaf.draft is draft]) for draft in drafts]
        )

    def _level(self, draft: Draft, nodes: Sequence[int]) -> SequenceRows:
        """Known tokens not computed yet, then these nodes; both count as computed from here on."""
        progress, root = self._progress[draft.request.request_id], draft.request.root_position
        rows = _rows(draft, progress.num_computed, root, nodes)
        draft.num_caught_up += root - progress.num_computed
        progress.num_computed = root
        progress.nodes.update(nodes)
        return rows

    def _run(self, rows: Sequence[SequenceRows]) -> Tensor:
        return self._model.forward(ForwardBatch.build(rows, self._block_size), self._kvs).logits

    def _next_frontier(self, frontier: Sequence[Leaf], grown: Sequence[Sequence[int]]) -> list[Leaf]:
        """The new nodes worth expanding, while there is room: the `width` likeliest of each draft."""
        by_draft: dict[int, list[Leaf]] = {}
        for leaf, nodes in zip(frontier, grown, strict=True):
            by_draft.setdefault(id(leaf.draft), []).extend(Leaf(leaf.draft, node) for node in nodes)
        kept = []
        for leaves in by_draft.values():
            if leaves and leaves[0].draft.num_free > 0:
                kept.extend(sorted(_best(leaves, self._width), key=lambda leaf: leaf.node))
        return kept


def _best(leaves: Sequence[Leaf], width: int) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: -leaf.draft.survival[leaf.node])[:width]


def _rows(draft: Draft, start: int, end: int, nodes: Sequence[int]) -> SequenceRows:
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
