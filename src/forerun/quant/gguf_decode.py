"""What the blocks of GGUF's quantized tensor types stand for, as grouped matrices.

Knows: the layout of every block type it lists, byte by byte. Does not know: files, names of tensors, kernels.
Nothing is rounded: codes are the stored integers, scales their float16, or small integers that multiply one. numpy
does the work on a few threads: torch's own threads wait for each other after every small operation, which on a busy
machine takes far longer than the operations.
Source: ggml-quants.c (dequantize_row_*) and ggml-common.h (the structs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.grouped import GroupedMatrix

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml: kvalues_iq4nl
_IQ4_ZERO = 128  # what stands for 0 in a table of bytes
_PORTION = 1 << 18  # entries decoded at a time


Array = npt.NDArray[Any]


class Decoded(NamedTuple):
    """Blocks taken apart; b counts all blocks."""

    codes: Array  # [b, block size] uint8
    scales: Array  # [b, groups of a block] float32, or int8 multiples of a unit
    offsets: Array | None = None  # like scales; subtracted
    units: Array | None = None  # [b, 1] float16
    offset_units: Array | None = None  # [b, 1] float16


class BlockType(NamedTuple):
    """One block type: how to decode a block, and the constants of all its blocks."""

    decode: Callable[[Array], Decoded]  # from [b, nbytes] uint8
    size: int  # entries of a block
    nbytes: int
    group: int  # neighbouring entries with one scale
    bits: int
    zero: int
    table: tuple[int, ...] | None = None  # values of codes, around 0


def decode_rows(name: str, rows: Tensor) -> GroupedMatrix:
    """The matrix of rows of blocks [N, bytes of a row] uint8; raises UnsupportedError for types not in BLOCK_TYPES.

    Scales that are not finite raise CheckpointError.
    """
    if name not in BLOCK_TYPES:
        raise UnsupportedError(
            f"tensors of type {name} are not supported; supported are F32, F16, BF16 and {', '.join(BLOCK_TYPES)}; "
            "take the model in one of these types"
        )
    kind, num_rows = BLOCK_TYPES[name], rows.shape[0]
    decoded = _decode(kind, rows.reshape(-1, kind.nbytes).numpy())
    if not all(np.isfinite(numbers).all() for numbers in decoded[1:] if numbers is not None):
        raise CheckpointError(f"its {name} blocks have scales that are not finite; the file is damaged, copy it again")

    def by_row(numbers: Array | None) -> Tensor | None:
        return None if numbers is None else torch.from_numpy(numbers).reshape(num_rows, -1)

    return GroupedMatrix(
        codes=torch.from_numpy(decoded.codes).reshape(num_rows, -1),
        scales=torch.from_numpy(decoded.scales).reshape(num_rows, -1),
        bits=kind.bits,
        zero=kind.zero,
        group_size=kind.group,
        offsets=by_row(decoded.offsets),
        units=by_row(decoded.units),
        offset_units=by_row(decoded.offset_units),
        table=None if kind.table is None else torch.tensor([value + kind.zero for value in kind.table]).byte(),
    )


def _decode(kind: BlockType, blocks: Array) -> Decoded:
    """Decode blocks in portions, so that intermediate arrays stay small."""
    step, count = _PORTION // kind.size, len(blocks)
    starts = range(0, count, step)
    codes = np.empty((count, kind.size), np.uint8)

    def work(start: int) -> tuple[Array | None, ...]:
        part = kind.decode(blocks[start : start + step])
        codes[start : start + step] = part.codes
        return part[1:]

    if len(starts) == 1:
        found = [work(0)]
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            found = list(pool.map(work, starts))
    scales, *others = (_concatenated(parts) for parts in zip(*found, strict=True))
    assert scales is not None
    return Decoded(codes, scales, *others)


def _concatenated(parts: Sequence[Array | None]) -> Array | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None


def join_matrices(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """One matrix with the rows of all, which may be of different block types; every value stays as it is.

    The result has the smallest group size, the largest zero point and as many bits as its codes then need. It keeps
    units if all matrices have units for the same number of inputs, and a table if all have the same one.
    """
    if len(matrices) == 1:
        return matrices[0]
    if len({(matrix.units is None, matrix.group_size * matrix.groups_a_unit) for matrix in matrices}) > 1:
        matrices = [matrix.multiplied_out() for matrix in matrices]
    if len({None if matrix.table is None else tuple(matrix.table.tolist()) for matrix in matrices}) > 1:
        matrices = [matrix.looked_up() for matrix in matrices]
    group, zero = min(matrix.group_size for matrix in matrices), max(matrix.zero for matrix in matrices)
    highest = max((1 << matrix.bits) - 1 + zero - matrix.zero for matrix in matrices)
    has_offsets = any(matrix.offsets is not None for matrix in matrices)
    return GroupedMatrix(
        codes=torch.cat([matrix.codes + (zero - matrix.zero) for matrix in matrices]),
        scales=torch.cat([_regrouped(matrix.scales, matrix.group_size // group) for matrix in matrices]),
        bits=4 if matrices[0].table is not None else highest.bit_length(),
        zero=zero,
        group_size=group,
        offsets=torch.cat([_offsets(matrix, group) for matrix in matrices]) if has_offsets else None,
        units=_units([matrix.units for matrix in matrices]),
        offset_units=_units([_offset_units(matrix) for matrix in matrices]) if has_offsets else None,
        table=matrices[0].table,
    )


def _units(tables: Sequence[Tensor | None]) -> Tensor | None:
    present = [table for table in tables if table is not None]
    return torch.cat(present) if present else None


def _offset_units(matrix: GroupedMatrix) -> Tensor | None:
    if matrix.units is None or matrix.offset_units is not None:
        return matrix.offset_units
    return torch.zeros_like(matrix.units)


def _regrouped(table: Tensor, factor: int) -> Tensor:
    """The table after every group is split into `factor` groups."""
    return table.repeat_interleave(factor, dim=1) if factor > 1 else table


def _offsets(matrix: GroupedMatrix, group: int) -> Tensor:
    table = torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
    return _regrouped(table, matrix.group_size // group)


# -- pieces of blocks ---------------------------------------------------------------------------------------------


def _unit(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block -> [b, 1] float16."""
    return blocks[:, at : at + 2].copy().view("<f2")


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as float32."""
    return _unit(blocks, at).astype(np.float32)


def _spread(packed: Array, width: int, bits: int) -> Array:
    """Unpack runs of `width` bytes, 8 / bits planes each: the lowest bits of all bytes first -> [b, n]."""
    runs = packed.reshape(len(packed), -1, width)  # [b, runs, width]
    planes = np.empty((len(packed), runs.shape[1], 8 // bits, width), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for plane in range(8 // bits):
        np.right_shift(runs, np.uint8(bits * plane), out=planes[:, :, plane])
    np.bitwise_and(planes, mask, out=planes)
    return planes.reshape(len(packed), -1)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """32 bits, one an entry, lowest first -> [b, 32], 0 or 16."""
    bits: Array = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return bits << 4


def _scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of 6 bits each in 12 bytes (get_scale_min_k4) -> [b, 8] and [b, 8] int8."""
    low, high, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (mixed & 15) | (low >> 2 & 48)), axis=1)
    minima = np.concatenate((high & 63, (mixed >> 4) | (high >> 2 & 48)), axis=1)
    return scales.view(np.int8), minima.view(np.int8)


