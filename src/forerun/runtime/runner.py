"""The interface through which engine and drafters execute a network's passes.

Knows: the methods. Does not know: networks, which implementation runs them (`runtime.bind` decides).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from forerun.kernels.suffix import SuffixText
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


class SequenceSteps(NamedTuple):
    """A sequence whose steps run ahead, in the order of SequenceSteps in csrc/steps.h."""

    rows: SequenceRows  # of the first step: the root and a chain of drafts
    temperature: float
    seed: int
    stream: int
    stops: Collection[int]  # tokens that end it
    num_left: int  # tokens after which it ends
    num_drafts: int = 0  # of a step, at most
    shortest: int = 0  # tails that are looked up for drafts
    longest: int = 0
    text: SuffixText | None = None  # in which they are: all known tokens; it takes in those of the steps


class StepPass(NamedTuple):
    """The pass of one step that ran ahead, and what the target chose from it."""

    logits: Tensor  # [R, vocab_size] float32
    tokens: Sequence[Sequence[int]]  # of each sequence's nodes, which are a chain, the root first
    choices: Sequence[tuple[tuple[int, ...], int]]  # accepted nodes, and the token after them: -1 where there is none
    seconds: float  # that the pass took


class Runner(Drawer, Protocol):
    """Executes the passes of one network over one pool."""

    replays: bool  # whether passes of few rows run without Python in between

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """The pass over known tokens, roots and trees of a target; features as for `draw`.

        The next pass of the same size may overwrite the logits.
        """


class AheadRunner(Runner, Protocol):
    """A runner that can run steps one after the other, without Python in between."""

    max_rows_ahead: int  # of a step; 0: it cannot after all

    def run_ahead(self, sequences: Sequence[SequenceSteps], most: int) -> list[StepPass]:
        """Up to `most` steps of these sequences under the coupled rule, with no parameters but the temperature.

        They end after a step in which a sequence has ended, and before one whose rows have no place in its blocks.
        """


def ahead_runner(runner: Runner, num_rows: int) -> AheadRunner | None:
    """The runner, if it can run steps of so many rows ahead."""
    return cast(AheadRunner, runner) if num_rows <= getattr(runner, "max_rows_ahead", 0) else None
