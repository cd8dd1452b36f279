"""Linear layers: a weight and a bias, or a weight for every head; matrices of whose rows each rank has some.

Knows: that a Weight multiplies, that adapters add to what it gives, that kernels pack matrices of heads, and that parts
of several ranks are gathered. Does not know: how a matrix is stored, who has which rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.kernels.ranks import Ranks
from forerun.layers.lora import ADAPTED
from forerun.quant.base import RowPart, Weight


class Matrix(Protocol):
    """What counts towards the size of a model."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def num_parameters(self) -> int:
        """Entries held."""


class Linear:
    """x -> x W^T + b."""

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, modules: Sequence[RowPart] = (), row_ids: Tensor | None = None
    ) -> None:  # fmt: skip
        """`weight` [N, K]; `bias` [N] float32; `modules` of the checkpoint, whose rows are W's in this order.

        row_ids [N]: which of all rows of `modules` W has, on one of several ranks; None: all.
        """
        assert bias is None or bias.shape == (weight.shape[0],), (bias.shape, weight.shape)
        self.weight = weight
        self.bias = bias
        self.modules = tuple(modules)
        self.row_ids = row_ids

    @property
    def num_outputs(self) -> int:
        """Columns of what it gives."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of matrix and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def num_parameters(self) -> int:
        """Entries of matrix and bias."""
        rows, columns = self.weight.shape
        return rows * columns + (0 if self.bias is None else rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N]."""
        out = self.weight.matmul(x, self.bias)
        for adapted in ADAPTED.get():
            adapted.add(self, x, out)
        return out


class GatheredLinear(Linear):
    """A matrix of whose rows each rank has some, with what it gives gathered from all; and what it reads, too.

    Every output is computed by one rank from a whole row, so the bits are those of the whole matrix.
    """

    def __init__(
        self, own: Linear, ranks: Ranks, made: Sequence[int], read: Sequence[int] = (), order: Tensor | None = None
    ) -> None:  # fmt: skip
        """`own`: this rank's rows. made: how many rows each rank has.

        read: how many inputs each rank brings; (): all have all of them. order [K]: which of these the columns are for;
        None: each for its own.
        """
        super().__init__(own.weight, own.bias, own.modules, own.row_ids)
        self._ranks, self._made, self._read, self._order = ranks, tuple(made), tuple(read), order

    @property
    def num_outputs(self) -> int:
        """See `Linear`: those of all ranks."""
        return sum(self._made)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K], or this rank's part of it -> [M, outputs of all ranks]."""
        x = self._ranks.gather(x, self._read) if self._read else x
        own = super().__call__(x if self._order is None else x.index_select(1, self._order))
        return self._ranks.gather(own, self._made)


class HeadLinear:
    """Every head's first entries times a matrix of its own; the entries behind them are passed on."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        """`weight` [Q, N, K] in a floating type; it is packed, not kept."""
        self._kernels = kernels
        self._packed = kernels.pack_heads(weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._packed.nbytes

    @property
    def num_parameters(self) -> int:
        """Entries of the matrices."""
        num_heads, rows, columns = self._packed.shape
        return num_heads * rows * columns

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, Q * (K + passed)] -> [M, Q * (N + passed)]."""
        return self._kernels.linear_heads(x, self._packed)
