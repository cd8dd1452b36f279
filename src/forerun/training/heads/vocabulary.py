"""The draft vocabulary: which tokens of the target a head can propose.

Knows counting and the two maps of EAGLE-3 checkpoints. Knows nothing of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import ConfigError


@dataclass(frozen=True)
class LearnedVocabulary:
    """`token_ids` [draft vocab], ascending ids of a target of `target_size` tokens."""

    token_ids: Tensor
    target_size: int

    @property
    def size(self) -> int:
        """Tokens the head can propose."""
        return len(self.token_ids)

    @property
    def is_whole(self) -> bool:
        """Whether it is the target's own vocabulary."""
        return self.size == self.target_size

    def member(self) -> Tensor:
        """Which target tokens belong to it: bool [target vocab], the `t2d` of EAGLE-3."""
        inside = torch.zeros(self.target_size, dtype=torch.bool)
        inside[self.token_ids] = True
        return inside

    def offsets(self) -> Tensor:
        """What to add to a draft id to get the target id: int64 [draft vocab], the `d2t` of EAGLE-3."""
        return self.token_ids - torch.arange(self.size)

    def draft_ids(self) -> Tensor:
        """The draft id of every target token: int64 [target vocab], 0 for tokens without one."""
        table = torch.zeros(self.target_size, dtype=torch.int64)
        table[self.token_ids] = torch.arange(self.size)
        return table


def whole_vocabulary(target_size: int) -> LearnedVocabulary:
    """All tokens of the target."""
    return LearnedVocabulary(torch.arange(target_size), target_size)


def exported_vocabulary(tensors: Mapping[str, Tensor], target_size: int) -> LearnedVocabulary | None:
    """The vocabulary of an exported head, from EAGLE-3's `d2t` or Medusa's `token_map`; None if it has all tokens."""
    if "d2t" in tensors:
        return LearnedVocabulary(tensors["d2t"] + torch.arange(len(tensors["d2t"])), target_size)
    return LearnedVocabulary(tensors["token_map"], target_size) if "token_map" in tensors else None


def frequent_tokens(counts: Tensor, size: int) -> LearnedVocabulary:
    """The `size` most frequent tokens by `counts` [target vocab], the lower id first among equals; 0 takes all.

    Raises ConfigError for a size beyond the target's vocabulary.
    """
    if not 0 <= size <= len(counts):
        raise ConfigError(
            f"a draft vocabulary of {size} tokens was asked for; the target has {len(counts)}; 0 takes all"
        )
    if size in (0, len(counts)):
        return whole_vocabulary(len(counts))
    order = torch.argsort(counts, descending=True, stable=True)
    return LearnedVocabulary(order[:size].sort().values, len(counts))
