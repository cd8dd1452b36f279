"""Single forward passes of a bare model, with a cache that holds some context already.

Knows: batches of one sequence, the pool, slots of state, how many bytes a pass must read. Does not know: which passes
are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache.kv_cache import KVCache, bytes_per_block
from forerun.cache.states import RecurrentStates, bytes_per_slot
from forerun.kernels.device import synchronize
from forerun.kernels.ops import Kernels
from forerun.kernels.threads import torch_beside
from forerun.models.base import CommittedPath, LayerSpec, Model, passes_of, state_specs_of, with_states
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, tables_of
from forerun.runtime.bind import bind

BLOCK_SIZE = 16  # of the engine's pool, unless told otherwise
MAX_CHAIN = 64  # nodes of a draft tree


class TimedPasses:
    """A model bound to a pool full of random keys and values, its forward recorded if the kernels can do that.

    Recurrent layers have a state for the one sequence, which goes on from pass to pass; what it holds costs nothing.
    """

    def __init__(self, model: Decoder, kernels: Kernels, max_rows: int) -> None:
        """`max_rows`: context and new tokens together."""
        self.cache = KVCache(kernels, model.kv_specs, -(-max_rows // BLOCK_SIZE), BLOCK_SIZE)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.model = model
        specs = state_specs_of(model)
        self._states = RecurrentStates(specs, 1, kernels.device) if specs else None
        self._bound: Model = model
        if self._states is not None:
            self._states.begin("", 0)
            self._bound = with_states(model, self._states)
        self.runner = bind(passes_of(self._bound), kernels, self.cache.layers, BLOCK_SIZE)
        self._torch_threads = torch_beside(kernels)
        self._vocab_size = model.vocab_size
        places = zip(model.parts.layers, model.kv_places, strict=True)
        self._windows = [layer.attending.shape.window for layer, place in places if place is not None]
        self._state_bytes = 2 * bytes_per_slot(specs)  # read and written
        self._mlps = [layer.mlp for layer in model.parts.layers if layer.mlp is not None]
        self.weight_bytes = model.weight_bytes - sum(table.nbytes for table in tables_of(model.parts))

    @property
    def recorded(self) -> bool:
        """Whether passes of few rows run without Python in between."""
        return self.runner.replays

    def chain(self, context: int, tokens: int) -> ForwardBatch:
        """A draft chain of `tokens` nodes, root included, after `context` known tokens; logits for all."""
        return self._batch(range(context, context), tokens)

    def chunks(self, tokens: int, chunk: int) -> list[ForwardBatch]:
        """A prompt of `tokens` in chunks, as the engine computes it: logits for the last token only."""
        spans = [range(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
        last = spans[-1]
        return [*(self._batch(span, 0) for span in spans[:-1]), self._batch(last[:-1], 1)]

    def run(self, batch: ForwardBatch) -> None:
        """Compute it."""
        self.enqueue(batch)
        synchronize(self.cache.device)

    def enqueue(self, batch: ForwardBatch) -> None:
        """Begin to. Where states go on, a chain's drafts are accepted, all of them: other engines' passes do that."""
        rows = batch.sequences[0]
        with self._torch_threads():  # as in an engine
            if self._states is not None:
                self._states.end("", rows.start if rows.span else rows.tree_start)
            self.runner.run(batch)
            if self._states is not None:
                self._bound.commit([CommittedPath("", tuple(rows.tree_rows))])

    def bytes_read(self, context: int, tokens: int) -> int:
        """Bytes a chain must read: matrices (as many experts as it can choose), the keys and values it sees, states."""
        seen = context + tokens
        specs = [self.model.kv_specs[place] for place in self.model.kv_places if place is not None]
        per_position = [bytes_per_block([spec], 1) for spec in specs]
        positions = [min(seen, window + tokens - 1) if window else seen for window in self._windows]
        stored = sum(linear.nbytes for mlp in self._mlps for linear in mlp.linears)
        weights = self.weight_bytes - stored + sum(mlp.bytes_read(tokens) for mlp in self._mlps)
        return weights + self._state_bytes + sum(a * b for a, b in zip(per_position, positions, strict=True))

    def _batch(self, span: range, nodes: int) -> ForwardBatch:
        """Known tokens at the positions of `span`, then a chain of `nodes`."""
        rows = SequenceRows(
            request_id="",
            block_table=range(self.cache.num_blocks),
            start=span.start,
            span=self._token_ids(len(span)),
            tree_start=span.stop,
            tree_tokens=self._token_ids(nodes),
            tree_rows=range(nodes),
            tree_masks=[(1 << (node + 1)) - 1 for node in range(nodes)],
            tree_depths=range(nodes),
        )
        return ForwardBatch.build([rows], BLOCK_SIZE)

    def _token_ids(self, count: int) -> list[int]:
        return [(17 + 7919 * i) % self._vocab_size for i in range(count)]


def kv_bytes(specs: Sequence[LayerSpec], max_rows: int) -> int:
    """Memory of the pool `TimedPasses` allocates."""
    return -(-max_rows // BLOCK_SIZE) * bytes_per_block(specs, BLOCK_SIZE)


def kv_specs(config: ModelConfig, dtype: torch.dtype) -> list[LayerSpec]:
    """The specs a model will have, before it is made."""
    kept = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    stored = (shape.heads for shape in config.shapes if shape.kv_layer is None)
    return [LayerSpec(heads.num_kv, heads.head_dim, kept, config.latents is not None) for heads in stored]
