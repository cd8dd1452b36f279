"""The one decoder all native families share: attention and feed-forward layers between residual additions.

Knows: the order of ops in a forward pass. Does not know: families, storage formats, files, who called.

The pass is a straight line of kernel calls that looks at no row count (except for a prefill chunk without logits), so
that a backend may record it once and replay it. In the last layer what follows attention is computed for the rows whose
logits are wanted, and if there are none, nothing but keys and values: nobody reads the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.kernels.recurrent_ops import StateRows
from forerun.layers.attention import Attention
from forerun.layers.embedding import Embedding
from forerun.layers.linear import Linear, Matrix
from forerun.layers.mla import LatentAttention
from forerun.layers.norm import RMSNorm
from forerun.layers.recurrent import Recurrent
from forerun.models.adapted import adapting
from forerun.models.base import CommittedPath, LayerSpec, PassOutput
from forerun.models.batch import ForwardBatch


class FeedForward(Protocol):
    """What follows attention in a layer: dense or a mixture of experts."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Every matrix of the layer."""

    def bytes_read(self, num_rows: int) -> int:
        """Bytes of matrices that a pass over `num_rows` rows reads at most."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, H] -> [M, H]."""


RowFunction = Callable[[Tensor], Tensor]  # [M, H] -> [M, H], row by row


class BothCaches(NamedTuple):
    """What a layer whose attention has a recurrent part beside it knows of the tokens before its rows."""

    kv: LayerKV
    states: StateRows


