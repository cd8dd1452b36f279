"""The candidate selector of DFlash-2: how well a token follows another, given the slot it would stand in.

Knows: the arithmetic. Does not know: files, trees.

score(b | a, slot) = logit_slot(b) + <A_a * (W h_slot), B_b>, over the slot's best tokens b by their logits.
Source: z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """Implements `models.base.PairScores`."""

    num_candidates: int
    predecessors: Tensor  # A [V, rank]
    successors: Tensor  # B [V, rank]
    projection: Linear  # W [rank, H]

    @torch.no_grad()
    def __call__(self, states: Tensor, above: Tensor, ids: Tensor) -> Tensor:
        """See `models.base.PairScores`."""
        slots = self.projection(states)  # [n, rank]
        before = self.predecessors[above].float() * slots[:, None]  # [n, a, rank]
        return before @ self.successors[ids].float().mT

    @property
    def nbytes(self) -> int:
        """Bytes of tables and matrix."""
        return self.predecessors.nbytes + self.successors.nbytes + self.projection.nbytes
