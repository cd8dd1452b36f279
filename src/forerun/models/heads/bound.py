"""What a draft head bound to one pool keeps of the head it stands for, whichever way its passes are replayed.

Knows: what drafters ask of such a head. Does not know: passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from forerun.kernels.ops import ChainNoise, Chains, LayerKV
from forerun.models.batch import ForwardBatch
from forerun.models.drafted import EnqueuedDrafts
from forerun.models.heads.head import DraftHead, HeadOutput

POSITION_SHIFT = -1  # rows stand at the position of the state they are fed, which is that of the token before


class BoundHead(ABC):
    """Does what `DraftHead` does, and chains in one go."""

    enqueues_drafts = False  # trees too, and before anybody has read them

    def __init__(self, head: DraftHead, kvs: Sequence[LayerKV]) -> None:
        self._head = head
        self._kvs = kvs

    @property
    def state_size(self) -> int:
        """See `DraftHead`."""
        return self._head.state_size

    def read(self, batch: ForwardBatch, states: Tensor, kvs: Sequence[LayerKV]) -> HeadOutput | None:
        """See `DraftHead.read`."""
        return self._head.read(batch, states, kvs)

    def forward(self, batch: ForwardBatch, features: Tensor, kvs: Sequence[LayerKV]) -> HeadOutput | None:
        """See `DraftHead.forward`."""
        return self._head.forward(batch, features, kvs)

    @abstractmethod
    def can_draft_chains(self, batch: ForwardBatch) -> bool:
        """Whether a batch is of a kind `draft_chains` takes."""

    @abstractmethod
    def draft_chains(
        self, batch: ForwardBatch, states: Tensor, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> tuple[Chains, Tensor | None]:
        """Run the batch, whose logit rows are one root a sequence, and draw a chain below each, level by level.

        `states` [M, sum of the widths] are the target's. With `judged` also the log chance of each token, see
        `TreeGrower` [steps, R] float64.
        """

    def enqueue_drafts(self, batch: ForwardBatch, states: Tensor, noise: ChainNoise, width: int) -> EnqueuedDrafts:
        """Run the batch as `draft_chains` does, and grow a tree of `width` children a node below each root (1: chains).

        `noise`: of chains as long as trees may have nodes. Trees end after `models.trees.MOST_LEVELS` levels. To be
        asked only where it `enqueues_drafts`.
        """
        raise AssertionError("levels of drafts are read in between here")
