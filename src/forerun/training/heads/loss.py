"""The loss of a head unrolled over a window: weighted cross-entropies of its steps.

Knows logits, the target's distribution restricted to the draft vocabulary, and which entries count. Knows nothing
of batches or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.training.heads.base import Frozen, Head, States, rows_of_step
from forerun.training.heads.cross_entropy import weighted_cross_entropy
from forerun.training.heads.target import Target


@dataclass(frozen=True)
class Wanted:
    """What the entries of every step should give; position t stands for the token after it."""

    probabilities: Tensor  # [batch, T, draft vocab]: the target's, restricted and renormalised; empty for text labels
    labels: Tensor  # [batch, T] draft ids of the tokens x_t
    counted: Tensor  # bool [batch, T]: whether guesses of x_t count


class HeadLoss(nn.Module):
    """sum_j w_j CE_j over the entries whose guess is part of an answer and can be made in the draft vocabulary."""

    def __init__(self, head: Head, target: Target, labels: str, weights: Sequence[float]) -> None:
        super().__init__()
        self.head, self.labels, self.weights = head, labels, tuple(weights)
        vocabulary = head.vocabulary
        member = vocabulary.member()
        self.known, self.unknown = Frozen(target.head[member]), Frozen(target.head[~member])
        self.member, self.draft_ids = Frozen(member), Frozen(vocabulary.draft_ids())
        self.to(target.head.device)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.known.table.device

    def forward(self, ids: Tensor, answer: Tensor, states: States, final: Tensor) -> Tensor:
        """ids and answer [batch, T], the target's states and its normed last ones [batch, T, hidden] -> scalar nats."""
        with torch.no_grad():
            wanted = self.wanted(ids, answer, final)
        total = torch.zeros((), device=ids.device)
        for step, logits in enumerate(self.head.unroll(states, ids)):
            if step < len(self.weights) and self.weights[step] > 0:
                total = total + self.weights[step] * self.step_loss(logits, wanted, step)
        return total

    def step_loss(self, logits: Tensor, wanted: Wanted, step: int) -> Tensor:
        """Mean cross-entropy of one step's logits [batch, T - 2 - step, draft vocab] over the entries that count."""
        counted = rows_of_step(wanted.counted, step, 2 + step)
        weights = counted / counted.sum().clamp(min=1)  # [batch, T - 2 - step]
        if self.labels == "target":
            aims = rows_of_step(wanted.probabilities, step, 1 + step)
            return weighted_cross_entropy(logits, aims, weights)
        labels = rows_of_step(wanted.labels, step, 2 + step)
        losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view_as(weights) * weights).sum()

    def wanted(self, ids: Tensor, answer: Tensor, final: Tensor) -> Wanted:
        """What is to be guessed along a window."""
        labels = self.draft_ids.table[ids]
        if self.labels == "text":
            return Wanted(final.new_zeros(0), labels, answer & self.member.table[ids])
        logits = F.linear(final, self.known.table)  # [batch, T, draft vocab]
        counted = answer
        if len(self.unknown.table):
            best_unknown = F.linear(final, self.unknown.table).amax(-1)  # [batch, T]
            best_is_known = logits.amax(-1) >= best_unknown  # of the token after each position
            counted = answer & F.pad(best_is_known[:, :-1], (1, 0))
        return Wanted(logits.float().softmax(-1).to(logits.dtype), labels, counted)


def step_weights(num_steps: int, decay: float) -> list[float]:
    """decay^j for step j, divided by their sum."""
    powers = [decay**step for step in range(num_steps)]
    return [power / sum(powers) for power in powers]


def make_loss(loss: HeadLoss, compiled: bool) -> Callable[..., Tensor]:
    """The loss, fused by torch.compile if asked for."""
    return torch.compile(loss, dynamic=False) if compiled else loss
