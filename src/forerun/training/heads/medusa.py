"""Medusa: heads next to the output layer, each guessing one token further ahead (arXiv 2401.10774).

Knows the residual blocks with the parameter names of vLLM's checkpoints and their config.json. Head k reads the
target's state after the final norm and guesses the token k + 2 places on. Knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.training.heads.base import Features, Frozen, Head, States, copied, rows_of_step
from forerun.training.heads.config import MedusaConfig
from forerun.training.heads.target import TrainingTarget
from forerun.training.heads.vocabulary import LearnedVocabulary


class ResidualBlock(nn.Module):
    """x <- x + SiLU(W x + b), several times; W and b start at zero, so that a new block changes nothing."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        for weight in self.parameters():
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [..., hidden]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(Head):
    """The heads. With `shared_head` all use the target's own output layer, frozen; else each trains its own."""

    kind = "medusa"

    def __init__(self, target: TrainingTarget, config: MedusaConfig, vocabulary: LearnedVocabulary) -> None:
        super().__init__()
        self.settings, self.vocabulary, self.target_shape = config, vocabulary, target.shape
        self.logit_scale = target.logit_scale if config.shared_head else 1.0  # heads of their own are trained with it
        self.num_steps = config.num_heads
        self.layers = (target.shape.num_layers + 1,)
        size = target.shape.hidden_size
        self.blocks = nn.ModuleList(ResidualBlock(size, config.num_layers) for _ in range(config.num_heads))
        rows = target.head[vocabulary.token_ids.to(target.head.device)]  # [draft vocab, hidden]
        self.lm_heads = nn.ModuleList()
        if config.shared_head:
            self.lm_head = Frozen(rows.float())
        else:
            for _ in range(config.num_heads):
                linear = nn.Linear(size, vocabulary.size, bias=False)
                linear.weight = copied(rows)
                self.lm_heads.append(linear)

    def output_layer(self, step: int) -> Tensor:
        """The output matrix of head `step`, [draft vocab, hidden]."""
        return self.lm_head.table if self.settings.shared_head else torch.as_tensor(self.lm_heads[step].weight)

    def features(self, states: States, ids: Tensor, answer: Tensor | None = None) -> list[Features]:
        """See `Head`. The tokens do not matter: the heads are independent of each other."""
        state = states[self.layers[0]]
        return [
            Features(block(rows_of_step(state, step, 0)), self.output_layer(step))
            for step, block in enumerate(self.blocks)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """See `Head`. The target's output layer is written as the target stores it, to be known as the same."""
        found = dict(self.state_dict())
        if self.settings.shared_head:
            found["lm_head.weight"] = self.lm_head.table / self.logit_scale
        if not self.vocabulary.is_whole:
            found["token_map"] = self.vocabulary.token_ids
        return found

    def config(self) -> dict[str, Any]:
        """See `Head`."""
        scaled = {"logit_scale": self.logit_scale} if self.logit_scale != 1.0 else {}
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target_shape.hidden_size,
            "vocab_size": self.vocabulary.target_size,
            "truncated_vocab_size": self.vocabulary.size,
            "num_heads": self.settings.num_heads,
            "num_hidden_layers": self.settings.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": self.settings.shared_head,
            **scaled,
            "torch_dtype": "bfloat16",
        }
