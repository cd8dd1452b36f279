"""Log-probabilities of chosen tokens under the model itself, before temperature, penalties and filters.

Knows: rows of logits. Does not know: requests, trees, sampling. A row's figures depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core import PositionLogprobs, TokenLogprob


def position_logprobs(logits: Tensor, token: int, num_top: int) -> PositionLogprobs:
    """The chosen token's log-probability and rank, and the `num_top` best, from logits [vocab_size]."""
    row = torch.log_softmax(logits.cpu().double(), dim=0)  # [vocab_size]
    rank = int((row > row[token]).sum()) + 1
    return PositionLogprobs(TokenLogprob(float(row[token]), rank, token), _best(row, num_top))


def token_logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int], num_top: int) -> list[PositionLogprobs]:
    """Log-probabilities of tokens chosen from these rows of logits [R, vocab_size]."""
    return [position_logprobs(logits[row], token, num_top) for row, token in zip(rows, tokens, strict=True)]


def _best(row: Tensor, num: int) -> tuple[TokenLogprob, ...]:
    """Of equal ones the lower id first. Sorting a whole row of 150,000 takes 14 ms, this half a millisecond."""
    num = min(num, row.shape[0])
    if num == 0:
        return ()
    least = torch.topk(row, num).values[-1]
    candidates = (row >= least).nonzero()[:, 0] if not row.isnan().any() else torch.arange(row.shape[0])  # ascending
    values, order = torch.sort(row[candidates], descending=True, stable=True)
    return tuple(TokenLogprob(float(values[i]), i + 1, int(candidates[order[i]])) for i in range(num))
