"""Root-mean-square and layer norms, alone and fused with the residual addition.

Knows: its weight. Does not know: where in a model it stands.
"""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.ops import Kernels


class RMSNorm:
    """x / rms(x) * weight, of x minus its mean if `centered`."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float, centered: bool = False) -> None:
        """`weight` [H] float32."""
        self._kernels = kernels
        self.weight = weight
        self.eps = eps
        self.centered = centered

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]."""
        return self._kernels.rms_norm(x, self.weight, self.eps, self.centered)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """In place residual += x [M, H], then the norm of it -> [M, H]."""
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps, self.centered)
