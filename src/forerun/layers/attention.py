"""Paged grouped-query attention with rotary positions.

Knows: its matrices, head layout, window and rope table. Does not know: the batch, the pool's owner, the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.ops import AttentionRows, HeadLayout, Kernels, LayerKV
from forerun.layers.linear import HeadLinear, Linear
from forerun.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How one attention layer computes, apart from its weights."""

    heads: HeadLayout
    scale: float
    window: int = 0  # 0: every visible key counts
    norm_eps: float = 0.0  # of the q and k norms
    chunk: int = 0  # positions that see only each other; 0: there are no chunks
    cap: float = 0.0  # scores are bounded softly by it; 0: not
    gated: bool = False  # each query head's rows in `qkv` are followed by those of a gate over its output
    value_dim: int = 0  # entries of a value head that are not zeros behind it; 0: all


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query and each key head."""

    query: Tensor  # [D] float32
    key: Tensor | None  # [D] float32; None: keys are another layer's
    is_unit: bool = False  # all ones, which a model does not store


@dataclass(frozen=True, slots=True)
class NormedProjections:
    """q, k and v by matrices of their own, with a norm over all query heads together and one over all key heads."""

    query: Linear
    key: Linear
    value: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    own: tuple[slice, slice] | None = None  # of all queries and keys those of this rank's heads; None: all

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix."""
        return (self.query, self.key, self.value)

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The weights of the norms."""
        return (self.query_norm.weight, self.key_norm.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, row_size]."""
        query, key = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        if self.own is not None:
            query, key = query[:, self.own[0]], key[:, self.own[1]]
        return torch.cat([query, key, self.value(x)], dim=1)


@dataclass(frozen=True, slots=True)
class NormedValues:
    """q, k and v by matrices of their own; each value head is divided by its root mean square."""

    query: Linear
    key: Linear
    value: Linear | None  # None: values are what the key's matrix gives
    norm: RMSNorm  # of one head, whose weight is all ones
    num_kv: int
    vectors = ()  # that a model stores

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix."""
        return (self.query, self.key) if self.value is None else (self.query, self.key, self.value)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, row_size]."""
        keys = self.key(x)  # [M, G * D]
        values = (keys if self.value is None else self.value(x)).chunk(self.num_kv, dim=1)
        return torch.cat([self.query(x), keys, *(self.norm(head.contiguous()) for head in values)], dim=1)


