"""The token embedding table.

Knows: the table, which is a tensor of its own or the matrix of a tied output layer. Does not know: how either is
stored.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from forerun.kernels.ops import Kernels, PackedLinear
from forerun.layers.lora import ADAPTED


class Embedding(Protocol):
    """Token id -> row of a table."""

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""

    @property
    def scale(self) -> float:
        """What rows are multiplied with."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds beyond those of an output layer it shares."""

    def with_scale(self, scale: float) -> Embedding:
        """The same table, whose rows are multiplied with another number; adapters do not change it."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [M] int64 -> [M, H] float32."""


class TableEmbedding:
    """A table in memory, dense or packed."""

    def __init__(
        self, kernels: Kernels, table: Tensor | PackedLinear, shared: bool = False, scale: float = 1.0
    ) -> None:
        """`table` [V, H]: float32, bfloat16, or packed; `shared`: it is the matrix of a tied output layer.

        scale: what rows are multiplied with.
        """
        self._kernels = kernels
        self._table = table
        self._shared = shared
        self.scale = scale

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        return self._table.shape[0], self._table.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the table, 0 if it is shared."""
        return 0 if self._shared else self._table.nbytes

    def with_scale(self, scale: float) -> TableEmbedding:
        """See `Embedding`."""
        return TableEmbedding(self._kernels, self._table, shared=True, scale=scale)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `Embedding`."""
        rows = self._kernels.embedding(token_ids, self._table)
        rows = rows if self.scale == 1 else self._kernels.scaled(rows, self.scale)
        for adapted in ADAPTED.get():
            adapted.add(self, token_ids, rows)
        return rows
