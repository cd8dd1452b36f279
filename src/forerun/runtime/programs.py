"""Drawing on a GPU: a program a size, whose first pass is that of the roots.

Knows: where the roots' rows lie, which tensors stay where they are, how programs are kept. Does not know: what is drawn
below the roots (`trees`), what a pass computes, how work is captured (`kernels.triton.graphs`), requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from forerun.config import MAX_TREE_NODES
from forerun.kernels.ops import AttentionRows, ChainNoise, Kernels, LayerKV
from forerun.kernels.triton.graphs import Capture, GraphSize, LastUsed, size_for
from forerun.models.base import Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.runtime.static import StaticColumns, fill_features, repeated, table_width


class RootsWide(NamedTuple):
    """Columns of 64 bits of the roots' pass and draws."""

    token_ids: Tensor  # [M] of the first level
    tree_masks: Tensor  # [M]
    logit_rows: Tensor  # [R]
    temperatures: Tensor  # [R], float64 by their bits
    seeds: Tensor  # [R]
    streams: Tensor  # [R]


class RootsNarrow(NamedTuple):
    """Columns of 32 bits."""

    positions: Tensor  # [M] of the first level
    slots: Tensor  # [M]
    seq_ids: Tensor  # [M]
    prefix_lens: Tensor  # [M]
    tree_starts: Tensor  # [R], of every level
    tables: Tensor  # [R * blocks], of every level


class DraftProgram(ABC):
    """The tensors of one size, and the work between them."""

    def __init__(
        self, passes: Passes, kvs: Sequence[LayerKV], kernels: Kernels, batch: GraphSize, wide: Sequence[int],
        narrow: Sequence[int],
    ) -> None:  # fmt: skip
        """`wide` and `narrow`: lengths of the columns that follow those of the roots."""
        rows, num, visible = batch
        self._passes, self._kvs, self._kernels, self._batch = passes, kvs, kernels, batch
        self._block_size = kvs[0].block_size
        self._table_width = table_width(visible, self._block_size)
        wide, narrow = [rows] * 2 + [num] * 4 + [*wide], [rows] * 4 + [num, num * self._table_width, *narrow]
        self._columns = StaticColumns(wide, narrow, kernels.device)
        self._wide = RootsWide(*self._columns.wide[: len(RootsWide._fields)])
        self._narrow = RootsNarrow(*self._columns.narrow[: len(RootsNarrow._fields)])
        self._wide_below = self._columns.wide[len(RootsWide._fields) :]
        self._narrow_below = self._columns.narrow[len(RootsNarrow._fields) :]
        self._features = torch.zeros(rows, passes.feature_size, device=kernels.device) if passes.feature_size else None

    @abstractmethod
    def fill(self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise) -> None:
        """Copy a batch and what is known of the levels below it over; the host does not wait."""

    @abstractmethod
    def run(self) -> None:
        """Every pass and every draw; asks the device nothing."""

    def _fill(
        self, batch: ForwardBatch, features: Tensor | None, wide: Sequence[Tensor], narrow: Sequence[Tensor]
    ) -> None:
        """Copy the rows of a batch over, their features, and the columns that follow the rows' in their order."""
        rows, num_rows = batch.rows, self._batch.num_rows
        of_rows = [repeated(column, num_rows) for column in (batch.token_ids, rows.tree_masks)]
        short = (batch.positions, batch.slots, rows.seq_ids, rows.prefix_lens)
        self._columns.fill([*of_rows, *wide], [*(repeated(column, num_rows) for column in short), *narrow])
        fill_features(self._features, features)

    def _roots(self) -> ForwardBatch:
        """Known tokens that are still to be read, and the roots."""
        wide, narrow = self._wide, self._narrow
        rows = self._attention(narrow.seq_ids, narrow.prefix_lens, wide.tree_masks)
        return ForwardBatch(
            wide.token_ids, narrow.positions, narrow.slots, rows, wide.logit_rows, sequences=(), all_logits=False
        )

    def _run_roots(self) -> PassOutput:
        """The first pass, over what was filled in."""
        return self._passes.first(self._roots(), self._features, self._kvs)

    @property
    def _tables(self) -> Tensor:
        """[R, blocks]."""
        return self._narrow.tables.view(-1, self._table_width)

    def _attention(self, seq_ids: Tensor, prefix_lens: Tensor, tree_masks: Tensor) -> AttentionRows:
        visible = self._batch.max_visible
        return AttentionRows(seq_ids, prefix_lens, tree_masks, self._narrow.tree_starts, self._tables, visible)


Size = TypeVar("Size")
Program = TypeVar("Program", bound="Capturable")


class Capturable(Protocol):
    """Work that can be captured once it was filled."""

    def run(self) -> None:
        """Everything; asks the device nothing."""


class Programs(Generic[Size, Program]):
    """Programs that are captured, one for every size, when first met."""

    def __init__(self, make: Callable[[Size], Program], capture: Capture) -> None:
        self._make = make
        self._capture = capture
        self._captured: LastUsed[Size, tuple[Program, Callable[[], None]]] = LastUsed()

    def run(self, size: Size, fill: Callable[[Program], None], is_usual: bool) -> Program:
        """Fill and run the program of a size; one too large to be met again is run as it is."""
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


def batch_size(batch: ForwardBatch, noise: ChainNoise) -> tuple[GraphSize, bool]:
    """What a program for these roots, one a sequence, must have room for, and whether that is a usual size."""
    num_levels, num = noise.positions.shape
    assert num == batch.rows.tree_starts.shape[0] == batch.logit_rows.shape[0]
    visible = batch.rows.max_visible + num_levels
    fitting = size_for(batch.num_rows, num, visible)
    return fitting or GraphSize(batch.num_rows, num, visible), fitting is not None


def levels_for(num_levels: int) -> int:
    """Levels of a program for so many, one too many at most up to 16: each costs a pass.

    Not exactly so many: a policy asks for all numbers, and each program is captured while requests wait.
    """
    step = 1 if num_levels <= 4 else 2 if num_levels <= 16 else 4
    return _rounded(num_levels, step)


def room_for(num_nodes: int) -> int:
    """Nodes of a tree that a program for so many has room for; those that are not there cost next to nothing."""
    step = 1 if num_nodes <= 4 else 4 if num_nodes <= 16 else 16
    return _rounded(num_nodes, step)


def _rounded(num: int, step: int) -> int:
    return min(-(-num // step) * step, MAX_TREE_NODES - 1)
