"""Muon: momentum whose matrix updates are orthogonalized, for the 2-D weights inside the layers.

Knows one optimizer step. Knows nothing of schedules or of which weights it is given. `torch.optim.Muon` always
computes in bfloat16, which takes 45 s a step on a CPU without AVX-512 for 12M weights; here the dtype is a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def orthogonalize(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Moves all singular values of `matrix` [rows, cols] close to one by Newton-Schulz iterations in `dtype`."""
    a, b, c = QUINTIC
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / (x.norm() + 1e-7)).to(dtype)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized, with decoupled weight decay; takes 2-D parameters only."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, group)

    def update(self, weight: Tensor, gradient: Tensor, group: dict[str, float]) -> None:
        """Updates one weight by its gradient, both [rows, cols]."""
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        momentum = state["momentum"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalize(torch.lerp(gradient, momentum, group["momentum"]), self.dtype)
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
