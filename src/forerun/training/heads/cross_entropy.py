"""Cross-entropy with a distribution, a block of rows at a time.

Knows the sum over a vocabulary and its gradient, which it computes in the same pass: the logits of a step take
dozens of megabytes, and every plain operation on them would go through memory. Knows nothing of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 128  # times a vocabulary of a few thousand float32: fits into a cache


class BlockwiseCrossEntropy(torch.autograd.Function):
    """See `weighted_cross_entropy`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, aims: Tensor, weights: Tensor) -> Tensor:
        """All flattened: logits and aims [rows, vocab], weights [rows]."""
        total = torch.zeros((), device=logits.device)
        gradient = torch.empty_like(logits)
        for first in range(0, len(logits), BLOCK_ROWS):
            rows = slice(first, first + BLOCK_ROWS)
            x, p, weight = logits[rows].float(), aims[rows].float(), weights[rows, None]
            given = x.log_softmax(-1)
            total -= (weight * (p * given).sum(-1, keepdim=True)).sum()
            # sum(p) is one up to rounding, which matters where p is kept in bfloat16
            gradient[rows] = (given.exp_().mul_(p.sum(-1, keepdim=True)).sub_(p)).mul_(weight).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        """The gradient that the forward pass kept."""
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None


def weighted_cross_entropy(logits: Tensor, aims: Tensor, weights: Tensor) -> Tensor:
    """-sum over rows of weight * sum_v aim_v log softmax(logits)_v.

    logits and aims [.., rows, vocab] (no gradient goes into aims), weights [.., rows]; sums are in float32.
    """
    if torch.compiler.is_compiling():  # which fuses the plain operations by itself
        return -(weights * (aims.float() * logits.float().log_softmax(-1)).sum(-1)).sum()
    return torch.as_tensor(
        BlockwiseCrossEntropy.apply(logits.flatten(0, -2), aims.flatten(0, -2), weights.flatten().float())  # type: ignore[no-untyped-call]
    )
