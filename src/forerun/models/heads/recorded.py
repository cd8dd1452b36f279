"""A draft head whose passes were written down once and are replayed without Python.

Knows: that kernels can record, that a head is fed by the target on its first level and by itself below. Does not know:
what a head computes. Batches with more rows than were recorded for take the head's own pass, and so do rows at
position 0 of a head that blanks their embeddings, of which a request has one; both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import ChainNoise, Chains, Kernels, LayerKV
from forerun.kernels.select import recording
from forerun.models.batch import ForwardBatch
from forerun.models.heads.bound import POSITION_SHIFT, BoundHead
from forerun.models.heads.captured import capture_head
from forerun.models.heads.head import DraftHead, HeadOutput
from forerun.models.recorded import MAX_RECORDED_ROWS, placeholder_batch

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Inputs, Program


class RecordedHead(BoundHead):
    """A head bound to one pool, its passes recorded."""

    def __init__(
        self, head: DraftHead, reading: Program, drafting: Program, make_inputs: type[Inputs], kvs: Sequence[LayerKV]
    ) -> None:
        """`reading` is fed the target's states, `drafting` what the head put out."""
        super().__init__(head, kvs)
        self._reading = reading
        self._drafting = drafting
        self._make_inputs = make_inputs

    def read(self, batch: ForwardBatch, states: Tensor, kvs: Sequence[LayerKV]) -> HeadOutput | None:
        """See `DraftHead.read`."""
        if not self.was_recorded(batch):
            return self._head.read(batch, states, kvs)
        return self._run(self._reading, batch, states)

    def forward(self, batch: ForwardBatch, features: Tensor, kvs: Sequence[LayerKV]) -> HeadOutput | None:
        """See `DraftHead.forward`."""
        if not self.was_recorded(batch):
            return self._head.forward(batch, features, kvs)
        return self._run(self._drafting, batch, features)

    def draft_chains(
        self, batch: ForwardBatch, states: Tensor, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> tuple[Chains, Tensor | None]:
        """See `BoundHead`."""
        inputs, block_size = self._inputs(batch, states), self._kvs[0].block_size
        return self._reading.run_chains(inputs, noise, block_size, keep_logits, self._drafting, POSITION_SHIFT, judged)

    def can_draft_chains(self, batch: ForwardBatch) -> bool:
        """See `BoundHead`."""
        return self.was_recorded(batch)

    def was_recorded(self, batch: ForwardBatch) -> bool:
        """Whether a batch is of a kind that can be replayed."""
        return batch.num_rows <= self._reading.max_rows and not (
            self._head.parts.masks_start and any(sequence.start < 2 for sequence in batch.sequences)
        )

    def _run(self, program: Program, batch: ForwardBatch, features: Tensor) -> HeadOutput | None:
        logits, fed = program.run(self._inputs(batch, features))
        return HeadOutput(logits, fed) if len(logits) else None

    def _inputs(self, batch: ForwardBatch, features: Tensor) -> Inputs:
        return self._make_inputs(
            batch.token_ids, batch.positions, batch.slots, batch.rows, batch.logit_rows, features.contiguous()
        )


def record_head(head: DraftHead, kernels: Kernels, kvs: Sequence[LayerKV]) -> DraftHead | BoundHead:
    """The head with its passes recorded for `kvs`; the head itself where kernels or head cannot be recorded."""
    if kernels.device.type == "cuda":
        return capture_head(head, kernels, kvs)
    plain = DraftHead(replace(head.parts, masks_start=False))
    try:
        reading = _record(plain.read, kernels, kvs, head.state_size)
        drafting = _record(plain.forward, kernels, kvs, head.hidden_size)
    except KernelError:  # an op the recorder cannot write down: the head's own pass stays
        return head
    if reading is None or drafting is None:
        return head
    (first, make_inputs), (below, _) = reading, drafting
    return RecordedHead(head, first, below, make_inputs, kvs)


def _record(
    run: Callable[[ForwardBatch, Tensor, Sequence[LayerKV]], HeadOutput | None],
    kernels: Kernels,
    kvs: Sequence[LayerKV],
    feature_size: int,
) -> tuple[Program, type[Inputs]] | None:
    """One of a head's passes over features of that size, written down; None if the kernels cannot."""
    with recording(kernels, MAX_RECORDED_ROWS, feature_size=feature_size) as recorder, torch.no_grad():
        if recorder is None:
            return None
        inputs = recorder.inputs
        assert inputs.features is not None
        out = run(placeholder_batch(inputs), inputs.features, kvs)
        assert out is not None
        return recorder.finish(out), type(inputs)
