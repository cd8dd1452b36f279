"""Random modules in quantized formats, packed bit by bit in Python, and what they stand for in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.quant.base import RowPart, Weight
from forerun.quant.formats import find_format
from forerun.weights.checkpoint import Checkpoint
from tests.models import factory

AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


class Stored(NamedTuple):
    """A module's tensors, by their names without prefix, and its matrix [N, K] float64."""

    tensors: dict[str, Tensor]
    matrix: Tensor


def words(values: Sequence[int], bits: int) -> list[int]:
    """A bit stream in signed 32-bit words, the lowest bits first."""
    stream = sum((value & ((1 << bits) - 1)) << (bits * index) for index, value in enumerate(values))
    count = -(-len(values) * bits // 32)
    unsigned = [stream >> (32 * index) & 0xFFFFFFFF for index in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in unsigned]


def packed_rows(table: Tensor, bits: int) -> Tensor:
    """Every row of a table as words -> [R, W] int32."""
    return torch.tensor([words(row, bits) for row in table.tolist()], dtype=torch.int32)


def random_scales(bits: int, *shape: int) -> Tensor:
    """Such that weights are about 0.1."""
    return ((torch.rand(shape) * 0.4 + 0.1) / (1 << bits)).half()


def gptq(
    rows: int, columns: int, bits: int, group_size: int, *, group_ids: Tensor | None = None, sym: bool = False,
    second: bool = False,
) -> Stored:  # fmt: skip
    """A random GPTQ module; `second` for checkpoint_format gptq_v2."""
    groups = -(-columns // group_size)
    codes = torch.randint(0, 1 << bits, (columns, rows))
    zeros = torch.randint(1, 1 << bits, (groups, rows))
    if sym:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scales = random_scales(bits, groups, rows)
    ids = torch.arange(columns) // group_size if group_ids is None else group_ids
    tensors = {
        "qweight": packed_rows(codes.T, bits).T.contiguous(),
        "qzeros": packed_rows(zeros if second else zeros - 1, bits),
        "scales": scales,
    }
    if group_ids is not None:
        tensors["g_idx"] = ids.int()
    return Stored(tensors, (scales.double()[ids] * (codes - zeros[ids])).T)


def awq(rows: int, columns: int, group_size: int) -> Stored:
    """A random AWQ module in the gemm layout."""
    groups = columns // group_size
    codes, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (groups, rows))
    scales = random_scales(4, groups, rows)
    ids = torch.arange(columns) // group_size

    def interleaved(table: Tensor) -> Tensor:
        order = [8 * block + nibble for block in range(rows // 8) for nibble in AWQ_NIBBLES]
        return packed_rows(table[:, order], 4)

    tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales}
    return Stored(tensors, (scales.double()[ids] * (codes - zeros[ids])).T)


def compressed(
    rows: int, columns: int, bits: int, group_size: int | None, *, packed: bool, sym: bool = True,
    group_ids: Tensor | None = None, per_tensor: bool = False,
) -> Stored:  # fmt: skip
    """A random compressed-tensors module: signed values, scales a row (group_size None), group or tensor."""
    half, groups = 1 << (bits - 1), columns // (group_size or columns)
    values = torch.randint(-half, half, (rows, columns))
    zeros = torch.zeros(rows, groups, dtype=torch.long) if sym else torch.randint(-half, half, (rows, groups))
    scales = random_scales(bits, 1) if per_tensor else random_scales(bits, rows, groups)
    ids = torch.arange(columns) // (group_size or columns) if group_ids is None else group_ids
    tensors: dict[str, Tensor] = {"weight_scale": scales}
    if packed:
        tensors["weight_packed"] = packed_rows(values + half, bits)
        tensors["weight_shape"] = torch.tensor([rows, columns])
    else:
        tensors["weight"] = values.to(torch.int8)
    if not sym:
        tensors["weight_zero_point"] = (
            packed_rows((zeros + half).T, bits).T.contiguous() if packed else zeros.to(torch.int8)
        )
    if group_ids is not None:
        tensors["weight_g_idx"] = ids.int()
    return Stored(tensors, scales.double().expand(rows, groups)[:, ids] * (values - zeros[:, ids]))


def float8(rows: int, columns: int, block: tuple[int, int] | None = (16, 32)) -> Stored:
    """A random matrix of e4m3 with `weight_scale_inv`: a scale a block (outputs, inputs), or one for all."""
    height, width = block or (rows, columns)
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // height), -(-columns // width)) * 0.1 + 0.05
    spread = scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    stored = scales if block is not None else scales.reshape(())
    return Stored({"weight": codes, "weight_scale_inv": stored}, codes.double() * spread.double())


def open_source(folder: Path, modules: Mapping[str, Stored], section: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of these modules with a `quantization_config`."""
    tensors = {f"{name}.{key}": value for name, stored in modules.items() for key, value in stored.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return Checkpoint.open(folder)


def read(source: Checkpoint, modules: Mapping[str, Stored]) -> Weight:
    """All modules as one weight, in the format their tensors and config.json name."""
    names = list(modules)
    form = find_format(source, names[0])
    assert form is not None
    parts = [RowPart(name, modules[name].matrix.shape[0]) for name in names]
    weight = form.read(source, parts, modules[names[0]].matrix.shape[1], factory.make_kernels("reference"), None)
    assert source.unread == [], source.unread
    return weight


def check(folder: Path, modules: Mapping[str, Stored], section: Mapping[str, Any]) -> Weight:
    """Read the modules and compare with the float64 matrices, entry by entry and in a product."""
    weight = read(open_source(folder, modules, section), modules)
    truth = torch.cat([stored.matrix for stored in modules.values()])
    assert weight.shape == tuple(truth.shape)
    assert torch.allclose(weight.dequantize().double(), truth, rtol=1e-5, atol=1e-6 * float(truth.abs().max()))
    x = torch.randn(3, truth.shape[1])
    error = (weight.matmul(x, None).double() - x.double() @ truth.T).norm() / (x.double() @ truth.T).norm()
    assert error < 0.02  # activations are rounded to 8 bits
    return weight
