"""CUDA graphs: work on a card that is written down once and done again by one launch.

Knows: torch's capture of a stream, which sizes share a graph. Does not know: what the work is, models, batches.

A graph has fixed sizes, so what comes is filled up to the next of a few: rows, sequences, and how far rows see. Up to
64 rows a tile of 16 costs the same however full it is; above, sizes follow the tiles in larger steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch

ROW_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
LEAST_VISIBLE = 512
WARM_UPS = 2  # runs before a capture: the first compiles kernels, which may not happen inside
Result = TypeVar("Result")


class GraphSize(NamedTuple):
    """What a graph is captured for; a batch that is smaller in every respect fits."""

    num_rows: int
    num_sequences: int
    max_visible: int


class Capture(Protocol):
    """Writes work down."""

    def __call__(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Run it, and return what it made and how to make that again, in the same tensors."""


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


class CudaCapture:
    """Captures on one card; all graphs share the memory of what they make on the way, since they run in turns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Capture`. The host must not wait for the card inside `run`, nor copy to it."""
        stream, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            made = run()
        graph.replay()  # a capture writes down and computes nothing
        return made, graph.replay
