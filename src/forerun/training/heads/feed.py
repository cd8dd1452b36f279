"""Where a step's batch comes from: sequences, and the target's states computed online or read from disk.

Knows which states a head needs. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.training.heads.base import Head, States
from forerun.training.heads.rows import Rows
from forerun.training.heads.target import TrainingTarget


@dataclass(frozen=True)
class Batch:
    """ids and answer [batch, T]; states of the head's layers and the normed last one, each [batch, T, hidden]."""

    ids: Tensor
    answer: Tensor
    states: States
    final: Tensor


class Feed(Protocol):
    """Gives the sequences of some numbers with their states."""

    rows: Rows

    def batch(self, numbers: Sequence[int], seq_len: int) -> Batch:
        """Sequences cut or padded to `seq_len`."""


def captured_layers(head: Head, target: TrainingTarget) -> tuple[int, ...]:
    """The states to compute or store: the head's, and the last one unless it follows from them."""
    depth = target.shape.num_layers
    return head.layers if {depth, depth + 1} & set(head.layers) else (*head.layers, depth + 1)


def with_final(states: dict[int, Tensor], target: TrainingTarget) -> Tensor:
    """The state after the final norm, taken from `states` or made from the one before it."""
    depth = target.shape.num_layers
    return states[depth + 1] if depth + 1 in states else target.final_norm(states[depth])


class OnlineFeed:
    """Runs the target over every batch; compiled: by torch.compile, which pays off if all batches have one shape."""

    def __init__(self, rows: Rows, target: TrainingTarget, layers: Sequence[int], compiled: bool = False) -> None:
        self.rows, self.target, self.layers = rows, target, tuple(layers)
        self.states = torch.compile(target.states, dynamic=False) if compiled else target.states

    @torch.no_grad()
    def batch(self, numbers: Sequence[int], seq_len: int) -> Batch:
        """See `Feed`."""
        ids, answer = (x.to(self.target.head.device) for x in self.rows.batch(numbers, seq_len))
        states = self.states(ids, self.layers)
        return Batch(ids, answer, {i: states[i] for i in self.layers}, with_final(states, self.target))
