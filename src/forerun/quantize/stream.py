"""Calibration text on its way through a decoder, one layer at a time.

Knows: how a decoder layer runs over whole sequences, and how to watch what its matrices read. Does not know: how
matrices are quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.kernels.ops import LayerKV
from forerun.layers.linear import Linear
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder, DecoderLayer
from forerun.quant.base import Weight
from forerun.quantize.pool import BLOCK_SIZE, block_table, empty_kv


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a matrix read: second moments and mean magnitudes over all rows."""

    moments: Tensor  # [K, K] float32, mean of x^T x
    magnitudes: Tensor  # [K] float32, mean of |x|


class PlainWeight:
    """A float matrix multiplied by torch, freed with this object. Implements `quant.base.Weight`."""

    def __init__(self, matrix: Tensor) -> None:
        """`matrix` [N, K] float32."""
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._matrix.shape[0], self._matrix.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self._matrix.nbytes

    @property
    def packed(self) -> None:
        """None: callers must use `matmul`."""
        return None

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K] -> [M, N]."""
        return F.linear(x, self._matrix, bias)

    def dequantize(self) -> Tensor:
        """The matrix."""
        return self._matrix


class LayerStream:
    """The residual stream of every calibration sequence in front of some layer of a decoder."""

    def __init__(self, decoder: Decoder, sequences: Sequence[Sequence[int]]) -> None:
        """`sequences`: token ids, each no longer than the decoder's positions."""
        self._decoder = decoder
        table = block_table(max(map(len, sequences)))
        spans = [SequenceRows("calibration", table, 0, ids, len(ids)) for ids in sequences]
        self._batches = [ForwardBatch.build([span], BLOCK_SIZE) for span in spans]
        self._num_blocks = len(table)
        self.residuals = [decoder.parts.embedding(batch.token_ids) for batch in self._batches]  # each [T, H]

    def advance(self, index: int) -> None:
        """Move every sequence through layer `index`."""
        self.residuals = list(self._outputs(index))

    def watch(self, index: int, linears: Sequence[Linear]) -> list[LayerInputs]:
        """What these matrices of layer `index` read, with the layer as it is now."""
        with _watched(linears) as meters:
            for _ in self._outputs(index):
                pass
        return [meter.inputs() for meter in meters]

    @torch.no_grad()
    def _outputs(self, index: int) -> Iterator[Tensor]:
        layer, kv = self._decoder.parts.layers[index], empty_kv(self._decoder.kv_specs[index], self._num_blocks)
        for batch, before in zip(self._batches, self.residuals, strict=True):
            yield _run(layer, before.clone(), batch, kv)


class _Meter:
    """Wraps a weight and sums up statistics of its inputs."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        columns = weight.shape[1]
        self._moments, self._magnitudes = torch.zeros(columns, columns), torch.zeros(columns)
        self._rows = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def packed(self) -> None:
        """None: callers must use `matmul`."""
        return None

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        self._moments.addmm_(x.T, x)
        self._magnitudes += x.abs().sum(0)
        self._rows += x.shape[0]
        return self.weight.matmul(x, bias)

    def dequantize(self) -> Tensor:
        return self.weight.dequantize()

    def inputs(self) -> LayerInputs:
        return LayerInputs(self._moments / self._rows, self._magnitudes / self._rows)


@contextmanager
def _watched(linears: Sequence[Linear]) -> Iterator[list[_Meter]]:
    meters = [_Meter(linear.weight) for linear in linears]
    for linear, meter in zip(linears, meters, strict=True):
        linear.weight = meter
    try:
        yield meters
    finally:
        for linear, meter in zip(linears, meters, strict=True):
            linear.weight = meter.weight


def _run(layer: DecoderLayer, residual: Tensor, batch: ForwardBatch, kv: LayerKV) -> Tensor:
    """residual [T, H] before the layer -> after it."""
    x, residual = layer(layer.enter(residual), residual, batch, kv)
    return residual + x
