"""Programs that draw on a GPU: one for every size of work, captured when first met, and which sizes there are.

Knows: how programs are kept, what sizes are rounded to. Does not know: what is drawn (`trees`, `head_trees`), how work
is captured (`kernels.triton.graphs`), requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from forerun.config import MAX_TREE_NODES
from forerun.kernels.draws import ChainTensors
from forerun.kernels.triton.graphs import Capture, GraphSize, LastUsed, size_for
from forerun.models.batch import ForwardBatch

Size = TypeVar("Size")
Work = TypeVar("Work", bound="Capturable")


class Capturable(Protocol):
    """Work that can be captured once its inputs were filled in."""

    def run(self) -> None:
        """All of the work; the host does not wait for the device."""


class Programs(Generic[Size, Work]):
    """One program for every size of work, captured when that size is first met."""

    def __init__(self, make: Callable[[Size], Work], capture: Capture) -> None:
        self._make = make
        self._capture = capture
        self._captured: LastUsed[Size, tuple[Work, Callable[[], None]]] = LastUsed()

    def run(self, size: Size, fill: Callable[[Work], None], is_usual: bool) -> Work:
        """Fill and run the program of a size; it is not captured if that size is unusual and may never come again."""
        known = self._captured.get(size)
        program = self._make(size) if known is None else known[0]
        fill(program)
        if known is not None:
            known[1]()
        elif is_usual:
            self._captured.put(size, (program, self._capture(program.run)[1]))
        else:
            program.run()
        return program


def batch_size(batch: ForwardBatch, noise: ChainTensors) -> tuple[GraphSize, bool]:
    """What a program for these roots (one a sequence) must have room for, and whether that is a usual size."""
    num_levels, num = noise.positions.shape
    assert num == batch.rows.tree_starts.shape[0] == batch.logit_rows.shape[0]
    visible = batch.rows.max_visible + num_levels
    fitting = size_for(batch.num_rows, num, visible)
    return fitting or GraphSize(batch.num_rows, num, visible), fitting is not None


def levels_for(num_levels: int) -> int:
    """How many levels a program has that draws `num_levels`: rounded up, by one at most up to 16.

    Rounded, because the policy asks for every number and requests wait while a program is captured; rounded little,
    because each level costs a pass.
    """
    step = 1 if num_levels <= 4 else 2 if num_levels <= 16 else 4
    return _rounded(num_levels, step)


def room_for(num_nodes: int) -> int:
    """How many nodes there is room for in a program for `num_nodes`: rounded up, unused room costs next to nothing."""
    step = 1 if num_nodes <= 4 else 4 if num_nodes <= 16 else 16
    return _rounded(num_nodes, step)


def _rounded(num: int, step: int) -> int:
    return min(-(-num // step) * step, MAX_TREE_NODES - 1)
