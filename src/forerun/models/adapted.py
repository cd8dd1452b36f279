"""Adapters that are loaded, and passes some of whose rows have one.

Knows: which rows of a batch belong to which sequence. Does not know: files, what an update computes (`layers.lora`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.layers.lora import ADAPTED, AdapterRows, LowRankUpdate
from forerun.models.batch import ForwardBatch


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """What one adapter adds to which layers."""

    name: str
    path: str
    updates: Mapping[object, Sequence[LowRankUpdate]]  # by layer
    nbytes: int


@contextmanager
def adapting(batch: ForwardBatch, device: torch.device) -> Iterator[None]:
    """A block in which layers add to the rows of the batch's sequences what their adapters add."""
    found = dict.fromkeys(adapter for adapter in batch.adapters if adapter is not None)
    token = ADAPTED.set([_rows_of(adapter, batch, device) for adapter in found])
    try:
        yield
    finally:
        ADAPTED.reset(token)


def _rows_of(adapter: object, batch: ForwardBatch, device: torch.device) -> AdapterRows:
    assert isinstance(adapter, LoraAdapter)
    all_rows, logit_rows = list[bool](), list[bool]()  # whether they are the adapter's
    for rows, own in zip(batch.sequences, batch.adapters, strict=True):
        num_span, num_nodes, is_own = len(rows.span), len(rows.tree_tokens), own is adapter
        all_rows += [is_own] * (num_span + num_nodes)
        logit_rows += [is_own] * (num_span * rows.span_logits + num_nodes)
    return AdapterRows(adapter.updates, {len(of): _chosen(of, device) for of in (logit_rows, all_rows)})


def _chosen(of: Sequence[bool], device: torch.device) -> Tensor | None:
    return None if all(of) else torch.tensor(of).nonzero()[:, 0].to(device)  # [m] int64
