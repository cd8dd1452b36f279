"""The losses: cross-entropy of the next token, or divergence from a teacher's distribution over it.

Knows logits, and who speaks in a chat. Knows nothing of data or steps. A loss takes windows [batch, seq + 1] and
returns a scalar in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from forerun.errors import TrainingError
from forerun.training.chat import END_OF_TEXT, TURN_START
from forerun.training.net import Net
from forerun.training.recipe import RunConfig

Loss = Callable[[Tensor], Tensor]


def lower_precision(run: RunConfig) -> torch.autocast:
    """Runs matrix products in the run's precision, everything that sums in float32."""
    return torch.autocast(run.device, dtype=torch.bfloat16, enabled=run.dtype is torch.bfloat16)


@dataclass(frozen=True)
class PromptWeights:
    """What each token of a window counts: `weight` where somebody else than the assistant speaks, one elsewhere.

    A window that begins within a turn counts whole up to the next turn: nobody knows who speaks.
    """

    weight: float
    turn_start: int
    end_of_text: int
    assistant: int  # the token behind the start of its turns

    @classmethod
    def of(cls, tokenizer: Tokenizer, weight: float) -> PromptWeights:
        """Finds the tokens of the chat template. Raises TrainingError if the tokenizer lacks one."""
        start, role = tokenizer.encode(f"{TURN_START}assistant").ids[:2]
        end = tokenizer.token_to_id(END_OF_TEXT)
        if end is None or start != tokenizer.token_to_id(TURN_START):
            raise TrainingError(f"prompt_weight needs a tokenizer with {TURN_START} and {END_OF_TEXT}")
        return cls(weight, start, end, role)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Weights of `tokens` [batch, seq], in float32."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        opens = (tokens == self.turn_start) | (tokens == self.end_of_text)
        opened = torch.where(opens, places, -1).cummax(dim=1).values  # [batch, seq], -1 before the first
        opener = tokens.gather(1, opened.clamp(min=0))
        speaker = tokens.gather(1, (opened + 1).clamp(max=tokens.shape[1] - 1))
        is_prompt = (opened >= 0) & (opener == self.turn_start) & (speaker != self.assistant)
        return torch.where(is_prompt, self.weight, 1.0)


def next_token_loss(net: Net, run: RunConfig, weigh: PromptWeights | None = None) -> Loss:
    """Makes the cross-entropy of the next token under `net`, averaged by the weights of `weigh`."""

    def loss(windows: Tensor) -> Tensor:
        with lower_precision(run):
            logits, targets = net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()  # [tokens, vocab], [tokens]
            if weigh is None:
                return F.cross_entropy(logits, targets)
            weights = weigh(windows)[:, 1:].flatten()  # [tokens]
            return (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum().clamp(min=1e-6)

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
