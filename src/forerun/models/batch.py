"""ForwardBatch: the rows one forward pass computes, as tensors.

Knows: token ids, positions, cache slots, which keys a row sees, which rows want logits, sequences' adapters. Does not
know: requests, sampling, drafters, or what the model does with the rows.

A sequence contributes a *span* of known tokens (each sees all before it), then optionally a *draft tree* whose node
0 is the root, the last known token. Node i lies at logical row tree_start + i; its position comes from its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows
from forerun.speculation.draft import PendingRows


class SequenceRows(NamedTuple):
    """One sequence's share of a batch; its fields in this order are what csrc/batch_rows.h reads.

    `tree_rows` lists the tree nodes to compute now (all of them for verification, the frontier while a tree grows);
    `tree_masks[i]` and `tree_depths[i]` describe node `tree_rows[i]`. Logits come for every tree row, and for every
    span row if `span_logits`.
    """

    request_id: str
    block_table: Sequence[int]
    start: int  # logical row (= position) of the first span token
    span: Sequence[int]  # token ids
    tree_start: int  # logical row of the root; start + len(span) unless the span stops short of it
    tree_tokens: Sequence[int] = ()
    tree_rows: Sequence[int] = ()  # node indices, ascending
    tree_masks: Sequence[int] = ()  # ancestors and self, as 64-bit words
    tree_depths: Sequence[int] = ()  # root: 0
    span_logits: bool = False


@dataclass(slots=True)
class ForwardBatch:
    """The rows of one forward pass.

    A batch that was laid out from sequences has its tensors from when one of them is first read: a recorded pass, which
    lays the sequences out in C++, reads none.
    """

    token_ids: Tensor  # [M] int64
    positions: Tensor  # [M] int32
    slots: Tensor  # [M] int32
    rows: AttentionRows
    logit_rows: Tensor  # [R] int64, ascending indices into the rows
    sequences: tuple[SequenceRows, ...]
    all_logits: bool  # every row wants logits: logit_rows is 0 .. M-1
    pending: PendingRows | None = None  # rows whose contents are on the device only
    block_size: int = 0  # of the pool the sequences lie in
    shift: int = 0  # what was added to positions
    adapters: tuple[object | None, ...] = ()  # of each sequence; () if none has one

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A tensor that nobody has read so far."""
            if name not in _MADE_WHEN_READ:
                raise AttributeError(name)
            columns = _Columns(self.block_size)
            for index, sequence in enumerate(self.sequences):
                columns.add(index, sequence)
            columns.fill(self)
            return getattr(self, name)

    @property
    def num_rows(self) -> int:
        """M."""
        if not self.sequences:
            return self.token_ids.shape[0]
        return sum(len(rows.span) + len(rows.tree_tokens) for rows in self.sequences)

    @property
    def num_logit_rows(self) -> int:
        """R, of a batch that was laid out from sequences."""
        return sum(len(rows.tree_tokens) + len(rows.span) * rows.span_logits for rows in self.sequences)

    def on(self, device: torch.device) -> ForwardBatch:
        """The batch on the device of a model's kernels (itself if it is there); a batch is built on the host."""
        if self.token_ids.device == device and self.pending is None:
            return self
        rows = self.rows
        wide = _moved([self.token_ids, rows.tree_masks, self.logit_rows], device)
        tables = rows.block_tables.flatten()
        narrow = _moved([self.positions, self.slots, rows.seq_ids, rows.prefix_lens, rows.tree_starts, tables], device)
        moved = replace(
            self,
            pending=None,
            token_ids=wide[0],
            positions=narrow[0],
            slots=narrow[1],
            rows=AttentionRows(
                seq_ids=narrow[2],
                prefix_lens=narrow[3],
                tree_masks=wide[1],
                tree_starts=narrow[4],
                block_tables=narrow[5].view(rows.block_tables.shape),
                max_visible=rows.max_visible,
            ),
            logit_rows=wide[2],
        )
        if self.pending is not None:
            moved.fill_in(self.pending)
        return moved

    def fill_in(self, pending: PendingRows) -> None:
        """Put the contents of pending rows into a batch on the device.

        Padding rows repeat the last row: the caller must copy it to them again.
        """
        rows = pending.rows
        self.token_ids.index_copy_(0, rows, pending.token_ids)
        starts = self.rows.tree_starts.index_select(0, self.rows.seq_ids.index_select(0, rows))
        self.positions.index_copy_(0, rows, (starts + pending.depths).int())
        self.rows.tree_masks.index_copy_(0, rows, pending.tree_masks)

    @staticmethod
    def build(
        sequences: Sequence[SequenceRows], block_size: int, shift: int = 0, adapters: Sequence[object | None] = ()
    ) -> ForwardBatch:
        """Lay the sequences out one after the other, each span before its tree; `shift` is added to positions.

        `adapters`: of each sequence, or () for none.
        """
        batch = object.__new__(ForwardBatch)
        batch.sequences, batch.pending, batch.block_size, batch.shift = tuple(sequences), None, block_size, shift
        batch.adapters = tuple(adapters) if any(adapters) else ()
        return batch


