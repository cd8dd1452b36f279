"""A draft head on a card, its passes captured as graphs: all levels of chains or of trees as one.

Knows: that a head is fed by the target on its first level and by itself below. Does not know: what a head computes,
how chains and trees are laid out (`models.chains`, `models.trees`). Trees whose levels the host must see (logits to be
shaped or recorded) have a graph a level. Passes of which some rows want no logits (known tokens, roots) are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import ChainNoise, Chains, Kernels, LayerKV
from forerun.kernels.triton.graphs import Capture, CudaCapture, GraphSize, LastUsed, size_for
from forerun.models.batch import ForwardBatch
from forerun.models.captured import DeviceDrafts, StaticBatch
from forerun.models.drafted import EnqueuedDrafts
from forerun.models.heads.bound import POSITION_SHIFT, BoundHead
from forerun.models.heads.head import DraftHead, HeadOutput
from forerun.models.programs import DraftPasses


@dataclass(frozen=True, slots=True)
class _Level:
    """A captured pass over rows that all want logits."""

    static: StaticBatch
    features: Tensor  # [num_rows, H]
    out: HeadOutput  # in the tensors every replay writes
    replay: Callable[[], None]


class CapturedHead(BoundHead):
    """A head bound to one pool. What it puts out lies where the next pass of the same size writes its own."""

    enqueues_drafts = True

    def __init__(self, head: DraftHead, kernels: Kernels, capture: Capture, kvs: Sequence[LayerKV]) -> None:
        super().__init__(head, kvs)
        self._device = kernels.device
        self._capture = capture
        self._levels: LastUsed[GraphSize, _Level] = LastUsed()
        self._drafts = DeviceDrafts(_passes_of(head, kvs), kernels, capture)

    def forward(self, batch: ForwardBatch, features: Tensor, kvs: Sequence[LayerKV]) -> HeadOutput | None:
        """See `DraftHead.forward`."""
        size = size_for(batch.num_rows, batch.rows.tree_starts.shape[0], batch.rows.max_visible)
        if size is None or not batch.all_logits:
            return self._head.forward(batch, features, kvs)
        level = self._levels.get(size)
        if level is None:
            level = self._new_level(size, batch, features)
            self._levels.put(size, level)
        else:
            _fill(level.static, level.features, batch, features)
            level.replay()
        return HeadOutput(*(rows[: batch.num_rows] for rows in level.out))

    def _new_level(self, size: GraphSize, batch: ForwardBatch, features: Tensor) -> _Level:
        """Capture a pass of this size on the batch itself, so that it writes nothing but what the batch does."""
        static = StaticBatch(size, self._kvs[0].block_size, self._device)
        held = torch.zeros(size.num_rows, features.shape[1], device=self._device)  # [num_rows, H]
        _fill(static, held, batch, features)
        out, replay = self._capture(lambda: _whole(self._head.forward(static.batch, held, self._kvs)))
        return _Level(static, held, out, replay)

    def can_draft_chains(self, batch: ForwardBatch) -> bool:
        """See `BoundHead`: any batch."""
        return True

    def draft_chains(
        self, batch: ForwardBatch, states: Tensor, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> tuple[Chains, Tensor | None]:
        """See `BoundHead`; kept logits lie where the next call writes its own."""
        return self._drafts.chains.draw(batch, states, noise, keep_logits, judged)

    def enqueue_drafts(self, batch: ForwardBatch, states: Tensor, noise: ChainNoise, width: int) -> EnqueuedDrafts:
        """See `BoundHead`."""
        return self._drafts.enqueue(batch, states, noise, width)


def capture_head(head: DraftHead, kernels: Kernels, kvs: Sequence[LayerKV]) -> CapturedHead:
    """The head with its passes captured on a card."""
    return CapturedHead(head, kernels, CudaCapture(kernels.device), kvs)


def _fill(static: StaticBatch, held: Tensor, batch: ForwardBatch, features: Tensor) -> None:
    """Rows and their features [M, H], the last of both repeated up to the size."""
    static.fill(batch)
    held[: len(features)].copy_(features)
    held[len(features) :] = features[-1:]


def _passes_of(head: DraftHead, kvs: Sequence[LayerKV]) -> DraftPasses:
    """The first level reads the target's states, those below what the head put out."""

    def read(batch: ForwardBatch, states: Tensor | None) -> tuple[Tensor, Tensor]:
        assert states is not None
        return _whole(head.read(batch, states, kvs))

    def forward(batch: ForwardBatch, features: Tensor | None) -> tuple[Tensor, Tensor]:
        assert features is not None
        return _whole(head.forward(batch, features, kvs))

    return DraftPasses(
        first=read,
        below=forward,
        vocab_size=head.vocab_size,
        block_size=kvs[0].block_size,
        feature_size=head.state_size,
        shift=POSITION_SHIFT,
    )


def _whole(out: HeadOutput | None) -> HeadOutput:
    assert out is not None, "every level has rows with logits"
    return out
