"""The losses: cross-entropy of the next token, or divergence from a teacher's distribution over it.

Knows logits. Knows nothing of data or steps. A loss takes windows [batch, seq + 1] and returns a scalar in nats per
token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.training.net import Net
from forerun.training.recipe import RunConfig

Loss = Callable[[Tensor], Tensor]


def lower_precision(run: RunConfig) -> torch.autocast:
    """Runs matrix products in the run's precision, everything that sums in float32."""
    return torch.autocast(run.device, dtype=torch.bfloat16, enabled=run.dtype is torch.bfloat16)


def next_token_loss(net: Net, run: RunConfig) -> Loss:
    """Makes the cross-entropy of the next token under `net`."""

    def loss(windows: Tensor) -> Tensor:
        with lower_precision(run):
            logits = net(windows[:, :-1])  # [batch, seq, vocab]
            return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    return torch.compile(loss, dynamic=False) if run.compile else loss


def distillation_loss(net: Net, teacher: Net, run: RunConfig) -> Loss:
    """Makes the divergence KL(teacher || net), averaged over the tokens of the windows."""

    def loss(windows: Tensor) -> Tensor:
        with lower_precision(run):
            with torch.no_grad():
                wanted = teacher(windows[:, :-1]).flatten(0, 1).float().log_softmax(-1)  # [tokens, vocab]
            given = net(windows[:, :-1]).flatten(0, 1).float().log_softmax(-1)
            return F.kl_div(given, wanted, reduction="batchmean", log_target=True)

    return torch.compile(loss, dynamic=False) if run.compile else loss
