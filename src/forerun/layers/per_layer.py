"""Per-layer inputs (Gemma 3n): every layer is given a small part of each token, beside the residual stream.

Knows: the table of parts, the projection beside it, how a layer takes its part in. Does not know: the layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.layers.embedding import Embedding
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The parts of all layers: a row of a table plus the norm of a projection of the token's embedding."""

    table: Embedding  # [V, L * P]
    projection: Linear  # [L * P, H]
    norm: RMSNorm  # of one layer's part
    num_layers: int  # L

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> tuple[Tensor, ...]:
        """token_ids [M], embedded [M, H] -> [M, P] for each layer."""
        made = self.projection(embedded).chunk(self.num_layers, dim=1)
        stored = self.table(token_ids).chunk(self.num_layers, dim=1)
        return tuple(self.norm(a.contiguous()).add_(b) for a, b in zip(made, stored, strict=True))


@dataclass(frozen=True, slots=True)
class PerLayerBlock:
    """norm(out(act(gate(x)) * part)), which is added to the stream x at the end of a layer."""

    kernels: Kernels
    place: int  # whose part it is
    gate: Linear  # [P, H]
    out: Linear  # [H, P]
    norm: RMSNorm
    activation: str

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix."""
        return (self.gate, self.out)

    def __call__(self, x: Tensor, part: Tensor) -> Tensor:
        """x [M, H], part [M, P] -> [M, H]."""
        gated = self.kernels.gated_act(torch.cat([self.gate(x), part], dim=1), self.activation)  # [M, P]
        return self.norm(self.out(gated))
