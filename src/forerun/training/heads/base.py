"""What training asks of a draft head, whatever its method.

Knows how a head is unrolled over a window and what it writes into a checkpoint. Knows nothing of losses, data or
steps. Throughout, with window tokens x_0 .. x_{T-1}: entry t of step j guesses x_{t+2+j} from the target's states
up to position t and the tokens up to x_{t+1+j}; step j has the T - 2 - j entries whose guess lies in the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.training.heads.cross_entropy import capped
from forerun.training.heads.vocabulary import LearnedVocabulary

States = Mapping[int, Tensor]  # layer, in the numbering of `models.base`, -> [batch, T, hidden]
INIT_STD = 0.02


class Frozen(nn.Module):
    """A table of the target that a head uses and neither trains nor saves."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table, persistent=False)


class Features(NamedTuple):
    """The logits of one step are rows [batch, T - 2 - j, hidden] times the transposed table [draft vocab, hidden].

    learned [T - 2 - j]: the entries that were computed, where these are not all. cap: see `cross_entropy.capped`.
    """

    rows: Tensor
    table: Tensor
    learned: Tensor | None = None
    cap: float = 0.0


class Head(nn.Module, ABC):
    """A draft head: its state dict is what a checkpoint of the run holds."""

    kind: str
    layers: tuple[int, ...]  # the target's states it reads
    num_steps: int  # tokens it drafts in a chain
    vocabulary: LearnedVocabulary

    @abstractmethod
    def features(self, states: States, ids: Tensor, answer: Tensor | None = None) -> list[Features]:
        """For every step j, the rows and table whose product gives the logits of its guesses along `ids` [batch, T].

        answer: bool [batch, T], the tokens that count, for heads that learn from some entries only; None: all.
        """

    def unroll(self, states: States, ids: Tensor) -> list[Tensor]:
        """Guesses along `ids` [batch, T] -> logits of every step j, [batch, T - 2 - j, draft vocab]."""
        return [capped(F.linear(found.rows, found.table), found.cap) for found in self.features(states, ids)]

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the published layout, by name."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The fields of its config.json."""


def rows_of_step(x: Tensor, step: int, offset: int) -> Tensor:
    """x[:, t + offset] for the entries t of a step, [batch, T - 2 - step, ..]."""
    return x[:, offset : offset + x.shape[1] - 2 - step]


def init_linears(module: nn.Module) -> None:
    """Draws all matrices from a normal; those that write to the residual stream are smaller."""
    for name, weight in module.named_parameters():
        if weight.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=INIT_STD * (0.5 if writes else 1.0))


def pass_through(linear: nn.Linear, first: int) -> None:
    """Adds the identity to a fusing matrix from column `first` on, so that a new head starts near its target."""
    with torch.no_grad():
        size = linear.weight.shape[0]
        linear.weight[:, first : first + size] += torch.eye(size)


def copied(table: Tensor) -> nn.Parameter:
    """A trainable float32 copy of a tensor of the target."""
    return nn.Parameter(table.detach().to(torch.float32).clone())
