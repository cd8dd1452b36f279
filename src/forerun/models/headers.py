"""Whether a checkpoint's headers give a decoder: every tensor is there and has the shape that is asked for.

Knows: that a Builder asks for tensors by name and shape; none of their data is read here. Does not know: families,
what a decoder computes. Not looked at: matrices in formats of quantization (`quant.formats` checks these), experts
stacked in tensors of safetensors, and models with latent attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.ops import PackedLinear
from forerun.kernels.reference import ReferenceKernels
from forerun.layers.embedding import Embedding, TableEmbedding
from forerun.layers.linear import Linear
from forerun.models.build import Builder
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.quant.base import RowPart
from forerun.quant.dense import DenseFormat
from forerun.quant.gguf import GgufFormat
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint


def check_headers(config: ModelConfig, family: Family, stored: Checkpoint | GgufCheckpoint) -> None:
    """Raise CheckpointError for missing and misshapen tensors, as loading the model would; reads headers alone."""
    is_stacked = config.experts is not None and isinstance(stored, Checkpoint)
    if config.latents is None and not is_stacked:
        _HeaderBuilder(config, family, _Headers(stored), ReferenceKernels(), None, 1).decoder()


class _Headers:
    """A checkpoint whose vectors are all ones, and small tensors too. Implements `quant.base.TensorSource`."""

    def __init__(self, stored: Checkpoint | GgufCheckpoint) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Ones, if there is such a tensor of that shape."""
        self._stored.check_shape(name, found := shape or self._stored.shape(name))
        return torch.ones(tuple(found))


@dataclass(frozen=True, slots=True)
class _UnreadWeight:
    """A matrix of which only the shape is known. Implements `quant.base.Weight`."""

    shape: tuple[int, int]
    nbytes: int = 0
    packed: PackedLinear | None = None

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError("it was not read")

    def dequantize(self) -> Tensor:
        raise AssertionError("it was not read")


class _HeaderBuilder(Builder):
    """A Builder that compares shapes where another one reads matrices."""

    def linear(
        self, parts: list[RowPart], columns: int, has_bias: bool = False, row_ids: Tensor | None = None
    ) -> Linear:  # fmt: skip
        """See `Builder`."""
        for part in parts:
            if isinstance(self.format_of(part), DenseFormat | GgufFormat):
                self._check(f"{part.prefix}.weight", (part.rows, columns))
        weight = _UnreadWeight((sum(part.rows for part in parts), columns))
        return Linear(weight, self._bias(parts) if has_bias else None, parts)

    def table(self, module: str, shape: tuple[int, int], scale: float) -> Embedding:
        """See `Builder`."""
        self._check(f"{module}.weight", shape)
        return TableEmbedding(self.kernels, torch.empty(shape, device="meta"), scale=scale)

    def _embedding(self, head: Linear) -> Embedding:
        sizes = self.config.vocab_size, self.config.hidden_size
        return self.table(self.family.names.embedding, sizes, self.config.scales.embedding)

    def _check(self, name: str, shape: tuple[int, int]) -> None:
        assert isinstance(self.source, _Headers)
        self.source.check_shape(name, shape)
