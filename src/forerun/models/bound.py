"""What a model bound to one pool keeps of the model it stands for, whichever way its passes are replayed.

Knows: the facts and the verbs of `models.base.Model` that replaying changes nothing about. Does not know: passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from forerun.kernels.ops import ChainNoise, Chains, LayerKV
from forerun.models.base import CommittedPath, ForwardOutput, Model
from forerun.models.batch import ForwardBatch
from forerun.models.drafted import EnqueuedDrafts


class BoundModel(ABC):
    """All of `models.base.Model`, and chains in one go; how passes are replayed is left to be said."""

    def __init__(self, model: Model, kvs: Sequence[LayerKV], hidden_layers: Sequence[int]) -> None:
        self.vocab_size = model.vocab_size
        self.device = model.device
        self.max_position = model.max_position
        self.kv_specs = model.kv_specs
        self.weight_bytes = model.weight_bytes
        self.num_parameters = model.num_parameters
        self._model = model
        self._kvs = kvs
        self._hidden_layers = tuple(hidden_layers)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """See `models.base.Model`."""
        self._model.commit(paths)

    def release(self, request_id: str) -> None:
        """See `models.base.Model`."""
        self._model.release(request_id)

    @abstractmethod
    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        """See `models.base.Model`."""

    @property
    def enqueues_drafts(self) -> bool:
        """Whether trees, too, are drawn in one go, before anybody has read them."""
        return False

    @property
    @abstractmethod
    def max_chain_rows(self) -> int:
        """Rows a batch for `draft_chains` may have; 0 if this forward returns more than logits."""

    @abstractmethod
    def draft_chains(
        self, batch: ForwardBatch, noise: ChainNoise, keep_logits: bool, judged: bool = False
    ) -> tuple[Chains, Tensor | None]:
        """Run the batch, whose logit rows are one root a sequence, and draw a chain below each, level by level.

        With `judged` also the log chance of each token, see `TreeGrower` [steps, R] float64.
        """

    def enqueue_drafts(self, batch: ForwardBatch, noise: ChainNoise, width: int) -> EnqueuedDrafts:
        """Run the batch as `draft_chains` does, and grow a tree of `width` children a node below each root (1: chains).

        `noise`: of chains as long as trees may have nodes. Trees end after `models.trees.MOST_LEVELS` levels. To be
        asked only where it `enqueues_drafts`.
        """
        raise AssertionError("levels of drafts are read in between here")
