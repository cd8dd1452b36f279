"""The interface through which engine and drafters execute a network's passes.

Knows: the methods. Does not know: networks, which implementation runs them (`runtime.bind` decides).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from forerun.kernels.draws import PlainChain
from forerun.models.base import PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.speculation.drawn import Drawn
from forerun.speculation.growth import TreeNoise


class Drawer(Protocol):
    """Draws drafts with one network."""

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """A tree with up to `width` children per node (1: a chain) below each root, the largest first.

        `roots`: known tokens that are still to be read, then the root. `features` [M, width of the features]: the
        other input of these rows besides tokens, if the network has one.
        """


class Runner(Drawer, Protocol):
    """Executes the passes of one network over one pool."""

    replays: bool  # whether passes of few rows run without Python in between

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """The pass over known tokens, roots and trees of a target; features as for `draw`.

        The next pass of the same size may overwrite the logits.
        """


class Chosen(NamedTuple):
    """What a pass over chains gave."""

    pass_s: float  # seconds of the pass alone
    choices: Sequence[tuple[int, int]]  # of each chain how many drafts are accepted, and the token behind them
    hidden: dict[int, Tensor]  # as in PassOutput: a row for every token of the chains, which the caller may keep


class ChainStepper(Protocol):
    """The extra method of runners with `chooses = True`, which choose from a pass in the same call."""

    def choose(self, chains: Sequence[PlainChain]) -> Chosen | None:
        """The pass over chains of drafts, and the tokens that the coupled rule chooses.

        None for chains that only `Runner.run` computes, before any pass; and where logits allow no token: that pass has
        run, and its keys and values are in the rows in which `Runner.run` writes the same.
        """


def chain_stepper(runner: Runner) -> ChainStepper | None:
    """The runner, if it chooses."""
    return cast(ChainStepper, runner) if getattr(runner, "chooses", False) else None
