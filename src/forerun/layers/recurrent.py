"""What recurrent layers share: a state a sequence in place of keys and values, and drafts that are replayed.

Knows: which inputs are kept of drafts, that only wanted rows go on. Does not know: what a state holds, requests, who
owns slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from forerun.kernels.recurrent_ops import LayerState, StateRows, Walk
from forerun.layers.linear import Linear


class Recurrent(ABC):
    """A layer in place of attention: inputs of a recurrence, the recurrence, what becomes of its outputs."""

    out: Linear  # the output projection
    linears: tuple[Linear, ...]  # every matrix of the layer
    vectors: tuple[Tensor, ...]  # the other weights
    tail: tuple[int, int]  # what a sequence keeps of the convolution: inputs, channels
    memory: tuple[int, int, int]  # and beside that: heads, key_dim, value_dim

    def __call__(self, x: Tensor, rows: StateRows, wanted: Tensor | None) -> Tensor:
        """x [M, H] -> [M, H], or [R, H] of the rows `wanted` [R]; the state goes on over known rows."""
        mixed, gate = self.store(x, rows)
        if wanted is not None:
            mixed, gate = mixed.index_select(0, wanted), gate.index_select(0, wanted)
        return self._leave(mixed, gate)

    def store(self, x: Tensor, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Advance the state over the known rows of x [M, H] -> what the recurrence gives and its gate, [M, V] each."""
        inputs, gate = self._enter(x)
        rows.state.inputs = inputs.index_select(0, rows.walk.drafts)
        return self._advance(inputs, rows.state, rows.walk), gate

    def replay(self, drafts: Tensor, rows: StateRows) -> None:
        """Advance the state over these drafts [n] of the last pass, which became known."""
        self._advance(rows.state.inputs.index_select(0, drafts), rows.state, rows.walk)

    @abstractmethod
    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, H] -> all that the recurrence reads [M, width] and the gate [M, V]."""

    @abstractmethod
    def _advance(self, inputs: Tensor, state: LayerState, walk: Walk) -> Tensor:
        """inputs [M, width] -> [M, V]."""

    @abstractmethod
    def _leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """What the recurrence gives and its gate, [R, V] each -> [R, H]."""
