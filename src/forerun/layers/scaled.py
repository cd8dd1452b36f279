"""Multiplying activations with a number, and bounding them softly.

Knows: the two numbers. Does not know: where in a model it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from forerun.kernels.ops import Kernels


@dataclass(frozen=True, slots=True)
class Scaled:
    """factor * x; with a cap above 0, cap * tanh(factor * x / cap)."""

    kernels: Kernels
    factor: float = 1.0
    cap: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, N] -> [M, N]."""
        return self.kernels.scaled(x, self.factor, self.cap)
