"""The one decoder all native families share: attention and feed-forward layers between residual additions.

Knows: the order of ops in a forward pass. Does not know: families, storage formats, files, who called.

The pass is a straight line of kernel calls that looks at no row count (except for a prefill chunk without logits), so
that a backend may record it once and replay it. In the last layer what follows attention is computed for the rows whose
logits are wanted, and if there are none, nothing but keys and values: nobody reads the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.kernels.recurrent_ops import StateRows
from forerun.layers.attention import Attention
from forerun.layers.embedding import Embedding
from forerun.layers.linear import GatheredLinear, Linear, Matrix
from forerun.layers.mla import LatentAttention
from forerun.layers.moe import ExpertsBesideDense
from forerun.layers.norm import RMSNorm
from forerun.layers.per_layer import PerLayerBlock, PerLayerInputs
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

    mixes_rows: ClassVar[bool] = False  # it reads other rows of the batch besides their KV, see `Passes`

    attention_norm: RMSNorm | None
    attention: Attention | LatentAttention | Recurrent | None
    mlp_norm: RMSNorm | None
    mlp: FeedForward | None
    after_attention: RowFunction | None = None
    after_mlp: RowFunction | None = None
    parallel: bool = False  # the feed-forward part reads what attention reads
    beside: Recurrent | None = None  # reads what attention reads, and adds to what that gives
    per_layer: PerLayerBlock | None = None  # takes in the layer's part of each token, last
    at_end: RowFunction | None = None  # what becomes of the stream after all that
    shortcut: FeedForward | None = None  # reads what the feed-forward part reads; the next layer adds what it gives

    def enter(self, residual: Tensor) -> Tensor:
        """What the first part reads of the residual stream [M, H] -> [M, H]."""
        return residual if self.attention_norm is None else self.attention_norm(residual)

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: LayerCache, wanted: Tensor | None = None,
        parts: Sequence[Tensor] = (), held: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x, which the first part reads, and residual [M, H] -> the layer's last addend and the residual stream.

        Both are [M, H], or [R, H] of the rows `wanted` [R]; if these are none, only keys and values are computed. The
        residual may be added to in place. parts [M, P] are those of all layers, see `PerLayerInputs`. held: what the
        layer before has for this one to add, if anything, and then what this one has for the next.
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
        made = made if self.after_mlp is None else self.after_mlp(made)
        if held:
            made = made + _rows(held.pop(), wanted)
        if self.shortcut is not None and held is not None:
            held.append(self.shortcut(entered))
        return self._end(made, residual, wanted, parts)

    def _add(self, mixed: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """Add what attention gives to the residual stream -> what the feed-forward part reads."""
        if self.parallel:
            residual.add_(mixed)
            return x
        return add_norm(self.mlp_norm, mixed, residual)

    def _end(
        self, x: Tensor, residual: Tensor, wanted: Tensor | None, parts: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What follows the feed-forward part: nothing, in most families."""
        if self.per_layer is not None:
            residual.add_(x)
            x = self.per_layer(residual, _rows(parts[self.per_layer.place], wanted))
        return (x, residual) if self.at_end is None else (self.at_end(x), self.at_end(residual))

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

    @property
    def stores(self) -> bool:
        """Whether it leaves anything for later tokens."""
        return self.recurrent is not None or (self.attention is not None and _owner(self) is self.attention)

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


def _owner(layer: DecoderLayer) -> Attention | LatentAttention | None:
    """Whose keys and values the layer's attention reads; None: it does not attend."""
    if isinstance(layer.attention, Attention):
        return layer.attention.source or layer.attention
    return layer.attention if isinstance(layer.attention, LatentAttention) else None


def add_norm(norm: RMSNorm | None, x: Tensor, residual: Tensor) -> Tensor:
    """In place residual += x [M, H]; the norm of it, or itself where there is none -> [M, H]."""
    return residual.add_(x) if norm is None else norm.add(x, residual)