# -- block types --------------------------------------------------------------------------------------------------


def _q8_0(blocks: Array) -> Decoded:
    return Decoded(blocks[:, 2:] ^ 128, _half(blocks, 0))  # two's complement: flipping the sign bit adds 128


def _q4_0(blocks: Array) -> Decoded:
    return Decoded(_spread(blocks[:, 2:], 16, 4), _half(blocks, 0))


def _q4_1(blocks: Array) -> Decoded:
    return Decoded(_spread(blocks[:, 4:], 16, 4), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Array) -> Decoded:
    return Decoded(_spread(blocks[:, 6:], 16, 4) | _fifth_bits(blocks, 2), _half(blocks, 0))


def _q5_1(blocks: Array) -> Decoded:
    return Decoded(_spread(blocks[:, 8:], 16, 4) | _fifth_bits(blocks, 4), _half(blocks, 0), -_half(blocks, 2))


def _q2_k(blocks: Array) -> Decoded:
    packed = blocks[:, :16]
    scales, minima = (packed & 15).view(np.int8), (packed >> 4).view(np.int8)
    return Decoded(_spread(blocks[:, 16:80], 32, 2), scales, minima, _unit(blocks, 80), _unit(blocks, 82))


def _q3_k(blocks: Array) -> Decoded:
    low, third = _spread(blocks[:, 32:96], 32, 2), _spread(blocks[:, :32], 32, 1)
    scales = _spread(blocks[:, 96:104], 8, 4) | _spread(blocks[:, 104:108], 4, 2) << 4  # [b, 16], 32 stands for 0
    return Decoded(low | third << 2, (scales - 32).view(np.int8), units=_unit(blocks, 108))


