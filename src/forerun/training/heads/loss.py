"""The loss of a head unrolled over a window: weighted cross-entropies of its steps.

Knows the target's distribution restricted to the draft vocabulary, and which entries count; logits are computed only
for these. Knows nothing of batches or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.training.heads.base import Features, Frozen, Head, States, rows_of_step
from forerun.training.heads.cross_entropy import BLOCK_ROWS, Block, block_of_rows, capped, weighted_cross_entropy
from forerun.training.heads.target import TrainingTarget


@dataclass(frozen=True)
class Wanted:
    """What the entries of every step should predict, for the tokens x_t of a window."""

    counted: Tensor  # bool [batch, T]: whether guesses of x_t count
    labels: Tensor  # [batch, T] draft ids of the tokens x_t
    aims: Tensor  # [answers, draft vocab]: the target's distribution over x_t of each answer token; empty for text
    places: Tensor  # [batch, T] the row of `aims` for x_t; meaningless if x_t is not part of an answer


class HeadLoss(nn.Module):
    """sum_j w_j CE_j over the entries whose guess is part of an answer and can be made in the draft vocabulary."""

    def __init__(
        self, head: Head, target: TrainingTarget, labels: str, weights: Sequence[float], compiled: bool = False
    ) -> None:
        """compiled: fuse operations by torch.compile, which pays if all batches have one shape."""
        super().__init__()
        self.head, self.labels, self.weights, self.logit_cap = head, labels, tuple(weights), target.logit_cap
        self.block: Block = torch.compile(block_of_rows, dynamic=True) if compiled else block_of_rows
        self.features = torch.compile(head.features, dynamic=False) if compiled else head.features
        vocabulary = head.vocabulary
        member = vocabulary.member()
        self.known, self.unknown = Frozen(target.head[member]), Frozen(target.head[~member])
        self.member, self.draft_ids = Frozen(member), Frozen(vocabulary.draft_ids())
        self.to(target.head.device)

    @property
    def device(self) -> torch.device:
        """The device it computes on."""
        return self.known.table.device

    def forward(self, ids: Tensor, answer: Tensor, states: States, final: Tensor) -> Tensor:
        """ids and answer [batch, T], the target's states and its normed last ones [batch, T, hidden] -> scalar nats."""
        with torch.no_grad():
            wanted = self.wanted(ids, answer, final)
        total = torch.zeros((), device=ids.device)
        for step, features in enumerate(self.features(states, ids, answer)):
            if step < len(self.weights) and self.weights[step] > 0:
                total = total + self.weights[step] * self.step_loss(features, wanted, step)
        return total

    def step_loss(self, features: Features, wanted: Wanted, step: int) -> Tensor:
        """Mean cross-entropy of one step over the entries that count."""
        in_answer = rows_of_step(wanted.counted, step, 2 + step)
        learned = in_answer if features.learned is None else in_answer & features.learned
        counted = learned.flatten().nonzero()[:, 0]
        rows = features.rows.flatten(0, 1)[counted]  # [entries that count, hidden]
        if not len(rows):
            return rows.sum()
        if self.labels == "target":
            places = rows_of_step(wanted.places, step, 2 + step).flatten()[counted]
            weights = torch.full((len(rows),), 1 / len(rows), device=rows.device)
            return weighted_cross_entropy(rows, features.table, wanted.aims, places, weights, features.cap, self.block)
        labels = rows_of_step(wanted.labels, step, 2 + step).flatten()[counted]
        return F.cross_entropy(capped(F.linear(rows, features.table).float(), features.cap), labels)

    def wanted(self, ids: Tensor, answer: Tensor, final: Tensor) -> Wanted:
        """The predictions wanted along a window."""
        labels = self.draft_ids.table[ids]
        places = (answer.flatten().cumsum(0) - 1).clamp(min=0).view_as(ids)
        if self.labels == "text":
            return Wanted(answer & self.member.table[ids], labels, final.new_zeros(0), places)
        before = F.pad(final[:, :-1], (0, 0, 1, 0))[answer]  # [answers, hidden]: the states that x_t follows from
        aims, best_is_known = self.aims(before)
        counted = answer.clone()
        counted[answer] = best_is_known
        return Wanted(counted, labels, aims, places)

    def aims(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The target's restricted distributions [rows, draft vocab], and whether its best token is in the vocabulary.

        states: the target's normed last ones, [rows, hidden].
        """
        low = torch.is_autocast_enabled(states.device.type)
        dtype = torch.get_autocast_dtype(states.device.type) if low else states.dtype
        aims = torch.empty(len(states), len(self.known.table), dtype=dtype, device=states.device)
        best_is_known = torch.ones(len(states), dtype=torch.bool, device=states.device)
        for first in range(0, len(states), BLOCK_ROWS):
            part = slice(first, first + BLOCK_ROWS)
            logits = F.linear(states[part], self.known.table)  # [block, draft vocab]
            aims[part] = capped(logits.float(), self.logit_cap).softmax(-1).to(dtype)
            if len(self.unknown.table):
                best_is_known[part] = logits.amax(-1) >= F.linear(states[part], self.unknown.table).amax(-1)
        return aims, best_is_known


def step_weights(num_steps: int, decay: float) -> list[float]:
    """decay^j for step j, divided by their sum."""
    powers = [decay**step for step in range(num_steps)]
    return [power / sum(powers) for power in powers]
