"""A model whose forward passes on a card are captured as graphs, one for every size of batch, when first met.

Knows: how a batch is filled up to the size of a graph, and that its tensors must lie where the graph reads. Does not
know: what the model computes, how work is captured (`kernels.triton.graphs`).

**Filling up.** Rows are repeated: the last row again and again, with its position, slot and mask. A repeated row
computes the very numbers of the row itself (row invariance) and writes them to the same slot, so it changes nothing.
Prefill chunks, of which few rows have logits, take the model's own forward, where Python's share does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows, ChainNoise, Chains, Kernels, LayerKV
from forerun.kernels.triton.graphs import Capture, CudaCapture, GraphSize, LastUsed, size_for
from forerun.models.base import ForwardOutput, Model
from forerun.models.batch import ForwardBatch
from forerun.models.bound import BoundModel
from forerun.models.chains import DeviceChains
from forerun.models.drafted import EnqueuedDrafts
from forerun.models.programs import DraftPasses, table_width
from forerun.models.static import StaticColumns, padded, padded_tables, repeated
from forerun.models.trees import DeviceTrees

MOST_CHAIN_ROWS = 1 << 20  # any number: a batch that is too large for a graph is run by itself


class StaticBatch:
    """The tensors a graph reads, and how a batch gets into them."""

    def __init__(self, size: GraphSize, block_size: int, device: torch.device) -> None:
        rows, sequences, visible = size
        self._size = size
        self._width = table_width(visible, block_size)
        self._columns = StaticColumns([rows] * 2, [rows] * 4 + [sequences, sequences * self._width], device)
        token_ids, tree_masks = self._columns.wide
        positions, slots, seq_ids, prefix_lens, tree_starts, tables = self._columns.narrow
        self.batch = ForwardBatch(
            token_ids=token_ids,  # [num_rows]
            positions=positions,
            slots=slots,
            rows=AttentionRows(
                seq_ids=seq_ids,
                prefix_lens=prefix_lens,
                tree_masks=tree_masks,
                tree_starts=tree_starts,  # [num_sequences]
                block_tables=tables.view(sequences, self._width),
                max_visible=visible,
            ),
            logit_rows=torch.arange(rows, device=device),
            sequences=(),
            all_logits=True,
        )

    def fill(self, batch: ForwardBatch) -> None:
        """Copy a batch of the host over, filled up to the size; the host does not wait."""
        rows, (num_rows, num_sequences, _) = batch.rows, self._size
        narrow = (batch.positions, batch.slots, rows.seq_ids, rows.prefix_lens)
        starts = padded(rows.tree_starts, num_sequences)
        tables = padded_tables(rows.block_tables, num_sequences, self._width)
        self._columns.fill(
            [repeated(column, num_rows) for column in (batch.token_ids, rows.tree_masks)],
            [*(repeated(column, num_rows) for column in narrow), starts, tables],
        )
        if batch.late is not None:
            self.batch.take_late(batch.late)
            for column in (self.batch.token_ids, self.batch.positions, self.batch.rows.tree_masks):
                column[batch.num_rows :] = column[batch.num_rows - 1]  # what repeats the last row


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured pass."""

    static: StaticBatch
    out: ForwardOutput  # in the tensors every replay writes
    replay: Callable[[], None]


class DeviceDrafts:
    """Chains and trees drawn by the same passes, each captured."""

    def __init__(self, passes: DraftPasses, kernels: Kernels, capture: Capture) -> None:
        self.chains = DeviceChains(passes, kernels, capture)
        self._trees = DeviceTrees(passes, kernels, capture)

    def enqueue(self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, width: int) -> EnqueuedDrafts:
        """Trees of `width` children a node below the batch's roots, the largest first; of one child they are chains."""
        if width == 1:
            return self.chains.enqueue(batch, features, noise)
        return self._trees.enqueue(batch, features, noise, width)


