"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1) over a paged pool of latents.

Knows: its matrices, the latent layout, the rope table. Does not know: the batch, the pool's owner, the model.

**Absorbed form.** A head's key is U c and its value V c for the position's latent c. Since q . (U c) = (U^T q) . c and
the sum of p V c is V times the sum of p c, queries are brought into the latent space and mixtures out of it: the pool
keeps c and the rotated part of the key, once for all heads, and attention reads that alone. Without rope that part is
the same projection: it is rotated as at position 0, which changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows, HeadLayout, Kernels, LatentLayout, LayerKV
from forerun.layers.linear import HeadLinear, Linear, Matrix
from forerun.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class LatentShape:
    """How one layer computes, apart from its weights."""

    layout: LatentLayout
    scale: float
    norm_eps: float  # of the latent's norm
    window: int = 0  # no window: every visible position counts

    @property
    def heads(self) -> HeadLayout:
        """What the pool is told: one head, whose vectors are keys."""
        return HeadLayout(self.layout.num_heads, 1, self.layout.key_dim, self.layout.rope_dim)


class LowRank:
    """A matrix in two factors with a norm between them."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear) -> None:
        self.down = down
        self.norm = norm
        self.up = up

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, N]."""
        return self.up(self.norm(self.down(x)))


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The matrices of a layer. Heads of queries are [nope | rope], latents [latent | rope]."""

    query: Linear | LowRank  # H -> Q * (nope + rope)
    down: Linear  # H -> rank + rope
    norm: Tensor  # [rank] float32
    absorb: HeadLinear  # nope -> rank, a head's U transposed
    expand: HeadLinear  # rank -> value, a head's V
    out: Linear  # Q * value -> H


class LatentAttention:
    """Projections, rotation and cache write, attention over latents, projections back."""

    is_latent = True  # the pool keeps one vector a position

    def __init__(self, kernels: Kernels, shape: LatentShape, weights: LatentWeights, rope_table: Tensor) -> None:
        """rope_table [P, rope_dim]; [1, rope_dim] for attention without rope."""
        self._kernels = kernels
        self.shape = shape
        self.weights = weights
        self.rope_table = rope_table
        self._rotates = len(rope_table) > 1

    @property
    def out(self) -> Linear:
        """The output projection."""
        return self.weights.out

    @property
    def linears(self) -> tuple[Matrix, ...]:
        """Every matrix of the layer."""
        weights, query = self.weights, self.weights.query
        queries = (query.down, query.up) if isinstance(query, LowRank) else (query,)
        return (*queries, weights.down, weights.absorb, weights.expand, weights.out)

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The weights of the norms inside."""
        query = self.weights.query
        return (self.weights.norm, *((query.norm.weight,) if isinstance(query, LowRank) else ()))

    def store(self, x: Tensor, kv: LayerKV, positions: Tensor, slots: Tensor) -> Tensor:
        """Write the latents of x [M, H] to `slots` of `kv` -> rotated queries [M, Q * key_dim]."""
        shape, weights = self.shape, self.weights
        positions = positions if self._rotates else torch.zeros_like(positions)
        queries = weights.absorb(weights.query(x))  # [M, Q * key_dim]
        latents = weights.down(x)  # [M, key_dim]
        self._kernels.latent_rope_and_cache(
            queries, latents, shape.layout, self.rope_table, positions, slots, kv, weights.norm, shape.norm_eps
        )
        return queries

    def __call__(
        self, x: Tensor, kv: LayerKV, positions: Tensor, slots: Tensor, rows: AttentionRows, wanted: Tensor | None
    ) -> Tensor:
        """x [M, H] -> [M, H], or [R, H] of the rows `wanted` [R]; `store` is a part of it."""
        shape, weights, queries = self.shape, self.weights, self.store(x, kv, positions, slots)
        mixed = self._kernels.latent_attention(queries, shape.layout, kv, rows, shape.scale)  # [M, Q * rank]
        return weights.out(weights.expand(mixed if wanted is None else mixed.index_select(0, wanted)))
