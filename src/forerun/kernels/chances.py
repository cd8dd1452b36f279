"""How sure a head is that guesses a token without seeing those before it: the same on a host and on a device.

Knows: logits of heads and the scores of their best tokens. Does not know: who draws, trees, requests.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LEAST_RANKS: Final = 16  # looked at to tell how sure a head is, also where fewer will be used


def head_log_chances(logits: Tensor, scores: Tensor, is_greedy: Tensor) -> Tensor:
    """Log q at temperature 0; above it the noise has spoken, and how far the best lead the others tells how sure it is.

    logits [..., V], scores [..., ranks] as `Kernels.gumbel_topk` has them, is_greedy [..., 1] -> [..., ranks] float64.
    Unlike those of drafters that see the whole prefix (`speculation.growth`), the distributions here are flat, and at
    temperature 0 what they say of their own chances is right (`mini`: docs/log.md, "Trees"). Estimates only: they
    steer which nodes are tried, never what is emitted.
    """
    of_all, of_best = torch.logsumexp(logits, -1, keepdim=True), torch.logsumexp(scores, -1, keepdim=True)
    return (scores - torch.where(is_greedy, of_all.double(), of_best)).clamp(max=0.0)
