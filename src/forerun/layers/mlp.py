"""The gated feed-forward layer: down(act(gate(x)) * up(x)), gate and up in one matrix.

Knows: its two matrices and the activation's name. Does not know: experts, or which model it is in.
"""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.layers.linear import Linear


class GatedMLP:
    """SwiGLU and its relatives."""

    def __init__(self, kernels: Kernels, gate_up: Linear, down: Linear, activation: str) -> None:
        """`gate_up` [2F, H], gate rows first; `down` [H, F]; `activation` one of `ops.ACTIVATIONS`."""
        self._kernels = kernels
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""
        return (self.gate_up, self.down)

    def bytes_read(self, num_rows: int) -> int:
        """Bytes that a pass over `num_rows` rows reads: all of them."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]."""
        gated = self._kernels.gated_act(self.gate_up(x), self.activation)  # [M, F]
        return self.down(gated)
