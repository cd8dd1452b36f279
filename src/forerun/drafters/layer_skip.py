"""Self-speculation: drafts with some of the target's own layers.

Knows: which layers it drafts with, and when to look for better ones. Does not know: the arithmetic of layers,
verification, paging. It has no weights and no KV of its own: the layers write drafted rows where the target keeps
theirs, beside the true rows of all known tokens, and the verifying pass computes the root and every drafted row anew.
So there is nothing to catch up with, and what is drafted can never reach the output.

The layers are given (the first E for a checkpoint trained for early exit: LayerSkip, arXiv 2404.16710), or found on
the fly in the text itself (CLaSp, arXiv 2505.24196; see `models.layer_search`). A search is due at the first draft
and then every _SEARCH_EVERY times drafts are wanted; it reads _SAMPLE_TOKENS known tokens about as often as half the
target has layers, so at 16 layers it costs about 5 passes of the target over a few rows: some 2 % of the time between.
No randomness is involved, and what is found changes speed alone. Where layers read the keys and values of others, every
second layer drafts, and those others: a search would have to compute both in the same free rows. Nor is there a
search where layers are given a part of each token (Gemma 4's per-layer inputs): it passes on the stream alone; or
where some are recurrent. Those draft from a copy of the target's state, one draft after the other, in chains.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.core import Request
from forerun.drafters.autoregressive import AutoregressiveDrafter
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec
from forerun.drafters.following import Follower
from forerun.errors import ConfigError, UnsupportedError
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import PassOutput, passes_of, state_specs_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder
from forerun.models.hybrid import HybridDecoder
from forerun.models.layer_search import Sample, find_layers
from forerun.models.subset import lent_layers, subset_decoder
from forerun.runtime.bind import bind
from forerun.runtime.runner import Runner
from forerun.speculation.drawn import Drawn
from forerun.speculation.growth import TreeNoise

_SEARCH_EVERY = 64
_SAMPLE_TOKENS = 4


def build(context: DrafterContext) -> Drafter:
    """The layers the options name, or a search for them. Raises ConfigError as `subset_decoder` does."""
    model, layers = context.model, context.options.layers
    if not isinstance(model, Decoder):
        raise UnsupportedError(
            "layer_skip drafts with the target's own layers, which a model that runs through transformers does not "
            "give one by one; choose another drafter, or a target of a family that forerun implements"
        )
    if state_specs_of(model) and context.width > 1:
        raise ConfigError(
            f"tree_width {context.width} was given, but layer_skip draws chains from models with recurrent layers: "
            "leave it at 1"
        )
    if layers is not None:
        subset_decoder(model, layers)  # an error is the user's to see before there is a pool

    def bind_layers(target: Sequence[LayerKV], own: Sequence[LayerKV]) -> Runner:
        return LayerRunner(model, context.kernels, target, context.block_size, layers)

    return AutoregressiveDrafter(context, Follower(), bind_layers, model.max_position)


SPEC = DrafterSpec(
    name="layer_skip",
    build=build,
    help="some of the target's own layers",
    options=("layers", "tree_width"),
    tree_width=1,
    needs_layers=True,
    runs_layers=True,
)


class LayerRunner:
    """Executes `layers` of the target; None: half of them, found on the fly. Implements `runtime.runner.Runner`."""

    def __init__(
        self, model: Decoder, kernels: Kernels, kvs: Sequence[LayerKV], block_size: int, layers: Sequence[int] | None
    ) -> None:
        """`kvs`: of all the target's layers. Raises ConfigError for layers it does not have, or too few of them."""
        self._target, self._kernels, self._block_size = model, kernels, block_size
        self._kvs = model.pooled(kvs)  # a layer
        lent = lent_layers(model)
        is_plain = not lent and model.parts.per_layer is None and not isinstance(model, HybridDecoder)
        self._is_searching = layers is None and is_plain
        self._until_search = 0
        natural = sorted({*spread_layers(len(model.parts.layers)), *lent})
        self._use(tuple(natural if layers is None else layers))

    def _use(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._part = subset_decoder(self._target, layers)
        self._runner = self._bound(self._part)
        self.replays = self._runner.replays

    def _bound(self, part: Decoder) -> Runner:
        stored = (self._kvs[index] for index in self.layers if self._target.parts.layers[index].stores)
        kvs = [kv for kv in stored if kv is not None]
        return bind(passes_of(part), self._kernels, kvs, self._block_size)

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """See `Runner`."""
        return self._runner.run(batch, features)

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Runner`; first searches for better layers if that is due."""
        if self._is_searching:
            self._search(noise)
        if not isinstance(self._part, HybridDecoder):
            return self._runner.draw(roots, features, noise, width)
        assert isinstance(self._target, HybridDecoder)
        part = self._part.with_states(self._target.states_at(roots, self.layers))
        return self._bound(part).draw(roots, features, noise, width)

    def _search(self, noise: TreeNoise) -> None:
        """Search on the request with the longest text, whose rows see the most context."""
        self._until_search -= 1
        longest = max(range(len(noise.requests)), key=lambda index: noise.requests[index].root_position)
        if self._until_search > 0 or noise.requests[longest].root_position == 0:
            return
        self._until_search = _SEARCH_EVERY
        sample = self._sample(noise.requests[longest], noise.sizes[longest])
        layers = find_layers(self._target, [kv for kv in self._kvs if kv is not None], sample, len(self.layers))
        if layers != self.layers:
            self._use(layers)

    def _sample(self, request: Request, num_nodes: int) -> Sample:
        """The last tokens before the root, and the rows the tree will take."""
        first = max(request.root_position - _SAMPLE_TOKENS, 0)
        tokens = request.token_ids[first : request.root_position]
        return Sample(tokens, first, request.block_ids, request.root_position, num_nodes + 1, self._block_size)


def spread_layers(num_layers: int) -> tuple[int, ...]:
    """Half of the layers (rounded up), the first and the last among them, evenly spread; fewer than all of them."""
    num_kept = min((num_layers + 1) // 2, num_layers - 1)
    if num_kept <= 1:
        return tuple(range(num_kept))
    return tuple(round(place * (num_layers - 1) / (num_kept - 1)) for place in range(num_kept))
