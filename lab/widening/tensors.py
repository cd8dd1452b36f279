"""The tensors of a widened model, one after the other.

Knows: which tensors a family has, which new entries may hold anything and which must be zero. Does not know: files.

Why the function stays the same: the new coordinates of the residual stream are zero after the embedding (its new
columns are zero) and stay so, because every layer's last matrices (`out`, `down`) have zero rows there. New heads and
new feed-forward units compute something and are multiplied by zero columns of `out` and `down`; new layers have `out`
and `down` of zeros altogether. All other new entries are random, of ordinary size. An RMS norm divides by the root of
a mean over more coordinates, so its weights are divided by sqrt(new / old), and eps is multiplied by old / new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.bench.synthetic import PERIOD, tiled
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.weights.checkpoint import Checkpoint
from widening.sizes import Axis, Sizes, appended, head_axes, is_exact, joined

SEED = 0
NORM_SPREAD = 0.1


class TensorPiece(NamedTuple):
    """One tensor of the widened model, made when it is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Spread:
    """A checkpoint's tensors among new entries, as the hidden size grows."""

    def __init__(self, checkpoint: Checkpoint, old_hidden: int, new_hidden: int, like: str) -> None:
        """`like`: a stored tensor whose precision new tensors get."""
        self._checkpoint, self._like = checkpoint, like
        self._hidden = appended(old_hidden, new_hidden)
        self._factor = math.sqrt(new_hidden / old_hidden)
        self._exact = is_exact(old_hidden, new_hidden)
        self._random = torch.randn(PERIOD, generator=torch.Generator().manual_seed(SEED))  # [PERIOD]

    def _piece(self, name: str, axes: tuple[Axis, ...], free: bool) -> TensorPiece:
        """A tensor whose new entries are random if `free`, else zero."""
        dtype = self._dtype(name, axes[0])
        make = partial(self._spread, name, axes, dtype, free)
        return TensorPiece(name, tuple(axis.size for axis in axes), dtype, make)

    def _spread(self, name: str, axes: tuple[Axis, ...], dtype: torch.dtype, free: bool) -> Tensor:
        shape = tuple(axis.size for axis in axes)
        scale = 1 / math.sqrt(shape[-1])  # keeps the size of what a matrix multiplies
        tensor = self._noise(name, shape, scale, dtype) if free else torch.zeros(shape, dtype=dtype)
        if all(axis.old_size for axis in axes):
            old = self._checkpoint.tensor(name, tuple(axis.old_size for axis in axes))
            tensor[_grid([axis.kept for axis in axes])] = old[_grid([axis.origin[axis.kept] for axis in axes])]
        return tensor

    def _norm(self, name: str, axis: Axis) -> TensorPiece:
        dtype = self._dtype(name, axis) if self._exact else torch.float32
        return TensorPiece(name, (axis.size,), dtype, partial(self._widened_norm, name, axis, dtype))

    def _widened_norm(self, name: str, axis: Axis, dtype: torch.dtype) -> Tensor:
        """Weights over the factor; those of coordinates that are zero anyway are random."""
        weight = 1 + self._noise(name, (axis.size,), NORM_SPREAD, torch.float64)  # [H]
        if axis.old_size:
            weight[axis.kept] = self._checkpoint.tensor(name, (axis.old_size,)).double()[axis.origin[axis.kept]]
        return (weight / self._factor).to(dtype)

    def _dtype(self, name: str, axis: Axis) -> torch.dtype:
        """As stored; new tensors like the one named."""
        return self._checkpoint.dtype(name if axis.old_size else self._like)

    def _noise(self, name: str, shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> Tensor:
        """Random numbers, the same in every run for a name, without denormals."""
        start = sum(name.encode()) * 7919 % PERIOD
        return tiled((self._random.roll(start) * scale).to(dtype), shape)


class Widening(Spread):
    """A model's checkpoint and the sizes it grows to."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, family: Family, sizes: Sizes) -> None:
        old = Sizes.of(config)
        super().__init__(checkpoint, old.hidden_size, sizes.hidden_size, f"{family.names.embedding}.weight")
        self._config, self._names, self._sizes = config, family.names, sizes
        self._ffn = appended(old.ffn_size, sizes.ffn_size)
        self._query, self._key = head_axes(old, sizes, config.heads.head_dim)

    def pieces(self) -> Iterator[TensorPiece]:
        """Every tensor, in the order of the model."""
        vocabulary = appended(self._config.vocab_size, self._config.vocab_size)
        names, tied = self._names, self._config.tie_embeddings
        yield self._piece(f"{names.embedding}.weight", (vocabulary, self._hidden), free=False)
        for index in range(self._sizes.num_layers):
            yield from self._layer(index)
        yield self._norm(f"{names.final_norm}.weight", self._hidden)
        if not tied:
            yield self._piece(f"{names.lm_head}.weight", (vocabulary, self._hidden), free=True)

    def _layer(self, index: int) -> Iterator[TensorPiece]:
        names, biases = self._names, self._config.biases
        prefix, new = names.layer.format(index=index), index >= self._config.num_layers
        hidden, ffn, query, key = (
            axis.all_new() if new else axis for axis in (self._hidden, self._ffn, self._query, self._key)
        )
        yield self._norm(f"{prefix}.{names.attention_norm}.weight", hidden)
        yield from self._modules(prefix, names.qkv, (query, key, key), hidden, biases.qkv, free=True)
        yield from self._head_norms(prefix, new)
        yield from self._modules(prefix, (names.out,), (hidden,), query, biases.out, free=False)
        yield self._norm(f"{prefix}.{names.mlp_norm}.weight", hidden)
        yield from self._modules(prefix, names.gate_up, (ffn, ffn), hidden, biases.mlp, free=True)
        yield from self._modules(prefix, (names.down,), (hidden,), ffn, biases.mlp, free=False)

    def _modules(
        self, prefix: str, names: Sequence[str], rows: tuple[Axis, ...], columns: Axis, biased: bool, free: bool
    ) -> Iterator[TensorPiece]:
        """Weights and biases; a single name holds the rows of all."""
        parts = (joined(rows),) if len(names) == 1 else rows
        for name, axis in zip(names, parts, strict=True):
            yield self._piece(f"{prefix}.{name}.weight", (axis, columns), free)
            if biased:
                yield self._piece(f"{prefix}.{name}.bias", (axis,), free)

    def _head_norms(self, prefix: str, new: bool) -> Iterator[TensorPiece]:
        """Norms over single heads, whose size does not change."""
        if not self._config.qk_norm:
            return
        size = self._config.heads.head_dim
        for name in (f"{prefix}.{self._names.query_norm}.weight", f"{prefix}.{self._names.key_norm}.weight"):
            dtype = self._dtype(name, appended(0 if new else size, size))
            yield TensorPiece(name, (size,), dtype, partial(self._head_norm, name, size, dtype, new))

    def _head_norm(self, name: str, size: int, dtype: torch.dtype, new: bool) -> Tensor:
        if new:
            return (1 + self._noise(name, (size,), NORM_SPREAD, torch.float32)).to(dtype)
        return self._checkpoint.tensor(name, (size,))


def _grid(indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Indices of rows (and columns) as a tensor is indexed with."""
    return (indices[0],) if len(indices) == 1 else (indices[0][:, None], indices[1][None])
