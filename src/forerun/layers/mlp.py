"""The gated feed-forward layer: down(act(gate(x)) * up(x)), gate and up in one matrix; or down(act(up(x))).

Knows: its two matrices and the activation's name. Does not know: experts, or which model it is in.
"""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.layers.linear import Linear


class GatedMLP:
    """SwiGLU and its relatives, one of which has no gate: a squared ReLU."""

    def __init__(
        self, kernels: Kernels, gate_up: Linear, down: Linear, activation: str, gate_factor: float = 1.0
    ) -> None:
        """`gate_up` [2F, H], gate rows first, or [F, H]; `down` [H, F]; `activation` one of `ops.ACTIVATIONS`.

        gate_factor: of what goes through the activation; no recorder can write another than 1 down.
        """
        self._kernels = kernels
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._gate_factor = gate_factor

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""
        return (self.gate_up, self.down)

    def bytes_read(self, num_rows: int) -> int:
        """Bytes that a pass over `num_rows` rows reads: all of them."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]."""
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """x [M, H] -> what `down` reads, [M, F]."""
        made = self.gate_up(x)  # [M, 2F], or [M, F]
        if self._gate_factor != 1:
            made[:, : made.shape[1] // 2] *= self._gate_factor
        return self._kernels.gated_act(made, self.activation)
