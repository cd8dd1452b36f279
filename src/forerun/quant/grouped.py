"""GroupedWeight: a matrix of small integers with group scales, whatever file format it came from.

Knows: `GroupedMatrix` and `Kernels.pack_grouped`. Does not know: file formats; each of those builds a GroupedMatrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels, PackedLinear

DEQUANTIZED_ROWS = 512


class GroupedWeight:
    """A quantized matrix packed by the kernels that multiply with it; activations become 8-bit integers."""

    def __init__(self, kernels: Kernels, matrix: GroupedMatrix) -> None:
        """Pack `matrix`; the unpacked one is not kept."""
        self._kernels = kernels
        self._packed = kernels.pack_grouped(matrix)

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
        """The matrix from its products with unit vectors: 127 times a unit vector becomes the integer 127 exactly.

        Entries are off by float32 rounding (127 * scale * w / 127), which the tests of the formats allow for.
        """
        columns = self.shape[1]
        identity = torch.eye(columns, device=self._kernels.device) * 127  # [K, K]
        parts = [
            self._kernels.linear(identity[start : start + DEQUANTIZED_ROWS], self._packed, None) / 127
            for start in range(0, columns, DEQUANTIZED_ROWS)
        ]
        return torch.cat(parts).T.contiguous()  # [N, K]
