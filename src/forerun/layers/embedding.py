"""The token embedding table.

Knows: the table. Does not know: whether the output layer shares it.
"""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.ops import Kernels


class Embedding:
    """Token id -> row of the table."""

    def __init__(self, kernels: Kernels, table: Tensor) -> None:
        """`table` [V, H] float32 or bfloat16."""
        self._kernels = kernels
        self.table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [M] int64 -> [M, H] float32."""
        return self._kernels.embedding(token_ids, self.table)
