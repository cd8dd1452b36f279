"""CUDA graphs: work on a GPU that is captured once and replayed by one launch.

Knows: torch's capture of a stream, which sizes share a graph. Does not know: what the work is, models, batches.

A graph has fixed sizes, so batches are padded to the next of a few: rows, sequences, and how far rows see. Up to
64 rows a tile of 16 costs the same however full it is; above, sizes follow the tiles in larger steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

ROW_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
LEAST_VISIBLE = 512
WARM_UPS = 2  # runs before a capture: the first compiles kernels, which may not happen inside
MOST_KEPT = 32  # graphs of one kind
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept")


class GraphSize(NamedTuple):
    """What a graph is captured for; a batch that is smaller in every respect fits."""

    num_rows: int
    num_sequences: int
    max_visible: int


class Capture(Protocol):
    """Captures work."""

    def __call__(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Run it; return its result, and a function that computes it again into the same tensors."""


def size_for(num_rows: int, num_sequences: int, max_visible: int) -> GraphSize | None:
    """The smallest size that fits; None for more rows than any graph has."""
    if not 1 <= num_rows <= ROW_SIZES[-1]:
        return None
    rows = next(size for size in ROW_SIZES if size >= num_rows)
    return GraphSize(rows, _doubled(1, num_sequences), _doubled(LEAST_VISIBLE, max_visible))


def _doubled(size: int, wanted: int) -> int:
    while size < wanted:
        size *= 2
    return size


class LastUsed(Generic[Key, Kept]):
    """The graphs of the sizes used last (LRU).

    Each keeps its outputs on the GPU, logits of up to 256 rows among them, and the KV pool was given nearly all the
    memory: there is no room for a graph of every size ever met.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def get(self, key: Key) -> Kept | None:
        """What is kept for a size, None if there is nothing."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Key, kept: Kept) -> None:
        """Keep it, and drop what was not used for longest if that makes too many."""
        self._kept[key] = kept
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


class CudaCapture:
    """Captures on one GPU; all graphs share the memory of what they make on the way, since they run in turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Capture`. The host must not wait for the GPU inside `run`, nor copy to it."""
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            made = run()
        graph.replay()  # a capture records and computes nothing
        return made, graph.replay
