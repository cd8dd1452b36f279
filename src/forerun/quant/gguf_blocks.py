"""What is in the blocks of GGUF's quantized tensor types: small integers, and the scales that stand beside them.

Knows: the layout of every block type it lists, byte by byte. Does not know: files, matrices; nor the types whose
codes stand for points of a grid (`gguf_grids`). Nothing is rounded: codes are the stored integers, scales their
float16, or small integers that multiply one.
Source: ggml-quants.c (dequantize_row_*) and ggml-common.h (the structs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.kernels.grouped import PointGrid

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # ggml: kvalues_iq4nl
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # floats of 4 bits, doubled
BYTE_ZERO = 128  # what stands for 0 in a table of bytes

Array = npt.NDArray[Any]


class Decoded(NamedTuple):
    """Blocks taken apart; b counts all blocks."""

    codes: Array  # [b, block size] uint8
    scales: Array  # [b, groups of a block] float32, or int8 multiples of a unit
    offsets: Array | None = None  # like scales; subtracted
    units: Array | None = None  # [b, 1] float16
    offset_units: Array | None = None  # [b, 1] float16
    points: Array | None = None  # [b, runs] int16, with a grid: whose points the codes are


class BlockType(NamedTuple):
    """One block type: how to decode a block, and the constants of all its blocks."""

    decode: Callable[[Array], Decoded]  # from [b, nbytes] uint8
    size: int  # entries of a block
    nbytes: int
    group: int  # neighbouring entries with one scale
    bits: int
    zero: int
    table: tuple[int, ...] | None = None  # values of codes, around 0
    unit_scale: float = 1.0  # see GroupedMatrix
    grid: Callable[[], PointGrid] | None = None


# -- pieces of blocks ---------------------------------------------------------------------------------------------


def unit(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block -> [b, 1] float16."""
    return blocks[:, at : at + 2].copy().view("<f2")


def half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as float32."""
    return unit(blocks, at).astype(np.float32)


def spread(packed: Array, width: int, bits: int) -> Array:
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
    return Decoded(blocks[:, 2:] ^ 128, half(blocks, 0))  # two's complement: flipping the sign bit adds 128


def _q4_0(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, 2:], 16, 4), half(blocks, 0))


def _q4_1(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, 4:], 16, 4), half(blocks, 0), -half(blocks, 2))


def _q5_0(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, 6:], 16, 4) | _fifth_bits(blocks, 2), half(blocks, 0))


def _q5_1(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, 8:], 16, 4) | _fifth_bits(blocks, 4), half(blocks, 0), -half(blocks, 2))


def _q2_k(blocks: Array) -> Decoded:
    packed = blocks[:, :16]
    scales, minima = (packed & 15).view(np.int8), (packed >> 4).view(np.int8)
    return Decoded(spread(blocks[:, 16:80], 32, 2), scales, minima, unit(blocks, 80), unit(blocks, 82))


def _q3_k(blocks: Array) -> Decoded:
    low, third = spread(blocks[:, 32:96], 32, 2), spread(blocks[:, :32], 32, 1)
    scales = spread(blocks[:, 96:104], 8, 4) | spread(blocks[:, 104:108], 4, 2) << 4  # [b, 16], 32 stands for 0
    return Decoded(low | third << 2, (scales - 32).view(np.int8), units=unit(blocks, 108))


def _q4_k(blocks: Array) -> Decoded:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    return Decoded(spread(blocks[:, 16:], 32, 4), scales, minima, unit(blocks, 0), unit(blocks, 2))


def _q5_k(blocks: Array) -> Decoded:
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    codes = spread(blocks[:, 48:], 32, 4) | spread(blocks[:, 16:48], 32, 1) << 4
    return Decoded(codes, scales, minima, unit(blocks, 0), unit(blocks, 2))


def _q6_k(blocks: Array) -> Decoded:
    codes = spread(blocks[:, :128], 64, 4) | spread(blocks[:, 128:192], 32, 2) << 4
    return Decoded(codes, blocks[:, 192:208].view(np.int8), units=unit(blocks, 208))


def _iq4_nl(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, 2:], 16, 4), half(blocks, 0))


def _iq4_xs(blocks: Array) -> Decoded:
    low, high = spread(blocks[:, 4:8], 1, 4), spread(blocks[:, 2:4], 1, 2)  # [b, 8] each
    scales = (low | high << 4) - 32
    return Decoded(spread(blocks[:, 8:], 16, 4), scales.view(np.int8), units=unit(blocks, 0))


def _tq2_0(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, :64], 32, 2), half(blocks, 64))


def _q2_0(blocks: Array) -> Decoded:
    return Decoded(spread(blocks[:, 2:], 1, 2), half(blocks, 0))


def _mxfp4(blocks: Array) -> Decoded:
    exponents = blocks[:, :1].astype(np.int32)
    return Decoded(spread(blocks[:, 1:], 16, 4), np.ldexp(np.float32(1), exponents - 128))  # half, for doubled values


def _nvfp4(blocks: Array) -> Decoded:
    exponents, fractions = (blocks[:, :4] >> 3 & 15).astype(np.int32), (blocks[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(8 + fractions, exponents - 11)  # half of 2 ** (exponent - 7) * (1 + fraction / 8)
    scales = np.where(exponents == 0, np.ldexp(fractions, -10), normal)
    return Decoded(spread(blocks[:, 4:], 8, 4), np.where(blocks[:, :4] == 127, np.float32(0), scales))


INTEGER_TYPES = {
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
    "IQ4_NL": BlockType(_iq4_nl, size=32, nbytes=18, group=32, bits=4, zero=BYTE_ZERO, table=IQ4_VALUES),
    "IQ4_XS": BlockType(_iq4_xs, size=256, nbytes=136, group=32, bits=4, zero=BYTE_ZERO, table=IQ4_VALUES),
    "TQ2_0": BlockType(_tq2_0, size=256, nbytes=66, group=256, bits=2, zero=1),
    "Q2_0": BlockType(_q2_0, size=64, nbytes=18, group=64, bits=2, zero=1),
    "MXFP4": BlockType(_mxfp4, size=32, nbytes=17, group=32, bits=4, zero=BYTE_ZERO, table=E2M1_VALUES),
    "NVFP4": BlockType(_nvfp4, size=64, nbytes=36, group=16, bits=4, zero=BYTE_ZERO, table=E2M1_VALUES),
}
