"""ForwardBatch: the rows one forward pass computes, as tensors.

Knows: token ids, positions, cache slots, which keys a row sees, which rows want logits. Does not know: requests,
sampling, drafters, or what the model does with the rows.

A sequence contributes a *span* of known tokens (each sees all before it), then optionally a *draft tree* whose node
0 is the root, the last known token. Node i lies at logical row tree_start + i; its position comes from its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a batch.

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


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one forward pass."""

    token_ids: Tensor  # [M] int64
    positions: Tensor  # [M] int32
    slots: Tensor  # [M] int32
    rows: AttentionRows
    logit_rows: Tensor  # [R] int64, ascending indices into the rows
    sequences: tuple[SequenceRows, ...]
    all_logits: bool  # every row wants logits: logit_rows is 0 .. M-1

    @property
    def num_rows(self) -> int:
        """M."""
        return self.token_ids.shape[0]

    @staticmethod
    def build(sequences: Sequence[SequenceRows], block_size: int) -> ForwardBatch:
        """Lay the sequences out one after the other, each span before its tree."""
        builder = _Columns(block_size)
        for index, sequence in enumerate(sequences):
            builder.add(index, sequence)
        return builder.finish(tuple(sequences))


class _Columns:
    """Plain lists, one a column of the batch."""

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

    def finish(self, sequences: tuple[SequenceRows, ...]) -> ForwardBatch:
        num_rows = len(self.token_ids)
        rows = AttentionRows(
            seq_ids=torch.tensor(self.seq_ids, dtype=torch.int32),  # [M]
            prefix_lens=torch.tensor(self.prefix_lens, dtype=torch.int32),  # [M]
            tree_masks=torch.tensor(self.tree_masks, dtype=torch.int64),  # [M]
            tree_starts=torch.tensor([s.tree_start for s in sequences], dtype=torch.int32),  # [S]
            block_tables=_pad_tables([s.block_table for s in sequences]),  # [S, max_blocks]
            max_visible=max(self.positions) + 1,
        )
        return ForwardBatch(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            positions=torch.tensor(self.positions, dtype=torch.int32),
            slots=torch.tensor(self.slots, dtype=torch.int32),
            rows=rows,
            logit_rows=torch.tensor(self.logit_rows, dtype=torch.int64),
            sequences=sequences,
            all_logits=len(self.logit_rows) == num_rows,
        )


def _pad_tables(tables: Sequence[Sequence[int]]) -> Tensor:
    """Block tables of different lengths, zero-padded -> [S, max_blocks] int32."""
    width = max(len(table) for table in tables)
    return torch.tensor([[*table, *([0] * (width - len(table)))] for table in tables], dtype=torch.int32)
