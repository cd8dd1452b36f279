"""A layer of a short causal convolution between two gates, in place of attention.

Knows: its matrices, the order of its ops. Does not know: requests, who owns slots.
Source: LFM2 (2511.23404); transformers modeling_lfm2.py.
"""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.kernels.recurrent_ops import LayerState, Walk
from forerun.layers.linear import Linear
from forerun.layers.recurrent import Recurrent


class ShortConv(Recurrent):
    """Projection to b, c and x; c * conv(b * x); output projection."""

    def __init__(self, kernels: Kernels, project: Linear, conv: Tensor, out: Linear) -> None:
        """`project` [3H, H], rows of b first, then of c; `conv` [taps, H] float32; `out` [H, H]."""
        self._kernels, self._project, self._conv = kernels, project, conv
        self.out = out
        self.linears = (project, out)
        self.vectors = (conv,)
        self.tail = (conv.shape[0] - 1, conv.shape[1])
        self.memory = (0, 0, 0)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before, after, values = self._project(x).chunk(3, dim=1)  # [M, H] each
        return before * values, after

    def _advance(self, inputs: Tensor, state: LayerState, walk: Walk) -> Tensor:
        return self._kernels.causal_conv(inputs, self._conv, state.tails, walk, silu=False)

    def _leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.out(gate * mixed)
