"""Adapters that are loaded, and passes some of whose rows have one.

Knows: which rows of a batch belong to which sequence. Does not know: files, what an update computes (`layers.lora`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from forerun.layers.lora import ADAPTED, AdapterRows, LowRankUpdate
from forerun.models.batch import ForwardBatch
from forerun.weights.identity import Stamp


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """What one adapter adds to which layers."""

    name: str
    path: str
    updates: Mapping[object, LowRankUpdate]  # by layer
    stamps: tuple[Stamp, ...] = ()  # of the files it was read from


@contextmanager
def adapting(batch: ForwardBatch) -> Iterator[None]:
    """A block in which layers add to the rows of the batch's sequences what their adapters add."""
    found = dict.fromkeys(adapter for adapter in batch.adapters if adapter is not None)
    token = ADAPTED.set([_rows_of(adapter, batch) for adapter in found])
    try:
        yield
    finally:
        ADAPTED.reset(token)


def _rows_of(adapter: object, batch: ForwardBatch) -> AdapterRows:
    assert isinstance(adapter, LoraAdapter)
    all_runs, logit_runs = list[slice](), list[slice]()
    num_rows = num_logits = 0
    for rows, own in zip(batch.sequences, batch.adapters, strict=True):
        num_nodes = len(rows.tree_tokens)
        own_rows, own_logits = len(rows.span) + num_nodes, len(rows.span) * rows.span_logits + num_nodes
        if own is adapter:
            _extend(all_runs, num_rows, own_rows)
            _extend(logit_runs, num_logits, own_logits)
        num_rows, num_logits = num_rows + own_rows, num_logits + own_logits
    return AdapterRows(adapter.updates, {num_logits: logit_runs, num_rows: all_runs})


def _extend(runs: list[slice], first: int, count: int) -> None:
    """Add these rows, to the last run if they follow it."""
    if runs and runs[-1].stop == first:
        first, count = runs[-1].start, count + first - runs[-1].start
        runs.pop()
    if count:
        runs.append(slice(first, first + count))
