"""Dense weights: float32, bfloat16 or float16 matrices in the layout the kernels read.

Knows: `NAME.weight` tensors and `Kernels.pack_linear`. Does not know: quantization or architectures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels, PackedLinear
from forerun.quant.base import RowPart, TensorSource


class DenseWeight:
    """A matrix packed by the kernels that multiply with it."""

    def __init__(self, kernels: Kernels, matrix: Tensor) -> None:
        """Pack `matrix` [N, K]."""
        self._kernels = kernels
        self._packed = kernels.pack_linear(matrix)
        self.dtype = matrix.dtype

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
        """The matrix itself: multiplying by the identity adds only zeros, so every entry comes back exactly."""
        identity = torch.eye(self.shape[1], device=self._kernels.device)  # [K, K]
        return self._kernels.linear(identity, self._packed, None).T.contiguous()  # [N, K]


class DenseFormat:
    """`PREFIX.weight` tensors; the format of every checkpoint that is not quantized."""

    name = "dense"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether `PREFIX.weight` exists."""
        return source.has(f"{prefix}.weight")

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> DenseWeight:
        """Read, convert, join by rows and pack."""
        return DenseWeight(kernels, read_joined(source, parts, columns, dtype))


def read_joined(source: TensorSource, parts: Sequence[RowPart], columns: int, dtype: torch.dtype | None) -> Tensor:
    """The `PREFIX.weight` of all parts, converted if `dtype` is given, one below the other -> [N, K], a copy."""
    tensors = [source.tensor(f"{part.prefix}.weight", (part.rows, columns)) for part in parts]
    return torch.cat([tensor if dtype is None else tensor.to(dtype) for tensor in tensors])
