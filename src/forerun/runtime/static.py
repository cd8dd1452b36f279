"""Tensors that a captured pass reads: columns of one tensor, so that one copy transfers all integers of a batch.

Knows: sizes and types, how a batch is filled up. Does not know: who reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.config import MAX_TREE_NODES
from forerun.kernels.device import upload
from forerun.kernels.ops import AttentionRows
from forerun.kernels.triton.graphs import GraphSize
from forerun.models.batch import ForwardBatch


class StaticColumns:
    """Columns at fixed addresses: `wide` ones of 64 bits, then `narrow` ones of 32 bits."""

    def __init__(self, wide: Sequence[int], narrow: Sequence[int], device: torch.device) -> None:
        """The lengths of the columns."""
        num_wide, num_narrow = sum(wide), sum(narrow)
        self._all = torch.zeros(num_wide + -(-num_narrow // 2), dtype=torch.int64, device=device)
        self.wide = self._all[:num_wide].split_with_sizes(list(wide))  # each [length] int64
        self.narrow = self._all[num_wide:].view(torch.int32)[:num_narrow].split_with_sizes(list(narrow))

    def fill(self, wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> None:
        """Copy these columns from the host, complete and in order; the host does not wait."""
        few = torch.cat([column.flatten() for column in narrow])  # int32
        even = torch.nn.functional.pad(few, (0, len(few) % 2))
        upload(torch.cat([*(column.flatten() for column in wide), even.view(torch.int64)]), self._all)


def repeated(column: Tensor, num: int) -> Tensor:
    """A column [M, ...] and its last entry again -> [num, ...]."""
    return torch.cat([column, column[-1:].expand(num - len(column), *column.shape[1:])])


def padded(column: Tensor, num: int) -> Tensor:
    """A column padded with zeros -> [num]."""
    return torch.nn.functional.pad(column, (0, num - len(column)))


def padded_tables(tables: Tensor, num: int, width: int) -> Tensor:
    """Block tables [S, blocks], cut or filled up with zeros -> [num, width]."""
    tables = tables[:, :width]
    return torch.nn.functional.pad(tables, (0, width - tables.shape[1], 0, num - tables.shape[0]))


def table_width(visible: int, block_size: int) -> int:
    """Blocks of a sequence with `visible` positions, and room for a tree: its rows exceed its positions."""
    return -(-(visible + MAX_TREE_NODES) // block_size)


class StaticBatch:
    """The tensors a graph reads, and how a batch gets into them."""

    def __init__(self, size: GraphSize, block_size: int, feature_size: int, device: torch.device) -> None:
        rows, sequences, visible = size
        self._size = size
        self._width = table_width(visible, block_size)
        self._columns = StaticColumns([rows] * 2, [rows] * 4 + [sequences, sequences * self._width], device)
        self.features = torch.zeros(rows, feature_size, device=device) if feature_size else None
        token_ids, tree_masks = self._columns.wide
        positions, slots, seq_ids, prefix_lens, tree_starts, tables = self._columns.narrow
        self.batch = ForwardBatch(
            token_ids=token_ids,  # [num_rows]
            positions=positions,
            slots=slots,
            rows=AttentionRows(
                seq_ids=seq_ids,
                prefix_lens=prefix_lens,
                tree_masks=tree_masks,
                tree_starts=tree_starts,  # [num_sequences]
                block_tables=tables.view(sequences, self._width),
                max_visible=visible,
            ),
            logit_rows=torch.arange(rows, device=device),
            sequences=(),
            all_logits=True,
        )

    def fill(self, batch: ForwardBatch, features: Tensor | None) -> None:
        """Copy a batch of the host over, and its features, filled up to the size; the host does not wait."""
        rows, (num_rows, num_sequences, _) = batch.rows, self._size
        narrow = (batch.positions, batch.slots, rows.seq_ids, rows.prefix_lens)
        starts = padded(rows.tree_starts, num_sequences)
        tables = padded_tables(rows.block_tables, num_sequences, self._width)
        self._columns.fill(
            [repeated(column, num_rows) for column in (batch.token_ids, rows.tree_masks)],
            [*(repeated(column, num_rows) for column in narrow), starts, tables],
        )
        if batch.pending is not None:
            self.batch.fill_in(batch.pending)
            for column in (self.batch.token_ids, self.batch.positions, self.batch.rows.tree_masks):
                column[batch.num_rows :] = column[batch.num_rows - 1]  # what repeats the last row
        fill_features(self.features, features)


def fill_features(held: Tensor | None, features: Tensor | None) -> None:
    """Copy features [M, width] into `held` [num_rows, width], repeating the last; nothing if `held` is None."""
    if held is not None:
        assert features is not None
        held[: len(features)].copy_(features)
        held[len(features) :] = features[-1:]
