"""The token embedding table.

Knows: the table, which is a tensor of its own or the matrix of a tied output layer, of which each rank may have some
rows. Does not know: how either is stored.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels, PackedLinear
from forerun.kernels.ranks import ALONE, Ranks
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
        self, kernels: Kernels, table: Tensor | PackedLinear, shared: bool = False, scale: float = 1.0,
        ranks: Ranks = ALONE, num_rows: int = 0,
    ) -> None:  # fmt: skip
        """`table` [V, H]: float32, bfloat16, or packed; `shared`: it is the matrix of a tied output layer.

        scale: what rows are multiplied with. ranks: `table` is this one's share of `num_rows` rows.
        """
        self._kernels = kernels
        self._table = table
        self._shared = shared
        self.scale = scale
        self._ranks = ranks
        self._num_rows = num_rows or table.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(V, H)."""
        return self._num_rows, self._table.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the table, 0 if it is shared."""
        return 0 if self._shared else self._table.nbytes

    @property
    def exchanges(self) -> bool:
        """Whether other ranks have some of the rows."""
        return self._ranks.size > 1

    def with_scale(self, scale: float) -> TableEmbedding:
        """See `Embedding`."""
        return TableEmbedding(self._kernels, self._table, True, scale, self._ranks, self._num_rows)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See `Embedding`."""
        rows = self._rows(token_ids)
        rows = rows if self.scale == 1 else self._kernels.scaled(rows, self.scale)
        for adapted in ADAPTED.get():
            adapted.add(self, token_ids, rows)
        return rows

    def _rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the table, each from the rank that has it."""
        if self._ranks.size == 1:
            return self._kernels.embedding(token_ids, self._table)
        counts = torch.tensor(self._ranks.shares(self._num_rows), device=token_ids.device)
        owners = torch.bucketize(token_ids, counts.cumsum(0), right=True)  # [M]
        order = owners.argsort(stable=True)  # rows by their owners
        first = int(counts[: self._ranks.rank].sum())
        mine = token_ids[owners == self._ranks.rank] - first  # [m]
        none = torch.empty(0, self.shape[1], device=token_ids.device)
        own = self._kernels.embedding(mine, self._table) if len(mine) else none  # [m, H]
        widths = [int((owners == rank).sum()) for rank in range(self._ranks.size)]
        rows = self._ranks.gather(own.T.contiguous(), widths).T  # [M, H] by owners
        return torch.empty_like(rows, memory_format=torch.contiguous_format).index_copy_(0, order, rows)
