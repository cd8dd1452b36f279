"""Estimates of how likely a drafted token is to be accepted: the two formulas, in torch, on any device.

Knows: logits and the scores of their best tokens. Does not know: who draws, trees, requests. Estimates only
steer which nodes are tried, never which tokens are emitted.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from forerun.kernels.ops import NUM_RIVALS, RIVALS_SCALE

LEAST_RANKS: Final = 16  # looked at to tell how sure a head is, also where fewer will be used


def rival_log_chances(scores: Tensor) -> Tensor:
    """The log softmax of the NUM_RIVALS best scores over RIVALS_SCALE, continued beyond these (`speculation.growth`
    says why).

    scores [R, ranks], best first, as `Kernels.gumbel_topk` has them -> [R, ranks]. C++ (`chain.cpp`) and Triton
    (`sampling.py`) compute the same where chances are drawn with the tokens.
    """
    scaled = scores / RIVALS_SCALE
    return scaled - scaled[:, :NUM_RIVALS].logsumexp(1, keepdim=True)


def head_log_chances(logits: Tensor, scores: Tensor, is_greedy: Tensor) -> Tensor:
    """Log chances of heads that do not see the drafted tokens before theirs (Medusa).

    At temperature 0 that is log q; above, the log softmax of the best scores, noise included: how far the best leads
    the others tells how sure a head is. logits [..., V], scores [..., ranks] as `Kernels.gumbel_topk` has them,
    is_greedy [..., 1] -> [..., ranks] float64.
    These heads' distributions are flat and, unlike those of drafters that see the whole prefix
    (`speculation.growth`), well calibrated at temperature 0 (`mini`: docs/log.md, "Trees").
    """
    of_all, of_best = torch.logsumexp(logits, -1, keepdim=True), torch.logsumexp(scores, -1, keepdim=True)
    return (scores - torch.where(is_greedy, of_all.double(), of_best)).clamp(max=0.0)
