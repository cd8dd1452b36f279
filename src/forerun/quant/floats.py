"""Matrices of 8 and 4 bit floats with scales, whoever wrote them.

Knows: e4m3, e2m1 and e8m0, scales of rows and blocks, and which tensors must be there. Does not know: what config.json
calls a format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.quant.base import TensorSource
from forerun.quant.gguf_blocks import BYTE_ZERO, E2M1_VALUES

FLOAT8, POWERS, BYTES = "F8_E4M3", "F8_E8M0", "U8"  # safetensors' names of types
FLOATS = ("F32", "BF16", "F16")
MX_GROUP, NV_GROUP = 32, 16  # inputs with one scale, of MX formats and of NVFP4
Shape = tuple[int, ...]


def expect(source: TensorSource, name: str, *allowed: Shape) -> None:
    """Raise CheckpointError unless the tensor is there, in one of these shapes; its data is not read."""
    if not source.has(name):
        raise CheckpointError(
            f"the checkpoint has no tensor {name}, without which its quantized weights cannot be read; copy the "
            "checkpoint again"
        )
    if source.shape(name) not in allowed:
        shapes = " or ".join(str(list(shape)) for shape in allowed)
        raise CheckpointError(
            f"tensor {name} has shape {list(source.shape(name))}, {shapes} is needed; weights and config.json do not "
            "belong together"
        )


def expect_type(source: TensorSource, name: str, *allowed: str) -> None:
    """Raise CheckpointError unless the tensor is stored in one of these types."""
    if source.stored_as(name) not in allowed:
        raise CheckpointError(
            f"tensor {name} is stored as {source.stored_as(name)}, not as {' or '.join(allowed)}; weights and "
            "config.json do not belong together"
        )


def scale_shapes(rows: int, columns: int, block: tuple[int, int]) -> tuple[Shape, ...]:
    """The shapes that scales of blocks (outputs, inputs) of a matrix may have; one for the matrix may be a scalar."""
    counts = -(-rows // block[0]), -(-columns // block[1])
    flat: tuple[Shape, ...] = ((counts[0],),) if counts[1] == 1 else ()
    return (counts, *flat, ()) if counts == (1, 1) else (counts, *flat)


def block_scales(source: TensorSource, name: str, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """Scales of blocks (outputs, inputs), for every output -> [N, groups] float32; raises CheckpointError."""
    rows, columns = shape
    expect(source, name, *scale_shapes(rows, columns, block))
    expect_type(source, name, *FLOATS, POWERS)
    scales = source.raw(name).float().view(-1, -(-columns // block[1]))  # [ceil(N / block), groups]
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"tensor {name} holds scales that are not finite; the file is damaged, copy it again")
    return scales.repeat_interleave(block[0], dim=0)[:rows].contiguous()


def float8_codes(source: TensorSource, name: str, shape: tuple[int, int]) -> Tensor:
    """A matrix of e4m3 as bytes -> [N, K] uint8; raises CheckpointError for NaN and other types."""
    expect(source, name, shape)
    expect_type(source, name, FLOAT8)
    codes = source.raw(name).view(torch.uint8)
    if bool((codes.bitwise_and(127) == 127).any()):
        raise CheckpointError(f"tensor {name} holds NaN; the file is damaged, copy it again")
    return codes


def float8_matrix(
    source: TensorSource, weight: str, scales: str, shape: tuple[int, int], block: tuple[int, int]
) -> CodedMatrix:
    """A matrix of e4m3 with a scale a block (outputs, inputs)."""
    floats = block_scales(source, scales, shape, block)
    return CodedMatrix(float8_codes(source, weight, shape), floats, min(block[1], shape[1]))


def mxfp8_matrix(source: TensorSource, weight: str, scales: str, shape: tuple[int, int]) -> CodedMatrix:
    """A matrix of e4m3 with a power of two for every 32 inputs."""
    exponents = _group_bytes(source, scales, shape, MX_GROUP)
    return CodedMatrix(float8_codes(source, weight, shape), exponents, MX_GROUP, scale_values=powers_of_two())


def mxfp4_matrix(source: TensorSource, weight: str, scales: str, shape: tuple[int, int]) -> GroupedMatrix:
    """A matrix of e2m1 with a power of two for every 32 inputs."""
    exponents = _group_bytes(source, scales, shape, MX_GROUP)
    return float4_matrix(_pairs(source, weight, shape), powers_of_two()[exponents.int()], MX_GROUP)


def nvfp4_matrix(
    source: TensorSource, weight: str, scales: str, factor: float, shape: tuple[int, int]
) -> GroupedMatrix:  # fmt: skip
    """A matrix of e2m1 as MXFP4's, with an e4m3 scale for every 16 inputs and a float32 factor for all."""
    expect(source, scales, (shape[0], shape[1] // NV_GROUP))
    expect_type(source, scales, FLOAT8)
    counts = source.raw(scales).float()
    if not bool(counts.isfinite().all()):
        raise CheckpointError(f"tensor {scales} holds scales that are not finite; the file is damaged, copy it again")
    return float4_matrix(_pairs(source, weight, shape), counts, NV_GROUP, factor)


def powers_of_two() -> Tensor:
    """What a byte of e8m0 stands for -> [256] float32; the last one is no number."""
    return torch.ldexp(torch.ones(256), torch.arange(256) - 127)


def float4_matrix(packed: Tensor, scales: Tensor, group_size: int, factor: float = 1.0) -> GroupedMatrix:
    """A matrix of e2m1 from bytes [N, K / 2], the even input in the low half; scales [N, groups] float32."""
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)  # [N, K]
    table = torch.tensor([value + BYTE_ZERO for value in E2M1_VALUES]).byte()  # values are doubled
    return GroupedMatrix(codes, scales / 2, 4, BYTE_ZERO, group_size, table=table, unit_scale=factor)


def _pairs(source: TensorSource, name: str, shape: tuple[int, int]) -> Tensor:
    expect(source, name, (shape[0], shape[1] // 2))
    return source.integers(name)


def _group_bytes(source: TensorSource, name: str, shape: tuple[int, int], group_size: int) -> Tensor:
    """A byte of e8m0 for every group -> [N, groups] uint8; raises CheckpointError for NaN."""
    expect(source, name, (shape[0], -(-shape[1] // group_size)))
    expect_type(source, name, BYTES, POWERS)
    exponents = source.raw(name).view(torch.uint8)
    if bool((exponents == 255).any()):
        raise CheckpointError(f"tensor {name} holds scales that are not finite; the file is damaged, copy it again")
    return exponents
