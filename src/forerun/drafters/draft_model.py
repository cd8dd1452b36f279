"""A small model that guesses for a large one: chains, or best-first trees.

Knows: a model of its own, how far its KV follows each request. Does not know: verification, paging, the target. Its
KV lies in extra layers of the target's pool under the same block table, so commits move it along.

Source: Leviathan et al., arXiv 2211.17192. How trees are drawn: `drafters.drawing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Observed
from forerun.drafters.drawing import TreeDrawer, tree_rows
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import CommittedPath, Model, passes_of, with_own_state
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.bind import bind
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from forerun.speculation.tree import ROOT


def build(context: DrafterContext) -> Drafter:
    """The draft model the options name."""
    options = context.options
    assert options.model is not None  # checked by registry.check
    return DraftModelDrafter(
        context.load_draft(options.model),
        context.grower,
        context.kernels,
        block_size=context.block_size,
        max_draft_tokens=options.max_draft_tokens,
        width=context.width,
        max_rows=context.max_rows,
    )


SPEC = DrafterSpec(
    name="draft",
    build=build,
    help="a small model",
    options=("model", "tree_width"),
    max_draft_tokens=8,
    tree_width=3,
    chains_if_quick=True,
    model="a small model with the same tokenizer",
    auto=3,
    vllm_names=("draft_model",),
)


@dataclass(slots=True)
class _Progress:
    """How far the draft model's KV follows a request."""

    num_computed: int = 0  # known tokens whose draft KV is in the pool
    nodes: set[int] = field(default_factory=set)  # tree nodes of the current step computed beyond that


class DraftModelDrafter:
    """Drafts with a model; `width` children a node (1: a chain)."""

    name = SPEC.name
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
        self._model = with_own_state(model)
        self._drawer = TreeDrawer(grower, width, self.name)
        self._kernels = kernels
        self._block_size = block_size
        self._max_rows = max_rows
        self._runner: Runner | None = None  # once attached
        self._progress: dict[str, _Progress] = {}

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Where the pool keeps this drafter's layers."""
        self._runner = bind(passes_of(self._model), self._kernels, own, self._block_size)

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

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """How far the draft model follows; () for a model that keeps a state of its own outside the pool."""
        progress = self._progress.get(request.request_id)
        return (progress.num_computed if progress else 0,) if self.kv_specs else ()

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Go on behind the rows that others computed; the root is always computed again."""
        known = min(num_ready[0], request.root_position) if self.kv_specs and num_ready else 0
        self._progress[request.request_id] = _Progress(known)

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._progress.pop(request_id, None)
        self._model.release(request_id)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow all trees level by level, one forward a level for all requests."""
        active = [draft for draft in drafts if self._can_draft(draft)]
        if not active:
            return
        assert self._runner is not None
        self._catch_up(self._runner, active)
        computed = self._drawer.draw(self._runner, active, self._roots)
        for draft, nodes in zip(active, computed, strict=True):
            self._progress[draft.request.request_id].nodes = nodes

    def _can_draft(self, draft: Draft) -> bool:
        self._progress.setdefault(draft.request.request_id, _Progress()).nodes.clear()
        return draft.num_free > 0 and draft.request.root_position + draft.num_wanted < self._model.max_position

    def _catch_up(self, runner: Runner, drafts: Sequence[Draft]) -> None:
        """Compute known tokens in chunks until the rest fits into one pass with the root."""
        for draft in drafts:
            progress = self._progress[draft.request.request_id]
            while draft.request.root_position - progress.num_computed >= self._max_rows:
                end = progress.num_computed + self._max_rows
                rows = tree_rows(draft, progress.num_computed, end, ())
                runner.run(ForwardBatch.build([rows], self._block_size))
                draft.num_caught_up += end - progress.num_computed
                progress.num_computed = end

    def _roots(self, draft: Draft) -> SequenceRows:
        """Known tokens not computed yet, which count as computed from here on, then the root."""
        progress, root = self._progress[draft.request.request_id], draft.request.root_position
        lag = root - progress.num_computed
        draft.num_caught_up += lag if lag > self.max_nodes else 0  # less is what every step leaves
        rows = tree_rows(draft, progress.num_computed, root, (ROOT,))
        progress.num_computed = root
        return rows
