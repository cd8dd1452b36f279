"""A layer of Mamba-2: a short convolution and a state space in place of attention.

Knows: its matrices, the order of its ops, that a norm may be over heads of several ranks. Does not know: requests, who
owns slots.
Source: Mamba-2 (2405.21060); transformers modeling_granitemoehybrid.py and modeling_falcon_h1.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.kernels.ranks import ALONE, Ranks
from forerun.kernels.recurrent_ops import DeltaHeads, LayerState, Walk
from forerun.layers.linear import Linear
from forerun.layers.recurrent import Recurrent


@dataclass(frozen=True, slots=True)
class MambaNorm:
    """The norm of a layer's outputs, of as many entries together as one group of heads has."""

    weight: Tensor  # [values_size] float32
    eps: float
    before_gate: bool  # else of what went through the gate
    size: int  # entries of a group
    ranks: Ranks = ALONE  # who have heads of one group; their values are gathered, and `weight` and `out` are of all


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Everything learned. `project` gives the gate, x, b, c and the steps; the convolution is stored by c, b and x."""

    project: Linear  # [values_size + row_size + num_values, H]
    factors: Tensor | None  # [outputs] float32: what these are multiplied with
    conv: Tensor  # [taps, row_size] float32
    conv_bias: Tensor | None  # [row_size] float32
    decay: Tensor  # [num_values] float32: -exp(A_log)
    bias: Tensor  # [num_values] float32
    skip: Tensor  # [num_values] float32
    norm: MambaNorm | None
    out: Linear  # [H, values_size]


class Mamba2(Recurrent):
    """Projection, convolution, state space, gate and norm, output projection."""

    def __init__(self, kernels: Kernels, heads: DeltaHeads, weights: MambaWeights, out_factor: float = 1.0) -> None:
        """`heads`: groups of b and c as heads of keys. out_factor: of what the layer gives."""
        self._kernels, self._heads, self._weights, self._out_factor = kernels, heads, weights, out_factor
        self.out = weights.out
        self.linears = (weights.project, weights.out)
        own = (weights.conv, weights.conv_bias, weights.decay, weights.bias, weights.skip)
        norm = () if weights.norm is None else (weights.norm.weight,)
        self.vectors = (*(tensor for tensor in own if tensor is not None), *norm)
        self.tail = (weights.conv.shape[0] - 1, weights.conv.shape[1])
        self.memory = (heads.num_values, heads.key_dim, heads.value_dim)
        self._ones = torch.ones(0 if weights.norm is None else weights.norm.size, device=weights.conv.device)

    def _enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made, heads = self._weights.project(x), self._heads
        made = made if self._weights.factors is None else made.mul_(self._weights.factors)
        size, keys = heads.values_size, heads.num_keys * heads.key_dim
        gate, values, b, c, steps = torch.split(made, [size, size, keys, keys, heads.num_values], dim=1)
        return torch.cat([c, b, values, steps], dim=1), gate

    def _advance(self, inputs: Tensor, state: LayerState, walk: Walk) -> Tensor:
        heads, weights = self._heads, self._weights
        mixed, steps = inputs[:, : heads.row_size].contiguous(), inputs[:, heads.row_size :].contiguous()
        rows = self._kernels.causal_conv(mixed, weights.conv, state.tails, walk, True, weights.conv_bias)
        return self._kernels.mamba2(rows, steps, heads, weights.decay, weights.bias, weights.skip, state.memory, walk)

    def _leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        norm = self._weights.norm
        if norm is not None and norm.before_gate:
            mixed, gate = self._normed(mixed, norm), norm.ranks.gather(gate)
        mixed = self._kernels.gated_act(torch.cat([gate, mixed], dim=1), "silu")  # [R, values_size]
        mixed = self._normed(mixed, norm) if norm is not None and not norm.before_gate else mixed
        made = self._weights.out(mixed)
        return made if self._out_factor == 1 else self._kernels.scaled(made, self._out_factor)

    def _normed(self, mixed: Tensor, norm: MambaNorm) -> Tensor:
        mixed = norm.ranks.gather(mixed)
        groups = mixed.view(-1, norm.size)  # [R * num_keys, entries of a group]
        return self._kernels.rms_norm(groups, self._ones, norm.eps).view(mixed.shape).mul_(norm.weight)