class NarrowValues:
    """q, k and v by matrices of their own; value heads are smaller than key heads, and are filled up with zeros."""

    vectors = ()  # that a model stores

    def __init__(
        self, query: Linear, key: Linear, value: Linear, shape: AttentionShape, device: torch.device
    ) -> None:  # fmt: skip
        """`value` [G * value_dim, H]."""
        self.linears = (query, key, value)
        self._size = shape.heads.num_kv * shape.heads.head_dim
        self._places = _places(shape.heads.num_kv, shape.heads.head_dim, shape.value_dim).to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, row_size]."""
        query, key, value = (linear(x) for linear in self.linears)
        filled = value.new_full([value.shape[0], self._size], 0.0)
        return torch.cat([query, key, filled.index_copy_(1, self._places, value)], dim=1)


class Attention:
    """qkv projection, rotation and cache write, attention, output projection."""

    is_latent = False  # keys and values lie in the pool

    def __init__(
        self, kernels: Kernels, shape: AttentionShape,
        qkv: Linear | NormedProjections | NormedValues | NarrowValues, out: Linear, rope_table: Tensor,
        norms: HeadNorms | None = None, sinks: Tensor | None = None, source: Attention | None = None,
        head_gate: Linear | None = None,
    ) -> None:  # fmt: skip
        """`qkv` [row_size, H]: q, k, v rows in order, more if `shape` is gated; `out` [H, Q * D]; `sinks` [Q].

        rope_table [P, rotary_dim]. source: an earlier layer, whose keys and values this one reads; `qkv` then makes
        queries alone. head_gate [Q, H]: what each query head's output is weighed by, through a sigmoid.
        """
        self._kernels = kernels
        self.shape = shape
        self.qkv = qkv
        self.out = out
        self.rope_table = rope_table
        self.norms = norms
        self.sinks = sinks
        self.source = source
        self.head_gate = head_gate
        self._spread = None if head_gate is None else _spread(kernels, shape.heads, rope_table.device)
        self._order = _narrow_first(shape, rope_table.device) if shape.value_dim else None
        self._made = shape.heads if source is None else shape.heads._replace(num_kv=0)  # by `qkv`

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""
        gates = () if self.head_gate is None else (self.head_gate,)
        return (*((self.qkv,) if isinstance(self.qkv, Linear) else self.qkv.linears), self.out, *gates)

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """The weights of the norms inside, and the sinks."""
        norms = () if self.norms is None or self.norms.is_unit else (self.norms.query, self.norms.key)
        inner = () if isinstance(self.qkv, Linear) else self.qkv.vectors
        return tuple(vector for vector in (*norms, *inner, self.sinks) if vector is not None)

    def store(self, x: Tensor, kv: LayerKV, positions: Tensor, slots: Tensor) -> Tensor:
        """Write the keys and values of x [M, H] to `slots` of `kv` -> [M, row_size], the rotated queries first."""
        return self._store(self._project(x)[0], kv, positions, slots)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [M, H] -> queries, keys and values [M, row_size], and the gate [M, Q * D] if there is one."""
        made, heads = self.qkv(x), self.shape.heads
        if self.head_gate is not None and self._spread is not None:
            return made, self._spread(self.head_gate(x))
        if not self.shape.gated:
            return made, None
        size = 2 * heads.num_q * heads.head_dim
        pairs = made[:, :size].reshape(-1, heads.num_q, 2, heads.head_dim)
        return torch.cat([pairs[:, :, 0].flatten(1), made[:, size:]], dim=1), pairs[:, :, 1].flatten(1)

    def _store(self, qkv: Tensor, kv: LayerKV, positions: Tensor, slots: Tensor) -> Tensor:
        shape, norms = self.shape, self.norms
        self._kernels.rope_and_cache(
            qkv,
            self._made,
            self.rope_table,
            positions,
            slots,
            kv,
            q_norm=None if norms is None else norms.query,
            k_norm=None if norms is None else norms.key,
            eps=shape.norm_eps,
        )
        return qkv

    def __call__(
        self, x: Tensor, kv: LayerKV, positions: Tensor, slots: Tensor, rows: AttentionRows, wanted: Tensor | None
    ) -> Tensor:
        """x [M, H] -> [M, H], or [R, H] of the rows `wanted` [R]; `store` is a part of it."""
        shape, (projected, gate) = self.shape, self._project(x)
        qkv = self._store(projected, kv, positions, slots)
        mixed = self._kernels.attention(
            qkv, shape.heads, kv, rows, shape.scale, shape.window, shape.chunk, self.sinks, shape.cap
        )  # [M, Q * D]
        if gate is not None:
            mixed = self._kernels.gated_act(torch.cat([gate, mixed], dim=1), "sigmoid")
        mixed = mixed if wanted is None else mixed.index_select(0, wanted)
        return self.out(mixed if self._order is None else self._narrow(mixed, self._order))

    def _narrow(self, mixed: Tensor, order: Tensor) -> Tensor:
        """mixed [M, Q * D] without what stands for the zeros behind values -> [M, Q * value_dim]."""
        size, own = self.shape.heads.head_dim, self.shape.value_dim
        sorted_ = mixed.new_full(mixed.shape, 0.0).index_copy_(1, order, mixed)  # these at the end
        run = math.gcd(size, own)
        return torch.cat(sorted_.chunk(size // run, dim=1)[: own // run], dim=1)


def _spread(kernels: Kernels, heads: HeadLayout, device: torch.device) -> HeadLinear:
    """Repeats a number of each query head over its entries: [M, Q] -> [M, Q * D].

    One product a head: in a matrix over all heads an infinite number times the zeros of the others would be NaN there.
    Ones of two bytes: on GPUs float32 is multiplied in parts, of which two of a one are zeros.
    """
    return HeadLinear(kernels, torch.ones(heads.num_q, heads.head_dim, 1, dtype=torch.bfloat16, device=device))


def _places(num_heads: int, head_dim: int, num: int) -> Tensor:
    """Where the first `num` entries of each head are among all -> [num_heads * num] int64."""
    return (torch.arange(num_heads)[:, None] * head_dim + torch.arange(num)).flatten()


def _narrow_first(shape: AttentionShape, device: torch.device) -> Tensor:
    """New columns for those of all heads: values' own entries, then the others -> [Q * D] int64."""
    heads, own = shape.heads, shape.value_dim
    first, entries = torch.arange(heads.num_q)[:, None], torch.arange(heads.head_dim)
    behind = heads.num_q * own + first * (heads.head_dim - own) + entries - own
    return torch.where(entries < own, first * own + entries, behind).flatten().to(device)
