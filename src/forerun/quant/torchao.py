"""torchao checkpoints as safetensors hold them: Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Float8Tensor.

Knows: `_weight_qdata` (int8, two int4 a byte, or e4m3), `_weight_scale` and `_weight_zero_point`. Which of the classes
a module is of follows from the type of its data. Does not know: layouts for one kind of device (int32), refused here.

Only the weights are taken from the file: activations are rounded as `grouped` has it, or not at all for e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.floats import BYTES, FLOAT8, Shape, expect, float8_matrix
from forerun.quant.joined import affine_matrix, check_group_size, join_rows
from forerun.quant.settings import REMEDY, Settings

METHOD = "torchao"
DATA = "_weight_qdata"
INTEGERS = "I8"
MIDDLE = {4: 8, 8: 128}  # what stands for 0 in codes of so many bits


class TorchaoFormat:
    """`PREFIX._weight_qdata` and its scales."""

    name = METHOD

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module is quantized and config.json says so."""
        return Settings.of(source.config).method == METHOD and source.has(f"{prefix}.{DATA}")

    def check(self, source: TensorSource, prefix: str) -> None:
        """See `CheckedFormat`."""
        data = f"{prefix}.{DATA}"
        if source.stored_as(data) not in (INTEGERS, BYTES, FLOAT8) or len(source.shape(data)) != 2:
            raise UnsupportedError(
                f"tensor {data} is stored as {source.stored_as(data)} {list(source.shape(data))}, torchao's layout for "
                f"one kind of device; supported are int8, two int4 a byte, and float8; {REMEDY}"
            )
        if source.has(f"{prefix}._weight_act_pre_scale"):
            raise UnsupportedError(f"{prefix} is multiplied with scaled inputs (act_pre_scale); {REMEDY}")
        expect(source, f"{prefix}._weight_scale", *_scale_shapes(source, prefix))

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_matrix(source, part, columns) for part in parts])


def check_torchao(settings: Settings) -> None:
    """Raise UnsupportedError for quantized embeddings; what else is not implemented the tensors tell."""
    settings.refuse("include_input_output_embeddings", "include_embedding")


def _scale_shapes(source: TensorSource, prefix: str) -> tuple[Shape, ...]:
    """As many groups as the stored shape says; e4m3 and int8 by row, two int4 a byte by column."""
    (rows, columns), scales = source.shape(f"{prefix}.{DATA}"), f"{prefix}._weight_scale"
    shape = source.shape(scales) if source.has(scales) else ()
    groups = shape[0] if shape and 2 * columns % max(shape[0], 1) == 0 else 1
    of_pairs = (groups, rows)
    if source.stored_as(f"{prefix}.{DATA}") == BYTES:
        return (of_pairs,)
    groups = shape[-1] if len(shape) == 2 and columns % max(shape[-1], 1) == 0 else 1
    return (rows, groups), (rows,), (1, 1), (), *([of_pairs] if len(shape) == 2 else [])


def _matrix(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix | CodedMatrix:
    prefix, data, shape = part.prefix, f"{part.prefix}.{DATA}", (part.rows, columns)
    stored = source.stored_as(data)
    if stored == FLOAT8:
        whole = source.shape(f"{prefix}._weight_scale") != (part.rows, 1)
        return float8_matrix(source, data, f"{prefix}._weight_scale", shape, shape if whole else (1, columns))
    if stored == BYTES or source.shape(data) == (part.rows, columns // 2):
        return _int4_matrix(source, prefix, shape)
    values = source.integers(data, shape).short()
    small = values.numel() > 0 and int(values.min()) >= -8 and int(values.max()) <= 7
    bits = 4 if small else 8
    scales = _by_row(source.tensor(f"{prefix}._weight_scale"), part.rows)
    zeros = _zeros(source, prefix, part.rows).expand(scales.shape) + MIDDLE[bits]
    group_size = columns // scales.shape[1]
    check_group_size(group_size, columns, prefix)
    return affine_matrix((values + MIDDLE[bits]).byte(), scales, zeros, bits, group_size)


def _int4_matrix(source: TensorSource, prefix: str, shape: tuple[int, int]) -> GroupedMatrix:
    """value * scale + zero point, of signed values, the even input in a byte's low half."""
    rows, columns = shape
    packed = source.integers(f"{prefix}.{DATA}", (rows, columns // 2)).view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).view(shape) ^ 8  # 4 bits of two's complement, plus 8
    scales = source.tensor(f"{prefix}._weight_scale").float().T.contiguous()  # [N, groups]
    offsets = -source.tensor(f"{prefix}._weight_zero_point", scales.T.shape).float().T.contiguous()
    group_size = columns // scales.shape[1]
    check_group_size(group_size, columns, prefix)
    return GroupedMatrix(codes, scales, 4, MIDDLE[4], group_size, offsets if bool(offsets.any()) else None)


def _zeros(source: TensorSource, prefix: str, rows: int) -> Tensor:
    name = f"{prefix}._weight_zero_point"
    return _by_row(source.raw(name), rows).long() if source.has(name) else torch.zeros(1, 1, dtype=torch.long)


def _by_row(numbers: Tensor, rows: int) -> Tensor:
    """One number, one a row, or one a row and group -> [N, groups]."""
    table = numbers.view(-1, 1) if numbers.dim() < 2 else numbers
    return table.expand(rows, table.shape[1])
