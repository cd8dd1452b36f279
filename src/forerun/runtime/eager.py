"""Passes executed as they come, op by op.

Knows: nothing but the passes. Where others cannot replay a batch it goes this way too; both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.kernels.ops import ChainNoise, Chains, LayerKV
from forerun.models.base import Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.runtime.drawn import EnqueuedDrafts


class EagerRunner:
    """Implements `runtime.runner.Runner`; those who replay passes build on it."""

    replays = False

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV]) -> None:
        self._passes = passes
        self._kvs = kvs

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """See `Runner`."""
        return self._passes.first(batch, features, self._kvs)

    def run_below(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """See `Runner`."""
        return self._passes.below(batch, features, self._kvs)

    def draw_chains(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> tuple[Chains, Tensor | None] | None:
        """See `Runner`: one pass a level."""
        return None

    def enqueue(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, width: int
    ) -> EnqueuedDrafts | None:
        """See `Runner`: one pass a level."""
        return None
