"""GPTQ checkpoints: 2, 3, 4 or 8 bits, groups of any size, with or without act-order and zero points.

Knows: `qweight`, `qzeros`, `scales` and `g_idx` as AutoGPTQ and GPTQModel write them (checkpoint_format "gptq", whose
zero points are stored minus one, and "gptq_v2"). Does not know: how such files are made.

Input k of output n weighs scales[g, n] * (code[k, n] - zero[g, n]), where g = g_idx[k] or k // group_size. The codes
are packed along the inputs, the zero points along the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.joined import affine_matrix, check_group_size, join_rows
from forerun.quant.packing import unpack, words_for
from forerun.quant.settings import Settings

METHOD = "gptq"
BITS = (2, 3, 4, 8)
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
FOREIGN = ("is_marlin_format", "rotation", "adapter")  # other layouts, and parts outside of the matrices


class GptqFormat:
    """`PREFIX.qweight` under quant_method "gptq"."""

    name = "gptq"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module has packed codes and config.json calls them GPTQ's."""
        return source.has(f"{prefix}.qweight") and Settings.of(source.config).method == METHOD

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_read_part(source, part, columns) for part in parts])


def check_gptq(settings: Settings) -> None:
    """Raise UnsupportedError for settings that change how tensors are read and are not implemented."""
    settings.require("bits", BITS, None)
    settings.require("checkpoint_format", CHECKPOINT_FORMATS, settings.get("format") or "gptq")
    settings.require("pack_dtype", ("int32",), "int32")
    settings.refuse(*FOREIGN)


def _read_part(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix:
    settings, prefix = Settings.of(source.config), part.prefix
    packed = source.integers(f"{prefix}.qweight")  # [K * bits / 32, N] int32
    bits = _bits(packed, part, columns, settings)
    scales = source.tensor(f"{prefix}.scales")  # [groups, N]
    group_size, order = _grouping(source, prefix, columns, scales.shape[0], settings)
    check_group_size(group_size, columns, prefix)
    groups = -(-columns // group_size)
    if scales.shape != (groups, part.rows):
        raise CheckpointError(
            f"tensor {prefix}.scales has shape {list(scales.shape)}, groups of {group_size} of {columns} inputs ask "
            f"for {[groups, part.rows]}; copy the checkpoint again"
        )
    codes = unpack(packed.T, bits, columns)  # [N, K]
    zeros = _zero_points(source, prefix, bits, (groups, part.rows), settings)  # [groups, N]
    if order is not None:
        codes = codes[:, order]
    return affine_matrix(codes, scales.T, zeros.T, bits, group_size, order)


def _bits(packed: Tensor, part: RowPart, columns: int, settings: Settings) -> int:
    """The bit width that fits the tensor: config.json's, or another if GPTQModel's `dynamic` allows exceptions."""
    wanted = settings.whole("bits")
    others: tuple[int, ...] = BITS if settings.get("dynamic") else ()
    for bits in (wanted, *others):
        if columns * bits % 32 == 0 and packed.shape == (words_for(columns, bits), part.rows):
            return bits
    raise CheckpointError(
        f"tensor {part.prefix}.qweight has shape {list(packed.shape)}, {wanted} bits for {columns} inputs and "
        f"{part.rows} outputs ask for {[words_for(columns, wanted), part.rows]}; weights and config.json do not "
        "belong together"
    )


def _grouping(
    source: TensorSource, prefix: str, columns: int, groups: int, settings: Settings
) -> tuple[int, Tensor | None]:
    """The group size and, where act-order shuffled the groups, the inputs group by group [K]."""
    wanted = settings.whole("group_size", -1)
    size = columns if wanted <= 0 or wanted > columns else wanted
    if settings.get("dynamic") and -(-columns // size) != groups and columns % groups == 0:
        size = columns // groups
    if not source.has(f"{prefix}.g_idx"):
        if settings.get("desc_act") and size != columns:
            raise CheckpointError(
                f"the checkpoint has no tensor {prefix}.g_idx, which desc_act = true of quantization_config asks for; "
                "copy the checkpoint again"
            )
        return size, None
    return size, input_order(source.integers(f"{prefix}.g_idx", (columns,)), size, f"{prefix}.g_idx")


def input_order(group_ids: Tensor, group_size: int, name: str) -> Tensor | None:
    """The inputs sorted by group [K] int64, those of a group in their own order; None if they already are.

    Raises UnsupportedError unless every group but the last has `group_size` inputs.
    """
    ids = group_ids.long()
    natural = torch.arange(len(ids)) // group_size
    sorted_ids, order = torch.sort(ids, stable=True)
    if not torch.equal(sorted_ids, natural):
        raise UnsupportedError(
            f"tensor {name} does not put {group_size} inputs into each of {int(natural[-1]) + 1} groups; uneven groups "
            "are not supported: copy the checkpoint again, or take another one of the model"
        )
    return None if torch.equal(ids, natural) else order


def _zero_points(
    source: TensorSource, prefix: str, bits: int, shape: tuple[int, int], settings: Settings
) -> Tensor:  # fmt: skip
    """[groups, N] int64."""
    groups, rows = shape
    packed = source.integers(f"{prefix}.qzeros", (groups, words_for(rows, bits)))  # int32
    second = (settings.get("checkpoint_format") or settings.get("format")) == "gptq_v2"
    if second:
        return unpack(packed, bits, rows).long()
    if 32 % bits == 0:
        # GPTQModel subtracts the ones from whole words, so that a zero point of 0 borrows from its neighbour. Adding
        # them to whole words restores every zero point; where none is 0, it equals adding field by field.
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (packed.long() + ones) & 0xFFFFFFFF
        return unpack(torch.where(words < 1 << 31, words, words - (1 << 32)).int(), bits, rows).long()
    return (unpack(packed, bits, rows).long() + 1) & ((1 << bits) - 1)
