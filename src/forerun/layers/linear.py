"""Linear layers: a weight and a bias, or a weight for every head.

Knows: that a Weight multiplies, that adapters add to what it gives, and that kernels pack matrices of heads. Does not
know: how a matrix is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from forerun.kernels.ops import Kernels
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

    def __init__(self, weight: Weight, bias: Tensor | None = None, modules: Sequence[RowPart] = ()) -> None:
        """`weight` [N, K]; `bias` [N] float32; `modules` of the checkpoint, whose rows are W's in this order."""
        assert bias is None or bias.shape == (weight.shape[0],), (bias.shape, weight.shape)
        self.weight = weight
        self.bias = bias
        self.modules = tuple(modules)

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
