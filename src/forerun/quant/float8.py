"""FP8 checkpoints as DeepSeek, Qwen, Mistral ("fp8") and Meta ("fbgemm_fp8") publish them.

Knows: `weight` (e4m3) with `weight_scale_inv` or `weight_scale`, one for every block of `weight_block_size`, or for
every row, or for the matrix. Does not know: other publishers' FP8 (compressed-tensors, ModelOpt).

Only the weights are taken from the file. Activations stay float32, where such a checkpoint's engine rounds them to FP8:
scales of theirs (`input_scale`, `activation_scale`) are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.kernels.coded import CodedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.floats import FLOAT8, expect, float8_matrix, scale_shapes
from forerun.quant.joined import join_rows
from forerun.quant.settings import Settings

METHODS = ("fp8", "fbgemm_fp8")
BLOCK = "weight_block_size"
SCALES = ("weight_scale_inv", "weight_scale")  # the first one there is


class Float8Format:
    """`PREFIX.weight` of e4m3 and its scales."""

    name = "fp8"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module is stored as e4m3 and config.json says so."""
        weight = f"{prefix}.weight"
        named = Settings.of(source.config).method in METHODS and source.has(weight)
        return named and source.stored_as(weight) == FLOAT8

    def check(self, source: TensorSource, prefix: str) -> None:
        """See `CheckedFormat`."""
        shape, scales = source.shape(f"{prefix}.weight"), _scales(source, prefix)
        if len(shape) != 2:
            return  # of no module that is read
        rows, columns = shape
        expect(source, scales, *scale_shapes(rows, columns, _block(source, scales, rows, columns)))

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_matrix(source, part, columns) for part in parts])


def check_float8(settings: Settings) -> None:
    """Raise UnsupportedError for settings that are not implemented."""
    settings.require("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.require("activation_scheme", ("dynamic", "static"), "dynamic")
    settings.sizes(BLOCK)


def _matrix(source: TensorSource, part: RowPart, columns: int) -> CodedMatrix:
    scales = _scales(source, part.prefix)
    block = _block(source, scales, part.rows, columns)
    return float8_matrix(source, f"{part.prefix}.weight", scales, (part.rows, columns), block)


def _scales(source: TensorSource, prefix: str) -> str:
    names = [f"{prefix}.{name}" for name in SCALES]
    return next((name for name in names if source.has(name)), names[0])


def _block(source: TensorSource, scales: str, rows: int, columns: int) -> tuple[int, int]:
    """Outputs and inputs with one scale: what config.json says; without that a row, or all."""
    size = Settings.of(source.config).sizes(BLOCK)
    if size is not None:
        return size
    many = source.has(scales) and source.shape(scales)[:1] == (rows,) and rows > 1
    return (1 if many else rows), columns
