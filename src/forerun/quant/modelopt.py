"""NVIDIA ModelOpt checkpoints: FP8 and NVFP4.

Knows: `weight` (e4m3, or two e2m1 a byte) with `weight_scale` and, for NVFP4, `weight_scale_2`. Does not know: what
else ModelOpt can write, which is refused by the name of its algorithm.

Only the weights are taken from the file, as of compressed-tensors (`compressed_floats` says what activations are).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.errors import CheckpointError
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.floats import BYTES, FLOAT8, NV_GROUP, expect, float8_matrix, nvfp4_matrix, scale_shapes
from forerun.quant.joined import join_rows
from forerun.quant.settings import Settings

METHOD = "modelopt"
ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")  # the last one: of the former, module by module


class ModelOptFormat:
    """`PREFIX.weight` of e4m3 or bytes, and its scales."""

    name = METHOD

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module is quantized and config.json says so."""
        weight = f"{prefix}.weight"
        named = Settings.of(source.config).method == METHOD and source.has(weight)
        return named and source.stored_as(weight) in (FLOAT8, BYTES)

    def check(self, source: TensorSource, prefix: str) -> None:
        """See `CheckedFormat`."""
        shape, scales = source.shape(f"{prefix}.weight"), f"{prefix}.weight_scale"
        if len(shape) != 2:
            return  # of no module that is read
        if source.stored_as(f"{prefix}.weight") == FLOAT8:
            return expect(source, scales, *scale_shapes(*shape, shape))
        expect(source, scales, (shape[0], shape[1] * 2 // NV_GROUP))
        expect(source, f"{prefix}.weight_scale_2", (), (1,))

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_matrix(source, part, columns) for part in parts])


def check_modelopt(settings: Settings) -> None:
    """Raise UnsupportedError for algorithms that are not implemented."""
    settings.require("quant_algo", ALGORITHMS, "unnamed")


def _matrix(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix | CodedMatrix:
    weight, scales, shape = f"{part.prefix}.weight", f"{part.prefix}.weight_scale", (part.rows, columns)
    if source.stored_as(weight) == FLOAT8:
        return float8_matrix(source, weight, scales, shape, shape)
    name = f"{part.prefix}.weight_scale_2"
    expect(source, name, (), (1,))
    factor = float(source.tensor(name))
    if not 0 < factor < float("inf"):
        raise CheckpointError(f"tensor {name} holds {factor}; the file is damaged, copy it again")
    return nvfp4_matrix(source, weight, scales, factor, shape)