def _q4_k(blocks: Array) -> Decoded:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    return Decoded(_spread(blocks[:, 16:], 32, 4), scales, minima, _unit(blocks, 0), _unit(blocks, 2))


def _q5_k(blocks: Array) -> Decoded:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    codes = _spread(blocks[:, 48:], 32, 4) | _spread(blocks[:, 16:48], 32, 1) << 4
    return Decoded(codes, scales, minima, _unit(blocks, 0), _unit(blocks, 2))


def _q6_k(blocks: Array) -> Decoded:
    codes = _spread(blocks[:, :128], 64, 4) | _spread(blocks[:, 128:192], 32, 2) << 4
    return Decoded(codes, blocks[:, 192:208].view(np.int8), units=_unit(blocks, 208))


def _iq4_nl(blocks: Array) -> Decoded:
    return Decoded(_spread(blocks[:, 2:], 16, 4), _half(blocks, 0))


def _iq4_xs(blocks: Array) -> Decoded:
    low, high = _spread(blocks[:, 4:8], 1, 4), _spread(blocks[:, 2:4], 1, 2)  # [b, 8] each
    scales = (low | high << 4) - 32
    return Decoded(_spread(blocks[:, 8:], 16, 4), scales.view(np.int8), units=_unit(blocks, 0))


BLOCK_TYPES = {
    "Q8_0": BlockType(_q8_0, size=32, nbytes=34, group=32, bits=8, zero=128),
    "Q4_0": BlockType(_q4_0, size=32, nbytes=18, group=32, bits=4, zero=8),
    "Q4_1": BlockType(_q4_1, size=32, nbytes=20, group=32, bits=4, zero=0),
    "Q5_0": BlockType(_q5_0, size=32, nbytes=22, group=32, bits=5, zero=16),
    "Q5_1": BlockType(_q5_1, size=32, nbytes=24, group=32, bits=5, zero=0),
    "Q2_K": BlockType(_q2_k, size=256, nbytes=84, group=16, bits=2, zero=0),
    "Q3_K": BlockType(_q3_k, size=256, nbytes=110, group=16, bits=3, zero=4),
    "Q4_K": BlockType(_q4_k, size=256, nbytes=144, group=32, bits=4, zero=0),
    "Q5_K": BlockType(_q5_k, size=256, nbytes=176, group=32, bits=5, zero=0),
    "Q6_K": BlockType(_q6_k, size=256, nbytes=210, group=16, bits=6, zero=32),
    "IQ4_NL": BlockType(_iq4_nl, size=32, nbytes=18, group=32, bits=4, zero=_IQ4_ZERO, table=IQ4_VALUES),
    "IQ4_XS": BlockType(_iq4_xs, size=256, nbytes=136, group=32, bits=4, zero=_IQ4_ZERO, table=IQ4_VALUES),
}
