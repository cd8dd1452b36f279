"""How the rows of a batch follow each other, for recurrent layers, and how accepted drafts are replayed.

Knows: spans, trees, drafts that are on a device only, which nodes were accepted. Does not know: layers, what their
states hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.config import MAX_TREE_NODES
from forerun.kernels.device import to_device
from forerun.kernels.recurrent_ops import Walk
from forerun.models.base import CommittedPath, States
from forerun.models.batch import ForwardBatch, SequenceRows


class Replay(NamedTuple):
    """Drafts to go through once more as known tokens."""

    drafts: Tensor  # [n] int64: which of the last pass's drafts
    walk: Walk
    ends: dict[str, int]  # by request: tokens that its state comes after then

    def on(self, device: torch.device) -> Replay:
        """The replay on a device (itself if it is there); the host does not wait."""
        return Replay(to_device(self.drafts, device), self.walk.on(device), self.ends)


def walk_of(batch: ForwardBatch, states: States, device: torch.device) -> Walk:
    """The walk over a batch, on a device: spans and roots are known.

    A sequence that begins with its first token has a new state.
    """
    sequences = batch.sequences
    slots = [states.begin(rows.request_id, rows.start if rows.span else rows.tree_start) for rows in sequences]
    num_known = [len(rows.span) + bool(rows.tree_tokens) for rows in sequences]
    walk = Walk.build(slots, num_known, [_parents(rows) for rows in sequences]).on(device)
    if batch.pending is not None:
        rows, above = batch.pending.rows, _nodes_above(batch.pending.tree_masks)
        walk.parents.index_copy_(0, rows, (rows - above).int())
    return walk


def _nodes_above(masks: Tensor) -> Tensor:
    """How many nodes before each is its parent, where trees are on a device only; masks [n] -> [n] int64."""
    nodes = torch.arange(MAX_TREE_NODES, device=masks.device)
    path = (masks[:, None] >> nodes & 1) * nodes  # [n, 64]: numbers of ancestors and self, the root's is 0
    last = path.topk(2).values
    return last[:, 0] - last[:, 1]


def end_of(rows: SequenceRows) -> int:
    """Tokens that a sequence's state comes after when `walk_of` was gone through."""
    return rows.tree_start + 1 if rows.tree_tokens else rows.start + len(rows.span)


def _parents(rows: SequenceRows) -> list[int]:
    """The row before each row of a sequence, -1 for its first; a tree's root comes after the span."""
    num_span = len(rows.span)
    row_of = {node: row for row, node in enumerate(rows.tree_rows, num_span)}
    above = [(mask ^ 1 << node).bit_length() - 1 for node, mask in zip(rows.tree_rows, rows.tree_masks, strict=True)]
    return [*range(-1, num_span - 1), *[num_span - 1 if node < 0 else row_of[node] for node in above]]


def replay_of(sequences: Sequence[SequenceRows], paths: Sequence[CommittedPath], states: States) -> Replay | None:
    """The accepted nodes below the roots of the last batch; None if there are none."""
    accepted = {path.request_id: path.nodes[1:] for path in paths if len(path.nodes) > 1}
    drafts, slots, lengths, ends, first = list[int](), list[int](), list[int](), dict[str, int](), 0
    for rows in sequences:
        nodes = accepted.get(rows.request_id, ())
        if nodes:
            row_of = {node: row for row, node in enumerate(rows.tree_rows)}
            drafts += [first + row_of[node] - 1 for node in nodes]
            slots.append(states.begin(rows.request_id, end_of(rows)))
            lengths.append(len(nodes))
            ends[rows.request_id] = end_of(rows) + len(nodes)
        first += max(len(rows.tree_rows) - 1, 0)
    if not drafts:
        return None
    chains = [range(-1, length - 1) for length in lengths]
    return Replay(torch.tensor(drafts, dtype=torch.int64), Walk.build(slots, lengths, chains), ends)
