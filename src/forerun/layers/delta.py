"""A layer of gated delta nets: a short convolution and the gated delta rule in place of attention.

Knows: its matrices, the order of its ops. Does not know: requests, who owns slots.
Source: Gated Delta Networks (2412.06464); transformers modeling_qwen3_next.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.kernels.recurrent_ops import DeltaHeads, LayerState, Walk
from forerun.layers.linear import Linear
from forerun.layers.recurrent import Recurrent


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
    order: Tensor | None = None  # [values_size] int64: which values `out`'s columns are for; None: each for its own


class GatedDeltaNet(Recurrent):
    """Projection, convolution, the delta rule, a gated norm, output projection."""

    def __init__(self, kernels: Kernels, heads: DeltaHeads, weights: DeltaWeights, norm_eps: float) -> None:
        self._kernels, self._heads, self._weights, self._norm_eps = kernels, heads, weights, norm_eps
        self.out = weights.out
        self.linears = (weights.project, weights.out)
        self.vectors = (weights.conv, weights.decay, weights.bias, weights.norm)
        self.tail = (weights.conv.shape[0] - 1, weights.conv.shape[1])
        self.memory = (heads.num_values, heads.key_dim, heads.value_dim)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made, columns = self._weights.project(x), self._weights.columns
        made = made if columns is None else made.index_select(1, columns)
        gate_at = self._heads.row_size
        gates_at = gate_at + self._heads.values_size
        inputs = torch.cat([made[:, :gate_at], made[:, gates_at:]], dim=1)  # [M, row_size + 2 * num_values]
        return inputs, made[:, gate_at:gates_at]

    def _advance(self, inputs: Tensor, state: LayerState, walk: Walk) -> Tensor:
        size, weights = self._heads.row_size, self._weights
        qkv = self._kernels.causal_conv(inputs[:, :size].contiguous(), weights.conv, state.tails, walk, silu=True)
        return self._kernels.gated_delta(
            qkv, inputs[:, size:].contiguous(), self._heads, weights.decay, weights.bias, state.memory, walk
        )

    def _leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        heads = mixed.view(-1, self._heads.value_dim)  # [R * num_values, value_dim]
        normed = self._kernels.rms_norm(heads, self._weights.norm, self._norm_eps).view(mixed.shape)
        left, order = self._kernels.gated_act(torch.cat([gate, normed], dim=1), "silu"), self._weights.order
        return self._weights.out(left if order is None else left.index_select(1, order))