_MADE_WHEN_READ = ("token_ids", "positions", "slots", "rows", "logit_rows", "all_logits")


class _Columns:
    """The columns of the batch as plain lists: the reference for csrc/batch_rows.cpp."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.seq_ids: list[int] = []
        self.prefix_lens: list[int] = []
        self.tree_masks: list[int] = []
        self.logit_rows: list[int] = []

    def add(self, index: int, sequence: SequenceRows) -> None:
        first = len(self.token_ids)
        self._add_span(sequence)
        if sequence.span_logits:
            self.logit_rows.extend(range(first, len(self.token_ids)))
        self.logit_rows.extend(range(len(self.token_ids), len(self.token_ids) + len(sequence.tree_tokens)))
        self._add_tree(sequence)
        self.seq_ids.extend([index] * (len(self.token_ids) - first))

    def _add_span(self, sequence: SequenceRows) -> None:
        for position, token_id in enumerate(sequence.span, sequence.start):
            self._add_row(sequence, token_id, position, position, position + 1, 0)

    def _add_tree(self, sequence: SequenceRows) -> None:
        start = sequence.tree_start
        columns = zip(sequence.tree_tokens, sequence.tree_rows, sequence.tree_masks, sequence.tree_depths, strict=True)
        for token_id, node, mask, depth in columns:
            self._add_row(sequence, token_id, start + depth, start + node, start, mask)

    def _add_row(
        self, sequence: SequenceRows, token_id: int, position: int, logical: int, prefix_len: int, mask: int
    ) -> None:
        block, offset = divmod(logical, self.block_size)
        self.token_ids.append(token_id)
        self.positions.append(position)
        self.slots.append(sequence.block_table[block] * self.block_size + offset)
        self.prefix_lens.append(prefix_len)
        self.tree_masks.append(mask - (1 << 64) if mask >> 63 else mask)

    def fill(self, batch: ForwardBatch) -> None:
        """Give the batch its tensors; two allocations hold them all, since a small model's pass is hardly longer."""
        sequences = batch.sequences
        num_rows, num_logits, num_sequences = len(self.token_ids), len(self.logit_rows), len(sequences)
        wide = torch.from_numpy(np.array([*self.token_ids, *self.tree_masks, *self.logit_rows], dtype=np.int64))
        token_ids, tree_masks, logit_rows = wide.split_with_sizes([num_rows, num_rows, num_logits])
        tables, width = _pad_tables([s.block_table for s in sequences])
        starts = [s.tree_start for s in sequences]
        columns = [*self.positions, *self.slots, *self.seq_ids, *self.prefix_lens, *starts, *tables]
        narrow = torch.from_numpy(np.array(columns, dtype=np.int32))  # numpy reads lists several times faster
        positions, slots, seq_ids, prefix_lens, tree_starts, block_tables = narrow.split_with_sizes(
            [num_rows] * 4 + [num_sequences, num_sequences * width]
        )
        batch.rows = AttentionRows(
            seq_ids=seq_ids,  # [M]
            prefix_lens=prefix_lens,  # [M]
            tree_masks=tree_masks,  # [M]
            tree_starts=tree_starts,  # [S]
            block_tables=block_tables.view(num_sequences, width),  # [S, max_blocks]
            max_visible=max(self.positions) + 1,
        )
        if batch.shift:
            positions.add_(batch.shift).clamp_(min=0)
        batch.token_ids, batch.positions, batch.slots, batch.logit_rows = token_ids, positions, slots, logit_rows
        batch.all_logits = num_logits == num_rows


def _moved(columns: list[Tensor], device: torch.device) -> list[Tensor]:
    """Columns of one type, moved by one copy that the host does not wait for."""
    joined = torch.cat(columns)
    joined = joined.pin_memory() if device.type == "cuda" else joined
    return list(joined.to(device, non_blocking=True).split_with_sizes([len(column) for column in columns]))


def _pad_tables(tables: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Block tables of different lengths, zero-padded, one behind the other; and the width of each."""
    width = max(len(table) for table in tables)
    padded = [block for table in tables for block in (*table, *([0] * (width - len(table))))]
    return padded, width