def run_layers(
    layers: Sequence[DecoderLayer], x: Tensor, residual: Tensor, batch: ForwardBatch, kvs: Sequence[LayerCache],
    wanted: Tensor | None, keep: Callable[[int, Tensor], None] | None = None, parts: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All layers, the first of which reads x; the others are as of `DecoderLayer`, `wanted` as of the last layer.

    keep(index, residual) is called before each layer.
    """
    assert len(kvs) == len(layers), (len(kvs), len(layers))
    held = list[Tensor]()
    for index, (layer, kv) in enumerate(zip(layers, kvs, strict=True)):
        x = x if index == 0 else add_norm(layer.attention_norm, x, residual)
        if keep is not None:
            keep(index, residual)
        x, residual = layer(x, residual, batch, kv, wanted if index == len(layers) - 1 else None, parts, held)
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
    per_layer: PerLayerInputs | None = None  # what layers are given beside the stream


class Decoder:
    """A causal decoder over the paged pool. Implements `models.base.Model`."""

    def __init__(self, parts: DecoderParts, max_position: int, kv_dtype: torch.dtype) -> None:
        """`max_position`: rows of the rope tables the layers hold.

        `kv_places` will say which of kv_specs each layer reads; None: it does not attend.
        """
        self.parts = parts
        self.num_layers = len(parts.layers)  # of the whole model; heads number hidden states by it
        self.max_position = max_position
        self.vocab_size, self.hidden_size = parts.embedding.shape
        self.device = parts.final_norm.weight.device
        self.mask_token_id: int | None = None  # see `models.base.GuessesSeveral`
        self.exchanges = any(isinstance(linear, GatheredLinear) for linear in _linears(parts))  # see `SharesPasses`
        owners = [_owner(layer) for layer in parts.layers]
        pooled = list(dict.fromkeys(owner for owner in owners if owner is not None))
        self.kv_specs = tuple(_kv_spec(attention, kv_dtype) for attention in pooled)
        self.kv_places = tuple(None if owner is None else pooled.index(owner) for owner in owners)
        self._num_storing = 1 + max((index for index, layer in enumerate(parts.layers) if layer.stores), default=0)
        self.weight_bytes = _count_bytes(parts)
        self.num_parameters = _count_parameters(parts)

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`."""
        return self._run(batch, self.pooled(kvs), hidden_layers)

    def pooled(self, kvs: Sequence[LayerKV]) -> list[LayerKV | None]:
        """What each layer reads of the pool, None where it does not attend."""
        return [None if place is None else kvs[place] for place in self.kv_places]

    @torch.no_grad()
    def _run(self, batch: ForwardBatch, caches: Sequence[LayerCache], hidden_layers: Sequence[int]) -> PassOutput:
        """`forward` over the cache of each layer."""
        batch = batch.on(self.device)
        with adapting(batch):
            return self._forward(batch, caches, hidden_layers)

    def _forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], hidden_layers: Sequence[int]) -> PassOutput:
        parts, hidden = self.parts, dict[int, Tensor]()
        num_layers = len(parts.layers)
        keep = partial(keep_state, hidden, hidden_layers)
        shown = any(index >= num_layers for index in hidden_layers)
        wanted = None if shown or batch.all_logits else batch.logit_rows
        residual = parts.embedding(batch.token_ids)  # [M, H]
        given = () if parts.per_layer is None else parts.per_layer(batch.token_ids, residual)
        is_silent = wanted is not None and wanted.shape[0] == 0 and not hidden_layers
        layers = parts.layers[: self._num_storing] if is_silent else parts.layers
        x = layers[0].enter(residual)
        x, residual = run_layers(layers, x, residual, batch, caches[: len(layers)], wanted, keep, given)
        return self._finish(x, residual, batch, hidden, hidden_layers, num_layers)

    def _finish(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, hidden: dict[int, Tensor],
        hidden_layers: Sequence[int], num_layers: int,
    ) -> PassOutput:  # fmt: skip
        """What follows the last of all `num_layers` layers, which gave x and residual [M or R, H]."""
        if residual.shape[0] == 0:
            return PassOutput(residual.new_empty(0, self.vocab_size), hidden)
        x = self.parts.final_norm.add(x, residual)
        keep_state(hidden, hidden_layers, num_layers, residual)
        keep_state(hidden, hidden_layers, num_layers + 1, x)
        if not batch.all_logits and any(index >= num_layers for index in hidden_layers):
            x = x.index_select(0, batch.logit_rows)  # [R, H]
        return PassOutput(self._logits(x) if x.shape[0] else x.new_empty(0, self.vocab_size), hidden)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.parts.lm_head(x)  # [R, V]
        return logits if self.parts.after_head is None else self.parts.after_head(logits)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """All state is in the pool: nothing to do."""

    def release(self, request_id: str) -> None:
        """All state is in the pool: nothing to do."""


def keep_state(hidden: dict[int, Tensor], wanted: Sequence[int], index: int, state: Tensor) -> None:
    """Copy a state if it is asked for, as the next layer adds to the residual stream in place."""
    if index in wanted:
        hidden[index] = state.clone()  # [M, H]


def _kv_spec(attention: Attention | LatentAttention, dtype: torch.dtype) -> LayerSpec:
    heads = attention.shape.heads
    return LayerSpec(heads.num_kv, heads.head_dim, dtype, attention.is_latent)


def _linears(parts: DecoderParts) -> list[Matrix]:
    mixers = [linear for layer in parts.layers for mixer in layer.mixers for linear in mixer.linears]
    feeding = [part for layer in parts.layers for part in (layer.mlp, layer.shortcut) if part is not None]
    mlps = [linear for part in feeding for linear in part.linears]
    ends = [linear for layer in parts.layers if layer.per_layer is not None for linear in layer.per_layer.linears]
    return [*mixers, *mlps, *ends, parts.lm_head, *(() if parts.per_layer is None else (parts.per_layer.projection,))]


def _norm_tensors(parts: DecoderParts) -> list[Tensor]:
    tensors = [parts.final_norm.weight]
    for layer in parts.layers:
        around = (layer.attention_norm, layer.after_attention, layer.mlp_norm, layer.after_mlp)
        tensors += [norm.weight for norm in around if isinstance(norm, RMSNorm)]
        tensors += [vector for mixer in layer.mixers for vector in mixer.vectors]
        tensors += layer.mlp.vectors if isinstance(layer.mlp, ExpertsBesideDense) else ()
        tensors += [] if layer.per_layer is None else [layer.per_layer.norm.weight]
    return tensors if parts.per_layer is None else [*tensors, parts.per_layer.norm.weight]


def tables_of(parts: DecoderParts) -> list[Embedding]:
    """The tables that a pass reads a few rows of."""
    return [parts.embedding] if parts.per_layer is None else [parts.embedding, parts.per_layer.table]


def _count_bytes(parts: DecoderParts) -> int:
    linears = sum(linear.nbytes for linear in _linears(parts))
    vectors = sum(tensor.nbytes for tensor in _norm_tensors(parts))
    return linears + vectors + sum(table.nbytes for table in tables_of(parts))


def _count_parameters(parts: DecoderParts) -> int:
    linears = sum(linear.num_parameters for linear in _linears(parts))
    tables = [math.prod(table.shape) for table in tables_of(parts)][1 if parts.tie_embeddings else 0 :]
    return linears + sum(tables) + sum(tensor.numel() for tensor in _norm_tensors(parts))