LayerCache = LayerKV | StateRows | BothCaches | None  # what a layer knows of the tokens before its rows


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and a feed-forward part, each added to the residual stream. One of the two may be missing.

    What a part reads is the stream through a norm, or as it is where there is none; what it gives may be changed before
    it is added. Adding waits for the next norm, which does both.
    """

    attention_norm: RMSNorm | None
    attention: Attention | LatentAttention | Recurrent | None
    mlp_norm: RMSNorm | None
    mlp: FeedForward | None
    after_attention: RowFunction | None = None
    after_mlp: RowFunction | None = None
    parallel: bool = False  # the feed-forward part reads what attention reads
    beside: Recurrent | None = None  # reads what attention reads, and adds to what that gives

    def enter(self, residual: Tensor) -> Tensor:
        """What the first part reads of the residual stream [M, H] -> [M, H]."""
        return residual if self.attention_norm is None else self.attention_norm(residual)

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: LayerCache, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, which the first part reads, and residual [M, H] -> the layer's last addend and the residual stream.

        Both are [M, H], or [R, H] of the rows `wanted` [R]; if these are none, only keys and values are computed. The
        residual may be added to in place.
        """
        if wanted is not None and wanted.shape[0] == 0:
            self._store(x, batch, kv)
            return residual[:0], residual[:0]
        residual, entered = _rows(residual, wanted), x
        if self.attention is None or self.parallel:
            entered = _rows(x, wanted)
        if self.attention is not None:
            mixed = self._mix(x, batch, kv, wanted)
            if self.mlp is None:
                return mixed, residual
            entered = self._add(mixed, entered, residual)
        assert self.mlp is not None
        made = self.mlp(entered)
        return made if self.after_mlp is None else self.after_mlp(made), residual

    def _add(self, mixed: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """Add what attention gives to the residual stream -> what the feed-forward part reads."""
        if self.parallel:
            residual.add_(mixed)
            return x
        return add_norm(self.mlp_norm, mixed, residual)

    @property
    def attending(self) -> Attention | LatentAttention:
        """The attention of a layer that has one, and is not recurrent."""
        assert isinstance(self.attention, Attention | LatentAttention)
        return self.attention

    @property
    def recurrent(self) -> Recurrent | None:
        """The part that keeps a state, in place of attention or beside it."""
        return self.attention if isinstance(self.attention, Recurrent) else self.beside

    @property
    def mixers(self) -> tuple[Attention | LatentAttention | Recurrent, ...]:
        """Attention and what is beside it."""
        return tuple(mixer for mixer in (self.attention, self.beside) if mixer is not None)

    def _mix(self, x: Tensor, batch: ForwardBatch, kv: LayerCache, wanted: Tensor | None) -> Tensor:
        """What attention and what is beside it give, [R, H] of the rows `wanted`."""
        if isinstance(self.attention, Recurrent):
            mixed = self.attention(x, states_in(kv), wanted)
        else:
            mixed = self.attending(x, pooled_in(kv), batch.positions, batch.slots, batch.rows, wanted)
        mixed = mixed if self.after_attention is None else self.after_attention(mixed)
        return mixed if self.beside is None else mixed + self.beside(x, states_in(kv), wanted)

    def _store(self, x: Tensor, batch: ForwardBatch, kv: LayerCache) -> None:
        if self.recurrent is not None:
            self.recurrent.store(x, states_in(kv))
        if isinstance(self.attention, Attention | LatentAttention):
            self.attention.store(x, pooled_in(kv), batch.positions, batch.slots)


def _rows(x: Tensor, wanted: Tensor | None) -> Tensor:
    return x if wanted is None else x.index_select(0, wanted)


def states_in(cache: LayerCache) -> StateRows:
    """The rows' states, of a layer with a recurrent part."""
    assert isinstance(cache, StateRows | BothCaches)
    return cache.states if isinstance(cache, BothCaches) else cache


def pooled_in(cache: LayerCache) -> LayerKV:
    """The layer's share of the pool, of a layer that attends."""
    assert isinstance(cache, LayerKV | BothCaches)
    return cache.kv if isinstance(cache, BothCaches) else cache


def add_norm(norm: RMSNorm | None, x: Tensor, residual: Tensor) -> Tensor:
    """In place residual += x [M, H]; the norm of it, or itself where there is none -> [M, H]."""
    return residual.add_(x) if norm is None else norm.add(x, residual)


def run_layers(
    layers: Sequence[DecoderLayer], x: Tensor, residual: Tensor, batch: ForwardBatch, kvs: Sequence[LayerCache],
    wanted: Tensor | None, keep: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All layers, the first of which reads x; the others are as of `DecoderLayer`, `wanted` as of the last layer.

    keep(index, residual) is called before each layer.
    """
    assert len(kvs) == len(layers), (len(kvs), len(layers))
    for index, (layer, kv) in enumerate(zip(layers, kvs, strict=True)):
        x = x if index == 0 else add_norm(layer.attention_norm, x, residual)
        if keep is not None:
            keep(index, residual)
        x, residual = layer(x, residual, batch, kv, wanted if index == len(layers) - 1 else None)
    return x, residual


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Everything a decoder is made of."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: RMSNorm
    lm_head: Linear
    tie_embeddings: bool
    after_head: RowFunction | None = None  # what becomes of logits


class Decoder:
    """A causal decoder over the paged pool. Implements `models.base.Model`."""

    def __init__(self, parts: DecoderParts, max_position: int, kv_dtype: torch.dtype) -> None:
        """`max_position`: rows of the rope tables the layers hold."""
        self.parts = parts
        self.max_position = max_position
        self.vocab_size, self.hidden_size = parts.embedding.shape
        self.device = parts.final_norm.weight.device
        self.kv_specs = tuple(_kv_specs(parts.layers, kv_dtype))
        self.weight_bytes = _count_bytes(parts)
        self.num_parameters = _count_parameters(parts)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerCache], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`."""
        batch = batch.on(self.device)
        with adapting(batch):
            return self._forward(batch, kvs, hidden_layers)

    def _forward(self, batch: ForwardBatch, kvs: Sequence[LayerCache], hidden_layers: Sequence[int]) -> PassOutput:
        parts, hidden = self.parts, dict[int, Tensor]()
        num_layers = len(parts.layers)
        keep = partial(_keep, hidden, hidden_layers)
        shown = any(index >= num_layers for index in hidden_layers)
        wanted = None if shown or batch.all_logits else batch.logit_rows
        residual = parts.embedding(batch.token_ids)  # [M, H]
        x, residual = run_layers(parts.layers, parts.layers[0].enter(residual), residual, batch, kvs, wanted, keep)
        if residual.shape[0] == 0:
            return PassOutput(residual.new_empty(0, self.vocab_size), hidden)
        x = parts.final_norm.add(x, residual)
        keep(num_layers, residual)
        keep(num_layers + 1, x)
        if shown and not batch.all_logits:
            x = x.index_select(0, batch.logit_rows)  # [R, H]
        return PassOutput(self._logits(x) if x.shape[0] else x.new_empty(0, self.vocab_size), hidden)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.parts.lm_head(x)  # [R, V]
        return logits if self.parts.after_head is None else self.parts.after_head(logits)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """All state is in the pool: nothing to do."""

    def release(self, request_id: str) -> None:
        """All state is in the pool: nothing to do."""


def _keep(hidden: dict[int, Tensor], wanted: Sequence[int], index: int, state: Tensor) -> None:
    """Copy a state if it is asked for, as the next layer adds to the residual stream in place."""
    if index in wanted:
        hidden[index] = state.clone()  # [M, H]


def _kv_specs(layers: Sequence[DecoderLayer], dtype: torch.dtype) -> Iterator[LayerSpec]:
    for attention in (layer.attention for layer in layers):
        if isinstance(attention, Attention | LatentAttention):
            heads = attention.shape.heads
            yield LayerSpec(heads.num_kv, heads.head_dim, dtype, attention.is_latent)


def _linears(parts: DecoderParts) -> list[Matrix]:
    mixers = [linear for layer in parts.layers for mixer in layer.mixers for linear in mixer.linears]
    mlps = [linear for layer in parts.layers if layer.mlp is not None for linear in layer.mlp.linears]
    return [*mixers, *mlps, parts.lm_head]


def _norm_tensors(parts: DecoderParts) -> list[Tensor]:
    tensors = [parts.final_norm.weight]
    for layer in parts.layers:
        around = (layer.attention_norm, layer.after_attention, layer.mlp_norm, layer.after_mlp)
        tensors += [norm.weight for norm in around if isinstance(norm, RMSNorm)]
        tensors += [vector for mixer in layer.mixers for vector in mixer.vectors]
    return tensors


def _count_bytes(parts: DecoderParts) -> int:
    linears = sum(linear.nbytes for linear in _linears(parts))
    return linears + sum(tensor.nbytes for tensor in _norm_tensors(parts)) + parts.embedding.nbytes


def _count_parameters(parts: DecoderParts) -> int:
    linears = sum(linear.num_parameters for linear in _linears(parts))
    table = 0 if parts.tie_embeddings else math.prod(parts.embedding.shape)
    return linears + table + sum(tensor.numel() for tensor in _norm_tensors(parts))
