"""A small model of its own as a draft, distilled from the target.

Knows how a network that guesses the next token is treated as a head: it is not unrolled, since after the true tokens
every guess along a chain equals the network's guess at that position. Knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forerun.training.export import llama_config
from forerun.training.heads.base import Features, Head, States, rows_of_step
from forerun.training.heads.config import DraftConfig
from forerun.training.heads.target import TrainingTarget
from forerun.training.heads.vocabulary import whole_vocabulary
from forerun.training.net import Net


class DraftModelTraining(Head):
    """The draft's network with the target's vocabulary and tied embeddings."""

    kind = "draft"

    def __init__(self, target: TrainingTarget, config: DraftConfig) -> None:
        super().__init__()
        self.vocabulary = whole_vocabulary(target.shape.vocab_size)
        self.num_steps, self.layers = config.num_steps, ()
        self.net = Net(config.shape_in(target.shape))
        self.eos_token_id = target.eos_token_id

    def features(self, states: States, ids: Tensor, answer: Tensor | None = None) -> list[Features]:
        """See `Head`. Step j is step 0, j places on."""
        rows, table = self.net.hidden(ids), self.net.model.embed_tokens.weight  # [batch, T, hidden]
        return [Features(rows_of_step(rows, step, 1 + step), table) for step in range(self.num_steps)]

    def tensors(self) -> dict[str, Tensor]:
        """See `Head`."""
        return dict(self.net.state_dict())

    def config(self) -> dict[str, Any]:
        """See `Head`."""
        return llama_config(self.net.config, self.eos_token_id)
