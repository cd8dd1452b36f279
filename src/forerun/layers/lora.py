"""What LoRA adapters add to the outputs of matrices (Hu et al., arXiv 2106.09685): scale * B (A x), row by row.

Knows: low-rank updates, and which rows of the pass that runs have which adapter. Does not know: files, requests,
models.

A row's update is made of two products of that row alone, by the kernels' own row-invariant `linear`, and added to what
the matrix gave: the bits do not depend on the other rows of the pass, nor on their adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.quant.base import Weight


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What one adapter adds to some columns of one layer's output, of which several modules may be parts."""

    down: Callable[[Tensor], Tensor]  # what the layer reads, [m, K] or token ids [m], -> [m, ranks of all modules]
    scales: Tensor  # [ranks] float32
    up: Weight  # [N, ranks], zero where a column and a rank are of different modules
    first: int = 0  # column of the output that the update begins at

    @property
    def columns(self) -> slice:
        """Of the layer's output, N of them."""
        return slice(self.first, self.first + self.up.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of what the layer reads -> [m, N]."""
        return self.up.matmul(self.down(x).mul_(self.scales), None)


class AdapterRows(NamedTuple):
    """The rows of a pass that one adapter changes."""

    updates: Mapping[object, LowRankUpdate]  # by layer
    # how many rows a layer reads -> which of them. These are all rows of the pass, or those whose logits are wanted.
    runs: Mapping[int, Sequence[slice]]

    def add(self, layer: object, x: Tensor, out: Tensor) -> None:
        """Add the layer's update of x [M, K] or [M] to its output [M, N] in place."""
        update = self.updates.get(layer)
        runs = () if update is None else self.runs[x.shape[0]]
        if update is None or not runs:
            return
        change = update(x[runs[0]] if len(runs) == 1 else torch.cat([x[run] for run in runs]))  # [m, N]
        for run, rows in zip(runs, change.split_with_sizes([run.stop - run.start for run in runs]), strict=True):
            out[run, update.columns].add_(rows)  # in pieces: index_add_ takes four times as long on a CPU


# Set while a pass with adapters runs: layers do not hand it down, most of which have nothing to do with adapters.
ADAPTED: ContextVar[Sequence[AdapterRows]] = ContextVar("adapted", default=())
