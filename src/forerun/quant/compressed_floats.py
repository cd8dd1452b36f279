"""compressed-tensors checkpoints of floats: FP8, MXFP8, MXFP4, NVFP4.

Knows: the schemes of `type` "float": `weight` (e4m3) with `weight_scale`, one for the matrix, a row, a block or 32
inputs; `weight_packed` (e2m1) with `weight_scale` and, for NVFP4, `weight_global_scale`. Does not know: integers, nor
which scheme a module has (`compressed`).

Only the weights are taken from the file. FP8 is multiplied with activations of float32; FP4 as grouped matrices are,
with activations of 8-bit integers, which are finer than the 4 or 8 bits these schemes round them to.
"""

from __future__ import annotations

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.quant.base import TensorSource
from forerun.quant.floats import (
    MX_GROUP,
    NV_GROUP,
    Shape,
    expect,
    float8_matrix,
    mxfp4_matrix,
    mxfp8_matrix,
    nvfp4_matrix,
    scale_shapes,
)
from forerun.quant.settings import REMEDY, Settings

FORMATS = ("float-quantized", "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
# Bits and strategy of weights -> inputs with one scale, where that is fixed.
STRATEGIES = {
    (8, "tensor"): None,
    (8, "channel"): None,
    (8, "block"): None,
    (8, "group"): MX_GROUP,
    (4, "group"): MX_GROUP,
    (4, "tensor_group"): NV_GROUP,
}


def check_floats(weights: Settings) -> None:
    """Raise UnsupportedError for float schemes of weights that are not implemented."""
    kind = _kind(weights)
    if kind not in STRATEGIES or (STRATEGIES[kind] and weights.get("group_size") != STRATEGIES[kind]):
        known = ", ".join(f"{bits} bits by {strategy} ({size})" for (bits, strategy), size in STRATEGIES.items())
        raise UnsupportedError(
            f"config.json: quantization_config has float weights of {kind[0]} bits by {kind[1]} "
            f"({weights.get('group_size')}); supported: {known}; {REMEDY}"
        )
    if weights.get("symmetric") is False:
        raise UnsupportedError(f"config.json: quantization_config has float weights with zero points; {REMEDY}")
    if kind == (8, "block"):
        _block(weights)


def check_float_tensors(source: TensorSource, prefix: str, weights: Settings) -> None:
    """Raise CheckpointError for missing or misshapen tensors of a module; reads headers alone."""
    rows, columns = _stored_shape(source, prefix, weights)
    expect(source, f"{prefix}.weight_scale", *_scale_shapes(weights, rows, columns))
    if _kind(weights) == (4, "tensor_group"):
        expect(source, f"{prefix}.weight_global_scale", (1,), ())


def float_matrix(
    source: TensorSource, prefix: str, weights: Settings, shape: tuple[int, int]
) -> GroupedMatrix | CodedMatrix:
    """The module's matrix of `shape`; raises CheckpointError."""
    kind, packed, scales = _kind(weights), f"{prefix}.weight_packed", f"{prefix}.weight_scale"
    if kind == (4, "group"):
        return mxfp4_matrix(source, packed, scales, shape)
    if kind == (4, "tensor_group"):
        return nvfp4_matrix(source, packed, scales, 1 / _global_scale(source, prefix), shape)
    if kind == (8, "group"):
        return mxfp8_matrix(source, f"{prefix}.weight", scales, shape)
    return float8_matrix(source, f"{prefix}.weight", scales, shape, _scale_block(weights, *shape))


def _global_scale(source: TensorSource, prefix: str) -> float:
    name = f"{prefix}.weight_global_scale"
    expect(source, name, (1,), ())
    value = float(source.tensor(name))
    if not 0 < value < float("inf"):
        raise CheckpointError(f"tensor {name} holds {value}; the file is damaged, copy it again")
    return value


def _kind(weights: Settings) -> tuple[int, str]:
    strategy = weights.get("strategy") or "tensor"
    return weights.whole("num_bits", 8), str(strategy)


def _stored_shape(source: TensorSource, prefix: str, weights: Settings) -> tuple[int, int]:
    halves = _kind(weights)[0] == 4
    name = f"{prefix}.{'weight_packed' if halves else 'weight'}"
    if not source.has(name) or len(source.shape(name)) != 2:
        raise CheckpointError(
            f"the checkpoint has no matrix {name}, which quantization_config asks for; copy the checkpoint again"
        )
    rows, columns = source.shape(name)
    return rows, columns * (2 if halves else 1)


def _scale_shapes(weights: Settings, rows: int, columns: int) -> tuple[Shape, ...]:
    size = STRATEGIES[_kind(weights)]
    if size is not None:
        return ((rows, -(-columns // size)),)
    return scale_shapes(rows, columns, _scale_block(weights, rows, columns))


def _scale_block(weights: Settings, rows: int, columns: int) -> tuple[int, int]:
    """Outputs and inputs with one scale."""
    strategy = _kind(weights)[1]
    if strategy == "block":
        return _block(weights)
    return (1 if strategy == "channel" else rows), columns


def _block(weights: Settings) -> tuple[int, int]:
    size = weights.sizes("block_structure")
    if size is None:
        raise UnsupportedError(
            f"config.json: quantization_config has float weights by block and no block_structure; {REMEDY}"
        )
    return size
