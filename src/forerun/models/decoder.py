"""The one decoder all native families share: attention and feed-forward layers between residual additions.

Knows: the order of ops in a forward pass. Does not know: families, storage formats, files, who called.

The pass is a straight line of kernel calls that looks at no row count (except for a prefill chunk without logits), so
that a backend may record it once and replay it. In the last layer what follows attention is computed for the rows whose
logits are wanted, and if there are none, nothing but keys and values: nobody reads the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.layers.attention import Attention
from forerun.layers.embedding import Embedding
from forerun.layers.linear import Linear, Matrix
from forerun.layers.mla import LatentAttention
from forerun.layers.norm import RMSNorm
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


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Each norm also does the residual addition before it."""

    attention_norm: RMSNorm
    attention: Attention | LatentAttention
    mlp_norm: RMSNorm
    mlp: FeedForward

    def __call__(
        self, x: Tensor, residual: Tensor, batch: ForwardBatch, kv: LayerKV, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [M, H] normalised by attention_norm, residual [M, H] -> the layer's last addend and the residual stream.

        Both are [M, H], or [R, H] of the rows `wanted` [R]. The residual may be added to in place.
        """
        x = self.attention(x, kv, batch.positions, batch.slots, batch.rows, wanted)
        residual = residual if wanted is None else residual.index_select(0, wanted)
        x = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Everything a decoder is made of."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: RMSNorm
    lm_head: Linear
    tie_embeddings: bool


class Decoder:
    """A causal decoder over the paged pool. Implements `models.base.Model`."""

    def __init__(self, parts: DecoderParts, max_position: int, kv_dtype: torch.dtype) -> None:
        """`max_position`: rows of the rope tables the layers hold."""
        self.parts = parts
        self.max_position = max_position
        self.vocab_size, self.hidden_size = parts.embedding.shape
        self.device = parts.final_norm.weight.device
        self.kv_specs = tuple(_kv_spec(layer, kv_dtype) for layer in parts.layers)
        self.weight_bytes = _count_bytes(parts)
        self.num_parameters = _count_parameters(parts)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`."""
        assert len(kvs) == len(self.parts.layers), (len(kvs), len(self.parts.layers))
        batch, hidden = batch.on(self.device), dict[int, Tensor]()
        residual = self.parts.embedding(batch.token_ids)  # [M, H]
        x = self.parts.layers[0].attention_norm(residual)
        *layers, last = self.parts.layers
        for index, layer in enumerate(layers):
            _keep(hidden, hidden_layers, index, residual)
            x, residual = layer(x, residual, batch, kvs[index])
            x = self.parts.layers[index + 1].attention_norm.add(x, residual)
        _keep(hidden, hidden_layers, len(layers), residual)
        shown = any(index > len(layers) for index in hidden_layers)
        wanted = None if shown or batch.all_logits else batch.logit_rows
        if wanted is not None and wanted.shape[0] == 0:
            last.attention.store(x, kvs[-1], batch.positions, batch.slots)
            return PassOutput(x.new_empty(0, self.vocab_size), hidden)
        x, residual = last(x, residual, batch, kvs[-1], wanted)
        x = self.parts.final_norm.add(x, residual)
        _keep(hidden, hidden_layers, len(layers) + 1, residual)
        _keep(hidden, hidden_layers, len(layers) + 2, x)
        if shown and not batch.all_logits:
            x = x.index_select(0, batch.logit_rows)  # [R, H]
        return PassOutput(self.parts.lm_head(x) if x.shape[0] else x.new_empty(0, self.vocab_size), hidden)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """All state is in the pool: nothing to do."""

    def release(self, request_id: str) -> None:
        """All state is in the pool: nothing to do."""


def _keep(hidden: dict[int, Tensor], wanted: Sequence[int], index: int, state: Tensor) -> None:
    """Copy a state if it is asked for, as the next layer adds to the residual stream in place."""
    if index in wanted:
        hidden[index] = state.clone()  # [M, H]


def _kv_spec(layer: DecoderLayer, dtype: torch.dtype) -> LayerSpec:
    heads = layer.attention.shape.heads
    return LayerSpec(heads.num_kv, heads.head_dim, dtype, layer.attention.is_latent)


def _linears(parts: DecoderParts) -> list[Matrix]:
    layers = [linear for layer in parts.layers for linear in (*layer.attention.linears, *layer.mlp.linears)]
    return [*layers, parts.lm_head]


def _norm_tensors(parts: DecoderParts) -> list[Tensor]:
    tensors = [parts.final_norm.weight]
    for layer in parts.layers:
        tensors += [layer.attention_norm.weight, layer.mlp_norm.weight, *layer.attention.vectors]
    return tensors


def _count_bytes(parts: DecoderParts) -> int:
    linears = sum(linear.nbytes for linear in _linears(parts))
    return linears + sum(tensor.nbytes for tensor in _norm_tensors(parts)) + parts.embedding.nbytes


def _count_parameters(parts: DecoderParts) -> int:
    linears = sum(linear.num_parameters for linear in _linears(parts))
    table = 0 if parts.tie_embeddings else math.prod(parts.embedding.shape)
    return linears + table + sum(tensor.numel() for tensor in _norm_tensors(parts))
