"""Integers that a captured pass reads: columns of one tensor, so that one copy brings all of them.

Knows: sizes and types. Does not know: what the columns mean, who reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.device import upload


class StaticColumns:
    """Columns that stay where they are: `wide` ones of 64 bits, then `narrow` ones of 32, side by side."""

    def __init__(self, wide: Sequence[int], narrow: Sequence[int], device: torch.device) -> None:
        """The lengths of the columns."""
        num_wide, num_narrow = sum(wide), sum(narrow)
        self._all = torch.zeros(num_wide + -(-num_narrow // 2), dtype=torch.int64, device=device)
        self.wide = self._all[:num_wide].split_with_sizes(list(wide))  # each [length] int64
        self.narrow = self._all[num_wide:].view(torch.int32)[:num_narrow].split_with_sizes(list(narrow))

    def fill(self, wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> None:
        """Put these columns of the host there, in order and whole; the host does not wait."""
        few = torch.cat([column.flatten() for column in narrow])  # int32
        even = torch.nn.functional.pad(few, (0, len(few) % 2))
        upload(torch.cat([*(column.flatten() for column in wide), even.view(torch.int64)]), self._all)


def repeated(column: Tensor, num: int) -> Tensor:
    """A column [M, ...] and its last entry again -> [num, ...]."""
    return torch.cat([column, column[-1:].expand(num - len(column), *column.shape[1:])])


def padded(column: Tensor, num: int) -> Tensor:
    """A column and zeros behind it -> [num]."""
    return torch.nn.functional.pad(column, (0, num - len(column)))


def padded_tables(tables: Tensor, num: int, width: int) -> Tensor:
    """Block tables [S, blocks], cut or filled up with zeros -> [num, width]."""
    tables = tables[:, :width]
    return torch.nn.functional.pad(tables, (0, width - tables.shape[1], 0, num - tables.shape[0]))
