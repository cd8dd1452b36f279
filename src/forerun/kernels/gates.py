"""What the activations of feed-forward parts mean, in torch.

Knows: the formulas, what a row is that they take. Does not know: rows of a batch, who implements them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.ops import SQUARED_RELU


def inner_size(width: int, activation: str) -> int:
    """F, the entries of a row that an activation makes of `width`."""
    return width if activation == SQUARED_RELU else width // 2


def _clipped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """g * sigmoid(1.702 g) * (u + 1), where g is at most 7 and u within 7 of 0."""
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


def _bounded_swiglu(gate: Tensor, up: Tensor, bound: float) -> Tensor:
    """silu(gate), at most `bound`, times up, within `bound` of 0."""
    return functional.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)


GATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "clipped_swiglu": _clipped_swiglu,
    "sigmoid": lambda gate, up: torch.sigmoid(gate) * up,
    "silu_within_7": functools.partial(_bounded_swiglu, bound=7.0),
    "silu_within_16": functools.partial(_bounded_swiglu, bound=16.0),
    SQUARED_RELU: lambda x, _: x.clamp(min=0).square(),
}
