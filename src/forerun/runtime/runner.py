"""What engine and drafters ask of whatever executes a network's passes.

Knows: the verbs. Does not know: networks, who executes them (`runtime.bind` decides).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from forerun.kernels.ops import ChainNoise, Chains
from forerun.models.base import PassOutput
from forerun.models.batch import ForwardBatch
from forerun.runtime.drawn import EnqueuedDrafts


class Runner(Protocol):
    """Executes the passes of one network over one pool."""

    replays: bool  # passes of few rows run without Python in between

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """The pass over known tokens, roots and trees of a target; features [M, `Passes.feature_size`] if it reads any.

        Logits may lie where the next pass of the same size writes its own.
        """

    def run_below(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """The pass over one level of drafts, fed with what the pass above gave [M, `Passes.fed_size`]."""

    def draw_chains(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, keep_logits: bool, judged: bool
    ) -> tuple[Chains, Tensor | None] | None:
        """Run the batch, whose logit rows are one root a sequence, and draw a chain below each in one call.

        The longest chain first. With `judged` also the log chance of each token, see `TreeGrower` [steps, R] float64.
        None, and nothing done, where such a batch takes one pass a level.
        """

    def enqueue(
        self, batch: ForwardBatch, features: Tensor | None, noise: ChainNoise, width: int
    ) -> EnqueuedDrafts | None:
        """Run the batch, and grow a tree of `width` children a node below each root (1: chains), the largest first.

        Nothing is waited for. `noise`: of chains as long as trees may have nodes. Trees end after
        `runtime.trees.MOST_LEVELS` levels. None, and nothing done, where levels are read in between.
        """
