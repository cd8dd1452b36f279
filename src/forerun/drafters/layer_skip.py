"""Self-speculation: drafts with some of the target's own layers.

Knows: which layers it drafts with, and when to look for better ones. Does not know: the arithmetic of layers,
verification, paging. It has no weights and no KV of its own: the layers write drafted rows where the target keeps
theirs, beside the true rows of all known tokens, and the verifying pass computes the root and every drafted row anew.
So there is nothing to catch up with, and what is drafted can never reach the output.

The layers are given (the first E for a checkpoint trained for early exit: LayerSkip, arXiv 2404.16710), or found on
the fly in the text itself (CLaSp, arXiv 2505.24196; see `models.layer_search`). A search is due at the first draft
and then every _SEARCH_EVERY times drafts are wanted; it reads _SAMPLE_TOKENS known tokens about as often as half the
target has layers, so at 16 layers it costs about 5 passes of the target over a few rows: some 2 % of the time between.
No randomness is involved, and what is found changes speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Stateless
from forerun.drafters.drawing import TreeDrawer, tree_rows
from forerun.errors import UnsupportedError
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import passes_of
from forerun.models.batch import SequenceRows
from forerun.models.decoder import Decoder
from forerun.models.layer_search import Sample, find_layers
from forerun.models.subset import subset_decoder
from forerun.runtime.bind import bind
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT

_SEARCH_EVERY = 64
_SAMPLE_TOKENS = 4


def build(context: DrafterContext) -> Drafter:
    """The layers the options name, or a search for them."""
    options, model = context.options, context.model
    if not isinstance(model, Decoder):
        raise UnsupportedError(
            "layer_skip drafts with the target's own layers, which a model that runs through transformers does not "
            "give one by one; choose another drafter, or a target of a family that forerun implements"
        )
    drawer = TreeDrawer(context.grower, context.width, LayerSkipDrafter.name)
    return LayerSkipDrafter(
        model, context.kernels, drawer, context.block_size, options.max_draft_tokens, options.layers
    )


SPEC = DrafterSpec(
    name="layer_skip",
    build=build,
    help="some of the target's own layers",
    options=("layers", "tree_width"),
    tree_width=1,
    needs_layers=True,
)


class LayerSkipDrafter(Stateless):
    """Drafts with `layers` of the target; None: with half of them, found on the fly."""

    name = SPEC.name

    def __init__(
        self, model: Decoder, kernels: Kernels, drawer: TreeDrawer, block_size: int, max_draft_tokens: int,
        layers: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Raises ConfigError for layers the model does not have, and for a model with too few of them."""
        self.max_nodes = max_draft_tokens + 1
        self.layers = tuple(layers) if layers is not None else spread_layers(len(model.parts.layers))
        self._searching = layers is None
        self._until_search = 0
        self._target = model
        self._kernels = kernels
        self._drawer = drawer
        self._block_size = block_size
        self._target_kvs: Sequence[LayerKV] = ()
        self._part = subset_decoder(model, self.layers)
        self._runner: Runner | None = None  # once attached

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Draft into the target's own layers."""
        self._target_kvs = target
        self._use(self.layers)

    def _use(self, layers: tuple[int, ...]) -> None:
        self.layers, self._part = layers, subset_decoder(self._target, layers)
        kvs = [self._target_kvs[index] for index in layers]
        self._runner = bind(passes_of(self._part), self._kernels, kvs, self._block_size)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow all trees with the layers in use, after a look for better ones where that is due."""
        ready = [draft for draft in drafts if self._can_draft(draft)]
        if not ready:
            return
        if self._searching:
            self._search(ready)
        assert self._runner is not None
        self._drawer.draw(self._runner, ready, _root)

    def _can_draft(self, draft: Draft) -> bool:
        """There is room, and the target has computed all that is known before the root."""
        request = draft.request
        fits = request.root_position + draft.num_wanted < self._target.max_position
        return draft.num_free > 0 and fits and request.num_computed == request.root_position

    def _search(self, drafts: Sequence[Draft]) -> None:
        """On the request with the longest text, so that its rows see most."""
        self._until_search -= 1
        longest = max(drafts, key=lambda draft: draft.request.root_position)
        if self._until_search > 0 or longest.request.root_position == 0:
            return
        self._until_search = _SEARCH_EVERY
        layers = find_layers(self._target, self._target_kvs, self._sample(longest), len(self.layers))
        if layers != self.layers:
            self._use(layers)

    def _sample(self, draft: Draft) -> Sample:
        """The last tokens before the root, and the rows the tree will take."""
        request: Request = draft.request
        first = max(request.root_position - _SAMPLE_TOKENS, 0)
        tokens = request.token_ids[first : request.root_position]
        return Sample(tokens, first, request.block_ids, request.root_position, draft.num_wanted + 1, self._block_size)


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """Half of the layers (rounded up), the first and the last among them, evenly spread; fewer than all of them."""
    num_kept = min((num_layers + 1) // 2, num_layers - 1)
    if num_kept <= 1:
        return tuple(range(num_kept))
    return tuple(round(place * (num_layers - 1) / (num_kept - 1)) for place in range(num_kept))


def _root(draft: Draft) -> SequenceRows:
    return tree_rows(draft, draft.request.root_position, draft.request.root_position, (ROOT,))
