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

from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.quant.base import Weight


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What one adapter adds to some columns of one layer's output."""

    kernels: Kernels
    down: Callable[[Tensor], Tensor]  # what the layer reads, [m, K] or token ids [m], -> [m, rank]
    up: Weight  # [N, rank]
    scale: float
    first: int = 0  # column of the output that the update begins at

    @property
    def columns(self) -> slice:
        """Of the layer's output, N of them."""
        return slice(self.first, self.first + self.up.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """Rows of what the layer reads -> [m, N]."""
        return self.up.matmul(self.kernels.scaled(self.down(x), self.scale), None)


class AdapterRows(NamedTuple):
    """The rows of a pass that one adapter changes."""

    updates: Mapping[object, Sequence[LowRankUpdate]]  # by layer
    # how many rows a layer reads -> which of them; None: all. All rows of the pass, or those whose logits are wanted.
    rows: Mapping[int, Tensor | None]  # [m] int64

    def add(self, layer: object, x: Tensor, out: Tensor) -> None:
        """Add the layer's updates of x [M, K] or [M] to its output [M, N] in place."""
        for update in self.updates.get(layer, ()):
            rows, changed = self.rows[x.shape[0]], out[:, update.columns]
            if rows is None:
                changed.add_(update(x))
            elif rows.shape[0]:
                changed.index_add_(0, rows, update(x.index_select(0, rows)))


# Set while a pass with adapters runs: layers do not hand it down, most of which have nothing to do with adapters.
ADAPTED: ContextVar[Sequence[AdapterRows]] = ContextVar("adapted", default=())
