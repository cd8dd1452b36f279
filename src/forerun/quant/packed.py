"""PackedWeight: one matrix as the kernels packed it.

Knows: that kernels multiply with what they packed. Does not know: storage, which its subclasses choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels, PackedLinear

DEQUANTIZED_ROWS = 512


class PackedWeight:
    """A matrix packed by the kernels that multiply with it."""

    unit = 1.0  # what products with unit vectors are multiplied by, and divided by afterwards

    def __init__(self, kernels: Kernels, packed: PackedLinear) -> None:
        """`packed` by `kernels`."""
        self._kernels = kernels
        self._packed = packed

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._packed.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrix."""
        return self._packed.nbytes

    @property
    def packed(self) -> PackedLinear:
        """The packed matrix."""
        return self._packed

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K] -> [M, N]."""
        return self._kernels.linear(x, self._packed, bias)

    def dequantize(self) -> Tensor:
        """The matrix from its products with unit vectors, which add only zeros -> [N, K]."""
        columns = self.shape[1]
        identity = torch.eye(columns, device=self._kernels.device) * self.unit  # [K, K]
        parts = [
            self._kernels.linear(identity[start : start + DEQUANTIZED_ROWS], self._packed, None) / self.unit
            for start in range(0, columns, DEQUANTIZED_ROWS)
        ]
        return torch.cat(parts).T.contiguous()  # [N, K]
