"""What engine and drafters ask of whatever executes a network's passes.

Knows: the verbs. Does not know: networks, who executes them (`runtime.bind` decides).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from forerun.models.base import PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.speculation.drawn import Drawn
from forerun.speculation.growth import TreeNoise


class Drawer(Protocol):
    """Draws drafts with one network."""

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """A tree of up to `width` children a node (1: a chain) below each root, the largest first.

        `roots`: known tokens that are still to be read, then the root. `features` [M, width of the features]: what
        these rows are fed beside tokens, of a network that reads any.
        """


class Runner(Drawer, Protocol):
    """Executes the passes of one network over one pool."""

    replays: bool  # passes of few rows run without Python in between

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """The pass over known tokens, roots and trees of a target; features as for `draw`.

        Logits may lie where the next pass of the same size writes its own.
        """
