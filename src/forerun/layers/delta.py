"""A layer of gated delta nets: a short convolution and the gated delta rule in place of attention.

Knows: its matrices, the order of its ops, what it keeps of drafts to replay them. Does not know: requests, who owns
slots.
Source: Gated Delta Networks (2412.06464); transformers modeling_qwen3_next.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.kernels.recurrent_ops import DeltaHeads, LayerState, StateRows, Walk
from forerun.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Everything learned. `project` gives queries, keys, values, the output's gate, then b and a of every head."""

    project: Linear  # [row_size + values_size + 2 * num_values, H]
    columns: Tensor | None  # [outputs] int64: where each of these is found, if they are stored in another order
    conv: Tensor  # [taps, row_size] float32
    decay: Tensor  # [num_values] float32: -exp(A_log)
    bias: Tensor  # [num_values] float32
    norm: Tensor  # [value_dim] float32
    out: Linear  # [H, values_size]


class GatedDeltaNet:
    """Projection, convolution, the delta rule, a gated norm, output projection."""

    def __init__(self, kernels: Kernels, heads: DeltaHeads, weights: DeltaWeights, norm_eps: float) -> None:
        self._kernels = kernels
        self.heads = heads
        self.weights = weights
        self.norm_eps = norm_eps

    @property
    def out(self) -> Linear:
        """The output projection."""
        return self.weights.out

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""
        return (self.weights.project, self.weights.out)

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The other weights."""
        weights = self.weights
        return (weights.conv, weights.decay, weights.bias, weights.norm)

    def __call__(self, x: Tensor, rows: StateRows, wanted: Tensor | None) -> Tensor:
        """x [M, H] -> [M, H], or [R, H] of the rows `wanted` [R]; the state goes on over known rows."""
        mixed, gate = self.store(x, rows)
        if wanted is not None:
            mixed, gate = mixed.index_select(0, wanted), gate.index_select(0, wanted)
        heads = mixed.view(-1, self.heads.value_dim)  # [R * num_values, value_dim]
        normed = self._kernels.rms_norm(heads, self.weights.norm, self.norm_eps).view(mixed.shape)
        return self.weights.out(self._kernels.gated_act(torch.cat([gate, normed], dim=1), "silu"))

    def store(self, x: Tensor, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Advance the state over the known rows of x [M, H] -> values found and their gate, each [M, values_size]."""
        made, columns = self.weights.project(x), self.weights.columns
        made = made if columns is None else made.index_select(1, columns)
        gate_at = self.heads.row_size
        gates_at = gate_at + self.heads.values_size
        inputs = torch.cat([made[:, :gate_at], made[:, gates_at:]], dim=1)  # [M, row_size + 2 * num_values]
        rows.state.inputs = inputs.index_select(0, rows.walk.drafts)
        return self._advance(inputs, rows.state, rows.walk), made[:, gate_at:gates_at]

    def replay(self, drafts: Tensor, rows: StateRows) -> None:
        """Advance the state over these drafts [n] of the last pass, which became known."""
        self._advance(rows.state.inputs.index_select(0, drafts), rows.state, rows.walk)

    def _advance(self, inputs: Tensor, state: LayerState, walk: Walk) -> Tensor:
        """inputs [M, row_size + 2 * num_values] -> [M, values_size]."""
        size, weights = self.heads.row_size, self.weights
        qkv = self._kernels.causal_conv(inputs[:, :size].contiguous(), weights.conv, state.tails, walk, silu=True)
        return self._kernels.gated_delta(
            qkv, inputs[:, size:].contiguous(), self.heads, weights.decay, weights.bias, state.memory, walk
        )
