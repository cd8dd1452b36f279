"""A layer of gated delta nets: a short convolution and the gated delta rule in place of attention.

Knows: its matrices, the order of its ops. Does not know: requests, who owns slots.
Source: Gated Delta Networks (2412.06464) and transformers modeling_qwen3_next.py; with a gate for each channel of keys,
Kimi Linear (2510.26692) and modeling_kimi_linear.py.
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
class LowRankGates:
    """The matrices into the output's gate and into a, where `project` gives what both are made of instead of them."""

    gate: Linear  # [values_size, rank]
    forget: Linear  # [num_decays, rank]


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Everything learned. `project` gives queries, keys, values, the output's gate, then b and a of every head."""

    project: Linear  # [row_size + values_size + num_values + num_decays, H], with `low_rank` [.. + rank + .. + rank, H]
    columns: Tensor | None  # [outputs] int64: where each of these is found, if they are stored in another order
    conv: Tensor  # [taps, row_size] float32
    decay: Tensor  # [num_decays] float32: -exp(A_log)
    bias: Tensor  # [num_decays] float32
    norm: Tensor  # [value_dim] float32
    out: Linear  # [H, values_size]
    order: Tensor | None = None  # [values_size] int64: which values `out`'s columns are for; None: each for its own
    low_rank: LowRankGates | None = None
    activation: str = "silu"  # of the output's gate


class GatedDeltaNet(Recurrent):
    """Projection, convolution, the delta rule, a gated norm, output projection."""

    def __init__(self, kernels: Kernels, heads: DeltaHeads, weights: DeltaWeights, norm_eps: float) -> None:
        self._kernels, self._heads, self._weights, self._norm_eps = kernels, heads, weights, norm_eps
        self.out = weights.out
        low_rank = weights.low_rank
        gates = () if low_rank is None else (low_rank.gate, low_rank.forget)
        self.linears = (weights.project, *gates, weights.out)
        made = (heads.values_size, len(weights.decay)) if low_rank is None else (low_rank.gate.weight.shape[1],) * 2
        self._parts = [heads.row_size, made[0], heads.num_values, made[1]]  # of what `project` gives
        stored = weights.decay[:: len(weights.decay) // heads.num_values]  # one a head, repeated for channels
        self.vectors = (weights.conv, stored, weights.bias, weights.norm)
        self.tail = (weights.conv.shape[0] - 1, weights.conv.shape[1])
        self.memory = (heads.num_values, heads.key_dim, heads.value_dim)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made, columns = self._weights.project(x), self._weights.columns
        made = made if columns is None else made.index_select(1, columns)
        qkv, gate, write, forget = torch.split(made, self._parts, dim=1)
        if (low_rank := self._weights.low_rank) is not None:
            gate, forget = low_rank.gate(gate.contiguous()), low_rank.forget(forget.contiguous())
        return torch.cat([qkv, write, forget], dim=1), gate  # [M, row_size + num_values + num_decays], [M, values_size]

    def _advance(self, inputs: Tensor, state: LayerState, walk: Walk) -> Tensor:
        size, weights = self._heads.row_size, self._weights
        qkv = self._kernels.causal_conv(inputs[:, :size].contiguous(), weights.conv, state.tails, walk, silu=True)
        return self._kernels.gated_delta(
            qkv, inputs[:, size:].contiguous(), self._heads, weights.decay, weights.bias, state.memory, walk
        )

    def _leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        heads, weights = mixed.view(-1, self._heads.value_dim), self._weights  # [R * num_values, value_dim]
        normed = self._kernels.rms_norm(heads, weights.norm, self._norm_eps).view(mixed.shape)
        left = self._kernels.gated_act(torch.cat([gate, normed], dim=1), weights.activation)
        return weights.out(left if weights.order is None else left.index_select(1, weights.order))
