"""The acceptance length a head would have, simulated on answers the target wrote greedily.

As long as the guesses of a chain are right, they equal the target's own text, so one unrolled pass over the answer
gives the guesses at all positions at once. Knows nothing of how text is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.training.heads.base import Head, States


@dataclass(frozen=True)
class HeldoutAcceptance:
    """length: tokens emitted per pass of the target; by_depth[j]: how often guess j is right if all before it are."""

    length: float
    by_depth: tuple[float, ...]


@dataclass
class AcceptanceTally:
    """The sums over the answers measured so far."""

    num_tokens: int = 0
    num_passes: int = 0
    right: Tensor | None = None  # [steps], entries whose guesses up to j were all right
    tried: Tensor | None = None  # [steps], entries whose guesses before j were all right

    def add(self, matches: Tensor, possible: Tensor, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Counts answers: matches and possible [batch, entries, steps], see `matches_of`; ends: length of each row."""
        streak = (matches & possible).cumprod(-1).bool()  # [batch, entries, steps]
        reached = torch.cat((torch.ones_like(streak[..., :1]), streak[..., :-1]), dim=-1) & possible
        self.right = streak.flatten(0, 1).sum(0) + (0 if self.right is None else self.right)
        self.tried = reached.flatten(0, 1).sum(0) + (0 if self.tried is None else self.tried)
        for accepted, start, end in zip(streak.sum(-1).tolist(), starts, ends, strict=True):
            tokens, passes = walk(accepted, start, end)
            self.num_tokens += tokens
            self.num_passes += passes

    def result(self) -> HeldoutAcceptance:
        """The figures of all answers."""
        assert self.right is not None and self.tried is not None  # at least one batch was added
        rates = (self.right / self.tried.clamp(min=1)).tolist()
        return HeldoutAcceptance(self.num_tokens / max(self.num_passes, 1), tuple(rates))


def walk(accepted: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """Simulates decoding one answer, given the number of right guesses at each entry -> tokens, passes of the target.

    The answer's first token, x_start, comes out of the prefill. A pass with root x_{t+1} emits the right guesses and
    one more token, up to the answer's end (`end` tokens in all).
    """
    entry, tokens, passes = start - 1, 0, 0
    while entry + 2 < end:
        emitted = min(accepted[entry] + 1, end - entry - 2)
        entry, tokens, passes = entry + emitted, tokens + emitted, passes + 1
    return tokens, passes


def matches_of(guesses: Sequence[Tensor], ids: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Compares guesses of every step j, [batch, T - 2 - j] token ids, with `ids` [batch, T].

    -> whether guess j at entry t is x_{t+2+j}, and whether there is such a token in the answer (with the root x_{t+1}
    in it too), both bool [batch, T - 2, steps].
    """
    entries = ids.shape[1] - 2
    right = [F.pad(step_guesses == ids[:, 2 + j :], (0, j)) for j, step_guesses in enumerate(guesses)]
    exists = [F.pad(answer[:, 2 + j :], (0, j)) & answer[:, 1 : 1 + entries] for j in range(len(guesses))]
    return torch.stack(right, dim=-1), torch.stack(exists, dim=-1)


@torch.no_grad()
def guess(head: Head, states: States, ids: Tensor) -> list[Tensor]:
    """The target ids a head guesses, one tensor [batch, T - 2 - j] a step."""
    token_ids = head.vocabulary.token_ids.to(ids.device)
    return [token_ids[F.linear(found.rows, found.table).argmax(-1)] for found in head.features(states, ids)]
