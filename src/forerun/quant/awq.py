"""AWQ checkpoints in the "gemm" layout: 4 bits, zero points, groups along the inputs.

Knows: `qweight`, `qzeros` and `scales` as AutoAWQ writes them. Does not know: how such files are made, nor the other
layouts ("gemv", "gemv_fast"), which it refuses.

Input k of output n weighs scales[g, n] * (code[k, n] - zero[g, n]) with g = k // group_size. Codes and zero points
are packed along the outputs, eight in a word, in the order OUTPUTS_OF_FIELDS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.joined import affine_matrix, check_group_size, join_rows
from forerun.quant.packing import as_bytes, pack
from forerun.quant.settings import Settings

METHOD = "awq"
BITS = 4
VERSIONS = ("gemm", "GEMM")
OUTPUTS_OF_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight outputs lies in each field, lowest first
FIELDS_OF_OUTPUTS = (0, 4, 1, 5, 2, 6, 3, 7)  # the inverse


class AwqFormat:
    """`PREFIX.qweight` under quant_method "awq"."""

    name = "awq"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module has packed codes and config.json calls them AWQ's."""
        return source.has(f"{prefix}.qweight") and Settings.of(source.config).method == METHOD

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_read_part(source, part, columns) for part in parts])


def check_awq(settings: Settings) -> None:
    """Raise UnsupportedError for another layout or width."""
    settings.require("bits", (BITS,), settings.get("w_bit") or BITS)
    settings.require("version", VERSIONS, "gemm")


def unpack_outputs(words: Tensor) -> Tensor:
    """words [R, N / 8] int32 -> [N, R] uint8, outputs in order."""
    count, num_words = words.shape
    pairs = as_bytes(words.T).view(num_words, count, 4)  # byte i holds the fields 2 * i and 2 * i + 1
    pairs = pairs.permute(2, 0, 1).contiguous()  # [4, N / 8, R]
    codes = torch.empty(num_words, 8, count, dtype=torch.uint8)
    for output, field in enumerate(FIELDS_OF_OUTPUTS):
        codes[:, output] = (pairs[field // 2] >> (4 * (field % 2))) & 15
    return codes.flatten(0, 1)


def pack_outputs(codes: Tensor) -> Tensor:
    """The inverse of `unpack_outputs` for transposed codes: [R, N] -> [R, N / 8] int32."""
    return pack(codes.reshape(len(codes), -1, 8)[..., list(OUTPUTS_OF_FIELDS)].flatten(1), BITS)


def _read_part(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix:
    settings, prefix = Settings.of(source.config), part.prefix
    group_size = settings.whole("group_size", settings.get("q_group_size") or 128)
    group_size = columns if group_size <= 0 else group_size
    if part.rows % 8 or columns % group_size:
        raise CheckpointError(
            f"{prefix}: {part.rows} outputs are not a multiple of 8, or {columns} inputs not one of group_size "
            f"{group_size} of quantization_config; weights and config.json do not belong together"
        )
    check_group_size(group_size, columns, prefix)
    groups = columns // group_size
    packed = source.integers(f"{prefix}.qweight", (columns, part.rows // 8))
    packed_zeros = source.integers(f"{prefix}.qzeros", (groups, part.rows // 8))
    scales = source.tensor(f"{prefix}.scales", (groups, part.rows))
    zeros = unpack_outputs(packed_zeros)  # [N, groups]
    return affine_matrix(unpack_outputs(packed), scales.T, zeros.long(), BITS, group_size)
