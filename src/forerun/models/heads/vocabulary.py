"""Draft vocabularies: a head that knows only the target's most frequent tokens.

Knows: which token of the target each row of the output layer is. Does not know: the head.

`d2t` of a checkpoint holds *offsets*: the target's token is the draft's index plus d2t at that index. `t2d` (whether
the draft knows a token of the target) adds nothing and is not read.
Source: SafeAILab/EAGLE eagle/model/cnets.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import CheckpointError


class IntegerSource(Protocol):
    """What is needed of a checkpoint."""

    def integers(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor of whole numbers; raises CheckpointError if it is missing or not of `shape`."""


class DraftVocabulary:
    """Tokens of the target by their index in the draft's vocabulary."""

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        """`token_ids` [draft vocabulary] int64, all different and below vocab_size."""
        self.token_ids = token_ids
        self.vocab_size = vocab_size

    def on(self, device: torch.device) -> DraftVocabulary:
        """The same for logits on `device`."""
        return DraftVocabulary(self.token_ids.to(device), self.vocab_size)

    def widen(self, logits: Tensor) -> Tensor:
        """logits [R, draft vocabulary] -> [R, V], -inf for tokens the draft does not know."""
        wide = logits.new_full((logits.shape[0], self.vocab_size), -torch.inf)
        return wide.index_copy_(1, self.token_ids, logits)


def read_vocabulary(source: IntegerSource, size: int, vocab_size: int) -> DraftVocabulary:
    """The vocabulary of `size` tokens a checkpoint's d2t describes; raises CheckpointError."""
    offsets = source.integers("d2t", (size,)).long()  # [draft vocabulary]
    token_ids = offsets + torch.arange(size)
    outside = (token_ids < 0) | (token_ids >= vocab_size)
    if bool(outside.any()):
        index = int(outside.nonzero()[0, 0])
        raise CheckpointError(
            f"d2t maps draft token {index} to token {int(token_ids[index])}, but the target has {vocab_size} tokens; "
            "the head was trained for another target, or d2t does not hold offsets"
        )
    if len(set(token_ids.tolist())) < size:
        raise CheckpointError(
            "d2t maps several draft tokens to one token of the target; copy the checkpoint again (d2t holds offsets: "
            "token = index + d2t[index])"
        )
    return DraftVocabulary(token_ids, vocab_size)
