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

from forerun.config import MAX_TREE_NODES
from forerun.kernels.ops import AttentionRows, LayerKV
from forerun.kernels.triton.graphs import Capture, CudaCapture, GraphSize, size_for
from forerun.models.base import ForwardOutput, Model
from forerun.models.batch import ForwardBatch
from forerun.models.bound import BoundModel


class StaticBatch:
    """The tensors a graph reads, and how a batch gets into them."""

    def __init__(self, size: GraphSize, block_size: int, device: torch.device) -> None:
        rows, sequences, visible = size
        self._size = size
        self._width = -(-(visible + MAX_TREE_NODES) // block_size)  # a tree's rows reach further than its positions
        self._wide = torch.zeros(2 * rows, dtype=torch.int64, device=device)
        self._narrow = torch.zeros(4 * rows + sequences * (1 + self._width), dtype=torch.int32, device=device)
        token_ids, tree_masks = self._wide.split_with_sizes([rows, rows])
        positions, slots, seq_ids, prefix_lens, tree_starts, tables = self._narrow.split_with_sizes(
            [rows] * 4 + [sequences, sequences * self._width]
        )
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
        wide = [_repeated(column, num_rows) for column in (batch.token_ids, rows.tree_masks)]
        columns = (batch.positions, batch.slots, rows.seq_ids, rows.prefix_lens)
        narrow = [_repeated(column, num_rows) for column in columns]
        narrow.append(_padded(rows.tree_starts, num_sequences))
        tables = rows.block_tables[:, : self._width]
        missing = (0, self._width - tables.shape[1], 0, num_sequences - tables.shape[0])
        narrow.append(torch.nn.functional.pad(tables, missing).flatten())
        for target, source in ((self._wide, wide), (self._narrow, narrow)):
            joined = torch.cat(source)
            target.copy_(joined.pin_memory() if target.is_cuda else joined, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured pass."""

    static: StaticBatch
    out: ForwardOutput  # in the tensors every replay writes
    replay: Callable[[], None]


class CapturedModel(BoundModel):
    """A model bound to one pool. Implements `models.base.Model`.

    Logits lie where the next pass of the same size writes its own; hidden states are the caller's to keep.
    """

    def __init__(
        self, model: Model, capture: Capture, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()
    ) -> None:
        super().__init__(model, kvs, hidden_layers)
        self._capture = capture
        self._graphs: dict[GraphSize, _Graph] = {}

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        """See `models.base.Model`."""
        assert len(kvs) == len(self._kvs) and kvs[0] is self._kvs[0], "captured for another pool"
        assert tuple(hidden_layers) == self._hidden_layers, "captured for other hidden layers"
        size = size_for(batch.num_rows, batch.rows.tree_starts.shape[0], batch.rows.max_visible)
        if size is None or not batch.all_logits:
            return self._model.forward(batch, kvs, hidden_layers)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._new_graph(size, batch)
        else:
            graph.static.fill(batch)
            graph.replay()
        hidden = {layer: state[: batch.num_rows].clone() for layer, state in graph.out.hidden.items()}  # [M, H]
        return ForwardOutput(graph.out.logits[: batch.num_rows], hidden)

    def _new_graph(self, size: GraphSize, batch: ForwardBatch) -> _Graph:
        """Capture a pass of this size on the batch itself, so that it writes nothing but what the batch does."""
        static = StaticBatch(size, self._kvs[0].block_size, self.device)
        static.fill(batch)
        out, replay = self._capture(lambda: self._model.forward(static.batch, self._kvs, self._hidden_layers))
        return _Graph(static, out, replay)


def capture_model(
    model: Model, device: torch.device, kvs: Sequence[LayerKV], hidden_layers: Sequence[int]
) -> CapturedModel:
    """The model with its passes captured on a card."""
    return CapturedModel(model, CudaCapture(device), kvs, hidden_layers)


def _repeated(column: Tensor, num: int) -> Tensor:
    """A column [M] and its last entry again -> [num]."""
    return torch.cat([column, column[-1:].expand(num - len(column))])


def _padded(column: Tensor, num: int) -> Tensor:
    """A column and zeros behind it -> [num]."""
    return torch.nn.functional.pad(column, (0, num - len(column)))
