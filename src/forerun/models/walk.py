"""How the rows of a batch follow each other, for recurrent layers, and how accepted drafts are replayed.

Knows: spans, trees, which nodes were accepted. Does not know: layers, what their states hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.recurrent_ops import Walk
from forerun.models.base import CommittedPath, States
from forerun.models.batch import SequenceRows


class Replay(NamedTuple):
    """Drafts to go through once more as known tokens."""

    drafts: Tensor  # [n] int64: which of the last pass's drafts
    walk: Walk


def walk_of(sequences: Sequence[SequenceRows], states: States) -> Walk:
    """The walk over a batch: spans and roots are known. A sequence that begins with its first token has a new state."""
    slots = [states.slot(rows.request_id) for rows in sequences]
    for rows, slot in zip(sequences, slots, strict=True):
        if (rows.start if rows.span else rows.tree_start) == 0:
            for layer in states.layers:
                layer.clear(slot)
    num_known = [len(rows.span) + bool(rows.tree_tokens) for rows in sequences]
    return Walk.build(slots, num_known, [_parents(rows) for rows in sequences])


def _parents(rows: SequenceRows) -> list[int]:
    """The row before each row of a sequence, -1 for its first; a tree's root comes after the span."""
    num_span = len(rows.span)
    row_of = {node: row for row, node in enumerate(rows.tree_rows, num_span)}
    above = [(mask ^ 1 << node).bit_length() - 1 for node, mask in zip(rows.tree_rows, rows.tree_masks, strict=True)]
    return [*range(-1, num_span - 1), *[num_span - 1 if node < 0 else row_of[node] for node in above]]


def replay_of(sequences: Sequence[SequenceRows], paths: Sequence[CommittedPath], states: States) -> Replay | None:
    """The accepted nodes below the roots of the last batch; None if there are none."""
    accepted = {path.request_id: path.nodes[1:] for path in paths if len(path.nodes) > 1}
    drafts, slots, lengths, first = list[int](), list[int](), list[int](), 0
    for rows in sequences:
        nodes = accepted.get(rows.request_id, ())
        if nodes:
            row_of = {node: row for row, node in enumerate(rows.tree_rows)}
            drafts += [first + row_of[node] - 1 for node in nodes]
            slots.append(states.slot(rows.request_id))
            lengths.append(len(nodes))
        first += max(len(rows.tree_rows) - 1, 0)
    if not drafts:
        return None
    chains = [range(-1, length - 1) for length in lengths]
    return Replay(torch.tensor(drafts, dtype=torch.int64), Walk.build(slots, lengths, chains))
