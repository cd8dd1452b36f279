"""A linear layer: a stored matrix and a bias.

Knows: that a Weight multiplies. Does not know: how the matrix is stored.
"""

from __future__ import annotations

from torch import Tensor

from forerun.quant.base import Weight


class Linear:
    """x -> x W^T + b."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        """`weight` [N, K]; `bias` [N] float32."""
        assert bias is None or bias.shape == (weight.shape[0],), (bias.shape, weight.shape)
        self.weight = weight
        self.bias = bias

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
        return self.weight.matmul(x, self.bias)
