"""GGUF's block types of 1 to 3 bits whose codes stand for points of a grid.

Knows: their layout, byte by byte. Does not know: the grids, which the `gguf` package has.
Every entry has one of at most 16 values, whichever point it belongs to, so that four bits hold it; IQ1_S is left with
its three values and an offset for each group.
Source: ggml-quants.c (dequantize_row_*) and ggml-common.h (the structs).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from forerun.quant.gguf_blocks import BYTE_ZERO, Array, BlockType, Decoded, half, spread

_SIGN = 8  # of a code: its entry is negative, or in IQ1_M an eighth less than the point instead of more
_SIGN_BYTES = np.array([seven | seven.bit_count() % 2 << 7 for seven in range(128)], np.uint8)  # even parity
_UNUSED = (0,) * 5
_IQ2_VALUES = (8, 25, 43, *_UNUSED, -8, -25, -43, *_UNUSED)
_IQ3_XXS_VALUES = (2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31)  # half of the grid's
_IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_IQ1_VALUES = (-7, 1, 9, *_UNUSED, -9, -1, 7, *_UNUSED)  # eighths


@cache
def _grid(name: str) -> Array:
    """The points of a type's grid -> [points, entries of a point] uint8, which of the grid's values an entry has."""
    from gguf import quants  # here, since its import takes longer than that of all of this

    kind = getattr(quants, name)
    kind.init_grid()
    values: Array = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape))
    return values.astype(np.uint8)


def _codes(name: str, points: Array, signs: Array) -> Array:
    """points [b, n] of the grid, signs [b, 32] bytes, a bit an entry, lowest first -> codes [b, 256]."""
    codes: Array = _grid(name)[points].reshape(len(points), -1)
    codes |= np.unpackbits(signs, axis=1, bitorder="little") * np.uint8(_SIGN)
    return codes


def _words(blocks: Array, start: int, end: int, size: int) -> Array:
    """Bytes start .. end of every block as unsigned integers of `size` bytes -> [b, n]."""
    return blocks[:, start:end].copy().view(f"<u{size}")


def _cut(words: Array, width: int) -> Array:
    """The four lowest runs of `width` bits of every word, the lowest first -> [b, 4 * n]."""
    parts: Array = words[:, :, None] >> np.arange(0, 4 * width, width, dtype=words.dtype) & ((1 << width) - 1)
    return parts.reshape(len(words), -1)


def _odd(counts: Array) -> Array:
    """2 * count + 1, as int8."""
    odd: Array = (2 * counts + 1).astype(np.int8)
    return odd


def _iq2_xxs(blocks: Array) -> Decoded:
    points, rest = blocks[:, 2:66].reshape(-1, 8, 2, 4)[:, :, 0].reshape(-1, 32), _words(blocks, 2, 66, 4)[:, 1::2]
    codes = _codes("IQ2_XXS", points, _SIGN_BYTES[_cut(rest, 7)])
    return Decoded(codes, _odd(rest >> 28), units=half(blocks, 0) / 8)


def _iq2_xs(blocks: Array) -> Decoded:
    words = _words(blocks, 2, 66, 2)
    codes = _codes("IQ2_XS", words & 511, _SIGN_BYTES[words >> 9])
    return Decoded(codes, _odd(spread(blocks[:, 66:74], 1, 4)), units=half(blocks, 0) / 8)


def _iq2_s(blocks: Array) -> Decoded:
    points = blocks[:, 2:34] | spread(blocks[:, 66:74], 1, 2).astype(np.uint16) << 8
    scales = _odd(spread(blocks[:, 74:82], 1, 4))
    return Decoded(_codes("IQ2_S", points, blocks[:, 34:66]), scales, units=half(blocks, 0) / 8)


def _iq3_xxs(blocks: Array) -> Decoded:
    rest = _words(blocks, 66, 98, 4)
    codes = _codes("IQ3_XXS", blocks[:, 2:66], _SIGN_BYTES[_cut(rest, 7)])
    return Decoded(codes, _odd(rest >> 28), units=half(blocks, 0) / 2)


def _iq3_s(blocks: Array) -> Decoded:
    points = blocks[:, 2:66] | spread(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    scales = _odd(spread(blocks[:, 106:110], 1, 4))
    return Decoded(_codes("IQ3_S", points, blocks[:, 74:106]), scales, units=half(blocks, 0))


def _iq1_s(blocks: Array) -> Decoded:
    words, unit = _words(blocks, 34, 50, 2), half(blocks, 0)
    points = blocks[:, 2:34] | _cut(words, 3) << 8
    scales = _odd(words >> 12 & 7)
    codes = _grid("IQ1_S")[points].reshape(len(blocks), -1)
    return Decoded(codes, scales, np.where(words >> 15, scales, -scales), unit, unit / 8)


def _iq1_m(blocks: Array) -> Decoded:
    words, high = _words(blocks, 48, 56, 2), spread(blocks[:, 32:48], 1, 4)  # [b, 4], [b, 32]
    points = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    bits = (words >> 12) << np.arange(0, 16, 4, dtype=np.uint16)  # the float16, a quarter in each word
    unit = np.bitwise_or.reduce(bits, axis=1, keepdims=True).view("<f2").astype(np.float32)
    return Decoded(_codes("IQ1_M", points, (high >> 3) * np.uint8(255)), _odd(_cut(words, 3)), units=unit / 8)


GRID_TYPES = {
    "IQ1_S": BlockType(_iq1_s, size=256, nbytes=50, group=32, bits=2, zero=1),
    "IQ1_M": BlockType(_iq1_m, size=256, nbytes=56, group=16, bits=4, zero=BYTE_ZERO, table=_IQ1_VALUES),
    "IQ2_XXS": BlockType(_iq2_xxs, size=256, nbytes=66, group=32, bits=4, zero=BYTE_ZERO, table=_IQ2_VALUES),
    "IQ2_XS": BlockType(_iq2_xs, size=256, nbytes=74, group=16, bits=4, zero=BYTE_ZERO, table=_IQ2_VALUES),
    "IQ2_S": BlockType(_iq2_s, size=256, nbytes=82, group=16, bits=4, zero=BYTE_ZERO, table=_IQ2_VALUES),
    "IQ3_XXS": BlockType(_iq3_xxs, size=256, nbytes=98, group=32, bits=4, zero=BYTE_ZERO, table=_IQ3_XXS_VALUES),
    "IQ3_S": BlockType(_iq3_s, size=256, nbytes=110, group=32, bits=4, zero=BYTE_ZERO, table=_IQ3_S_VALUES),
}
