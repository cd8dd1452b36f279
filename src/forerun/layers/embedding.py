"""The token embedding table.

Knows: the table, which is a tensor of its own or the matrix of a tied output layer. Does not know: how either is
stored.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from forerun.kernels.ops import Kernels


class Embedding(Protocol):
    """Token id -> row of a table."""

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds beyond those of an output layer it shares."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [M] int64 -> [M, H] float32."""


class TableEmbedding:
    """A table of its own."""

    def __init__(self, kernels: Kernels, table: Tensor) -> None:
        """`table` [V, H] float32 or bfloat16."""
        self._kernels = kernels
        self._table = table

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        return self._table.shape[0], self._table.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `Embedding`."""
        return self._kernels.embedding(token_ids, self._table)


class RowWeight(Protocol):
    """A stored matrix whose rows can be read one by one."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    def rows(self, row_ids: Tensor) -> Tensor:
        """Rows `row_ids` [M] int64 -> [M, K] float32."""


class TiedEmbedding:
    """The rows of the output layer's matrix."""

    nbytes = 0

    def __init__(self, weight: RowWeight) -> None:
        """`weight` [V, H]."""
        self._weight = weight

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        return self._weight.shape

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `Embedding`."""
        return self._weight.rows(token_ids)