class CapturedModel(BoundModel):
    """A model bound to one pool. Implements `models.base.Model`.

    Logits lie where the next pass of the same size writes its own; hidden states are the caller's to keep.
    """

    def __init__(
        self, model: Model, kernels: Kernels, capture: Capture, kvs: Sequence[LayerKV],
        hidden_layers: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(model, kvs, hidden_layers)
        self._capture = capture
        self._graphs: LastUsed[GraphSize, _Graph] = LastUsed()
        self._drafts = DeviceDrafts(_passes_of(model, kvs), kernels, capture)

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        """See `models.base.Model`."""
        assert len(kvs) == len(self._kvs) and kvs[0] is self._kvs[0], "captured for another pool"
        assert tuple(hidden_layers) == self._hidden_layers, "captured for other hidden layers"
        size = size_for(batch.num_rows, batch.rows.tree_starts.shape[0], batch.rows.max_visible)
        if size is None or not batch.all_logits:
            return self._model.forward(batch, kvs, hidden_layers)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._new_graph(size, batch)
            self._graphs.put(size, graph)
        else:
            graph.static.fill(batch)
            graph.replay()
        hidden = {layer: state[: batch.num_rows].clone() for layer, state in graph.out.hidden.items()}  # [M, H]
        return ForwardOutput(graph.out.logits[: batch.num_rows], hidden)

    @property
    def max_chain_rows(self) -> int:
        """See `BoundModel`."""
        return 0 if self._hidden_layers else MOST_CHAIN_ROWS

    def draft_chains(
        self, batch: ForwardBatch, noise: ChainNoise, keep_logits: bool, judged: bool = False
    ) -> tuple[Chains, Tensor | None]:
        """See `BoundModel`; kept logits lie where the next call writes its own."""
        return self._drafts.chains.draw(batch, None, noise, keep_logits, judged)

    @property
    def enqueues_drafts(self) -> bool:
        """See `BoundModel`: where passes return nothing but logits."""
        return not self._hidden_layers

    def enqueue_drafts(self, batch: ForwardBatch, noise: ChainNoise, width: int) -> EnqueuedDrafts:
        """See `BoundModel`."""
        return self._drafts.enqueue(batch, None, noise, width)

    def _new_graph(self, size: GraphSize, batch: ForwardBatch) -> _Graph:
        """Capture a pass of this size on the batch itself, so that it writes nothing but what the batch does."""
        static = StaticBatch(size, self._kvs[0].block_size, self.device)
        static.fill(batch)
        out, replay = self._capture(lambda: self._model.forward(static.batch, self._kvs, self._hidden_layers))
        return _Graph(static, out, replay)


def capture_model(
    model: Model, kernels: Kernels, kvs: Sequence[LayerKV], hidden_layers: Sequence[int]
) -> CapturedModel:
    """The model with its passes captured on a card."""
    return CapturedModel(model, kernels, CudaCapture(kernels.device), kvs, hidden_layers)


def _passes_of(model: Model, kvs: Sequence[LayerKV]) -> DraftPasses:
    """All levels of a chain are one and the same pass of a model that reads tokens alone."""

    def run(batch: ForwardBatch, _: Tensor | None) -> tuple[Tensor, None]:
        return model.forward(batch, kvs).logits, None

    return DraftPasses(first=run, below=run, vocab_size=model.vocab_size, block_size=kvs[0].block_size)


class CapturedRows:
    """A function of rows of numbers, captured for every number of them; each row gives as many rows of the result."""

    def __init__(self, run: Callable[[Tensor], Tensor], capture: Capture) -> None:
        self._run = run
        self._capture = capture
        # given, result, replay
        self._graphs: LastUsed[GraphSize, tuple[Tensor, Tensor, Callable[[], None]]] = LastUsed()

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, width] -> the result's rows, which lie where the next call of the same size writes its own."""
        size = size_for(len(x), 1, 1)
        if size is None:
            return self._run(x)
        graph = self._graphs.get(size)
        held = x.new_zeros(size.num_rows, x.shape[1]) if graph is None else graph[0]  # [num_rows, width]
        held[: len(x)].copy_(x)
        held[len(x) :] = x[-1:]
        if graph is None:
            graph = held, *self._capture(lambda: self._run(held))
            self._graphs.put(size, graph)
        else:
            graph[2]()
        return graph[1][: len(x) * (len(graph[1]) // size.num_rows)]
