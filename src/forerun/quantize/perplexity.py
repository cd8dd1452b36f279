"""Perplexity: how well a model predicts a text, through the engine's own forward.

Knows: logits of whole sequences and the bytes behind tokens. Does not know: where models and texts come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.errors import DataError
from forerun.models.base import Model
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.quantize.pool import BLOCK_SIZE, block_table, empty_kv

CHUNK = 256  # rows of logits held at once
REQUEST = "perplexity"


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The log-likelihood of a text."""

    nats: float  # negative log-likelihood of all predicted tokens
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """exp of the loss per token."""
        return math.exp(self.nats / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text, which does not depend on the tokenizer."""
        return self.nats / math.log(2) / max(self.num_bytes, 1)


def measure_perplexity(
    model: Model,
    sequences: Sequence[Sequence[int]],
    num_bytes: Callable[[int], int],
    advance: Callable[[int], None] = lambda num: None,
) -> Perplexity:
    """Predict every token of every sequence but its first from those before it in the sequence.

    num_bytes: the bytes of text behind a token id. advance: called after every sequence. Raises DataError if there is
    nothing to predict.
    """
    predicted = [token for ids in sequences for token in ids[1:]]
    if not predicted:
        raise DataError("the text has fewer than two tokens: there is nothing to predict; give more text")
    nats = 0.0
    for ids in sequences:
        nats += _lost(model, ids)
        advance(1)
    return Perplexity(nats, len(predicted), sum(map(num_bytes, predicted)))


def _lost(model: Model, ids: Sequence[int]) -> float:
    """The loss, in nats, of all tokens of one sequence but the first."""
    lost, start = 0.0, 1
    for logits in logits_of(model, ids):
        wanted = torch.tensor(ids[start : start + len(logits)])
        lost += float(F.cross_entropy(logits.double(), wanted, reduction="sum"))
        start += len(logits)
    return lost


@torch.no_grad()
def logits_of(model: Model, ids: Sequence[int]) -> Iterator[Tensor]:
    """The logits after each of a sequence's tokens but the last, CHUNK rows at a time -> [rows, V] on the host."""
    table = block_table(len(ids))
    kvs = [empty_kv(spec, len(table), model.device) for spec in model.kv_specs]
    for start in range(0, len(ids) - 1, CHUNK):
        span = ids[start : min(start + CHUNK, len(ids) - 1)]
        rows = SequenceRows(REQUEST, table, start, span, start + len(span), span_logits=True)
        yield model.forward(ForwardBatch.build([rows], BLOCK_SIZE), kvs).logits.cpu()
    model.release(REQUEST)
