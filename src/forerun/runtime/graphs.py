"""Passes on a GPU that are captured as graphs, one for every size of batch, when first met.

Knows: how a batch is filled up to the size of a graph, and that its tensors must lie where the graph reads. Does not
know: what the passes compute, how work is captured (`kernels.triton.graphs`).

**Filling up.** Rows are repeated: the last row again and again, with its position, slot, mask and feature. A repeated
row computes the very numbers of the row itself (row invariance) and writes them to the same slot, so it changes
nothing. Batches of which some rows want no logits (prefill chunks, known tokens before a root) are executed eagerly,
and so are those with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels, LayerKV
from forerun.kernels.triton.graphs import Capture, GraphSize, LastUsed, size_for
from forerun.models.base import Pass, Passes, PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.eager import EagerRunner
from forerun.runtime.static import StaticBatch
from forerun.runtime.trees import DeviceTrees
from forerun.speculation.drawn import Drawn
from forerun.speculation.growth import TreeNoise


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured pass."""

    static: StaticBatch
    out: PassOutput  # in the tensors every replay writes
    replay: Callable[[], None]


class CapturedPass:
    """One pass. Hidden states belong to the caller; logits and features are overwritten by the next pass of the same
    size."""

    def __init__(
        self, run: Pass, feature_size: int, kvs: Sequence[LayerKV], device: torch.device, capture: Capture
    ) -> None:
        self._run = run
        self._feature_size = feature_size
        self._kvs = kvs
        self._device = device
        self._capture = capture
        self._graphs: LastUsed[GraphSize, _Graph] = LastUsed()

    def __call__(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """The pass over a batch and its features, if it reads any."""
        size = size_for(batch.num_rows, batch.rows.tree_starts.shape[0], batch.rows.max_visible)
        if size is None or batch.adapters or not batch.all_logits:
            return self._run(batch, features, self._kvs)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._new_graph(size, batch, features)
            self._graphs.put(size, graph)
        else:
            graph.static.fill(batch, features)
            graph.replay()
        return _first_rows(graph.out, batch.num_rows)

    def _new_graph(self, size: GraphSize, batch: ForwardBatch, features: Tensor | None) -> _Graph:
        """Capture a pass of this size on the batch itself, so that it writes nothing but what the batch does."""
        static = StaticBatch(size, self._kvs[0].block_size, self._feature_size, self._device)
        static.fill(batch, features)
        out, replay = self._capture(lambda: self._run(static.batch, static.features, self._kvs))
        return _Graph(static, out, replay)


def _first_rows(out: PassOutput, num_rows: int) -> PassOutput:
    hidden = {layer: state[:num_rows].clone() for layer, state in out.hidden.items()}  # [M, H]
    return PassOutput(out.logits[:num_rows], hidden, None if out.features is None else out.features[:num_rows])


class GraphRunner(EagerRunner):
    """Replays captured graphs. Implements `runtime.runner.Runner`."""

    replays = True

    def __init__(
        self, passes: Passes, kernels: Kernels, kvs: Sequence[LayerKV], block_size: int, capture: Capture
    ) -> None:
        super().__init__(passes, kvs, block_size)
        self._first = CapturedPass(passes.first, passes.feature_size, kvs, kernels.device, capture)
        self._below = self._first
        if passes.below is not passes.first:
            self._below = CapturedPass(passes.below, passes.fed_size, kvs, kernels.device, capture)
        self._trees = DeviceTrees(passes, kvs, kernels, capture)

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """See `Runner`."""
        return self._first(batch, features)

    def run_below(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """See `EagerRunner`."""
        return self._below(batch, features)

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Runner`: all levels as one graph if logits need no shaping but noise, and no tree records q."""
        batch, records, by_depth = self._batch(roots), any(noise.records), self._noise_at_once(noise)
        if by_depth is None or (records and width > 1):
            return self._draw_levels(batch, features, noise, width)
        if records:
            return noise.recorded(*self._trees.draw_chains(batch, features, by_depth.tensors()))
        return self._trees.enqueue(batch, features, by_depth.tensors(), width)


class CapturedRows:
    """A pass over rows of states, captured for every number of rows and of depths."""

    def __init__(self, run: Callable[[Tensor, int], Tensor], capture: Capture) -> None:
        self._run = run
        self._capture = capture
        # given, result, replay
        self._graphs: LastUsed[tuple[int, int], tuple[Tensor, Tensor, Callable[[], None]]] = LastUsed()

    def __call__(self, x: Tensor, num_depths: int) -> Tensor:
        """x [R, width] -> [R * num_depths, V], overwritten by the next call of the same size."""
        size = size_for(len(x), 1, 1)
        if size is None:
            return self._run(x, num_depths)
        key = (size.num_rows, num_depths)
        graph = self._graphs.get(key)
        held = x.new_zeros(size.num_rows, x.shape[1]) if graph is None else graph[0]  # [num_rows, width]
        held[: len(x)].copy_(x)
        held[len(x) :] = x[-1:]
        if graph is None:
            graph = held, *self._capture(partial(self._run, held, num_depths))
            self._graphs.put(key, graph)
        else:
            graph[2]()
        return graph[1][: len(x) * num_depths]
