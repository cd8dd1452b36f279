"""GGUF's block types of 1 to 3 bits whose codes stand for points of a grid.

Knows: their layout, byte by byte. Does not know: the grids, which the `gguf` package has.
Every entry has one of at most 16 values, whichever point it belongs to, so that four bits hold it; IQ1_S is left with
its three values and an offset for each group. TQ1_0 and Q1_0 count as two of them: eight digits in base 3 take 13 bits,
eight signs a byte.
Source: ggml-quants.c (dequantize_row_*) and ggml-common.h (the structs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch

from forerun.kernels.grouped import PointGrid
from forerun.quant.gguf_blocks import BYTE_ZERO, Array, BlockType, Decoded, half, spread, unit

_SIGN = 8  # of a code: its entry is negative, or in IQ1_M an eighth less than the point's instead of more
_SIGN_BYTES = np.array([seven | seven.bit_count() % 2 << 7 for seven in range(128)], np.uint8)  # even parity
_UNUSED = (0,) * 5
_IQ2_VALUES = (8, 25, 43, *_UNUSED, -8, -25, -43, *_UNUSED)
_IQ3_XXS_VALUES = (2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31)  # half of the grid's
_IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_IQ1_VALUES = (-7, 1, 9, *_UNUSED, -9, -1, 7, *_UNUSED)  # eighths
_TRITS = 8  # of a point of TQ1_0
Values = tuple[int, ...]
Decode = Callable[[Array], Decoded]


@cache
def _points(name: str) -> Array:
    """The points of a type's grid -> [points, entries of a point] uint8, which of the grid's values an entry has.

    TQ1_0 has every run of eight digits in base 3, the lowest first; Q1_0 every run of eight signs, 0 or 2 around 1.
    """
    if name == "TQ1_0":
        return (np.arange(3**_TRITS)[:, None] // 3 ** np.arange(_TRITS) % 3).astype(np.uint8)
    if name == "Q1_0":
        return np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint8(2)
    from gguf import quants  # here, since its import takes longer than that of all of this

    kind = getattr(quants, name)
    kind.init_grid()
    values: Array = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint8)
    return values


@cache
def _grid(name: str, signs: int) -> PointGrid:
    return PointGrid(torch.from_numpy(np.ascontiguousarray(_points(name))), signs)


def _codes(name: str, points: Array, signs: Array | None = None) -> Array:
    """points [b, n] of the grid, signs [b, 32] bytes, a bit an entry, lowest first -> codes [b, 256]."""
    codes: Array = _points(name)[points].reshape(len(points), -1)
    if signs is not None:
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


def _on_grid(codes: Array, scales: Array, units: Array, points: Array, offsets: Array | None = None) -> Decoded:
    offset_units = None if offsets is None else units
    return Decoded(codes, scales, offsets, units, offset_units, points.astype(np.int16))


def _iq2_xxs(blocks: Array) -> Decoded:
    points, rest = blocks[:, 2:66].reshape(-1, 8, 2, 4)[:, :, 0].reshape(-1, 32), _words(blocks, 2, 66, 4)[:, 1::2]
    codes = _codes("IQ2_XXS", points, _SIGN_BYTES[_cut(rest, 7)])
    return _on_grid(codes, _odd(rest >> 28), unit(blocks, 0), points)


def _iq2_xs(blocks: Array) -> Decoded:
    words = _words(blocks, 2, 66, 2)
    points = words & 511
    codes = _codes("IQ2_XS", points, _SIGN_BYTES[words >> 9])
    return _on_grid(codes, _odd(spread(blocks[:, 66:74], 1, 4)), unit(blocks, 0), points)


def _iq2_s(blocks: Array) -> Decoded:
    points = blocks[:, 2:34] | spread(blocks[:, 66:74], 1, 2).astype(np.uint16) << 8
    scales = _odd(spread(blocks[:, 74:82], 1, 4))
    return _on_grid(_codes("IQ2_S", points, blocks[:, 34:66]), scales, unit(blocks, 0), points)


def _iq3_xxs(blocks: Array) -> Decoded:
    points, rest = blocks[:, 2:66], _words(blocks, 66, 98, 4)
    codes = _codes("IQ3_XXS", points, _SIGN_BYTES[_cut(rest, 7)])
    return _on_grid(codes, _odd(rest >> 28), unit(blocks, 0), points)


def _iq3_s(blocks: Array) -> Decoded:
    points = blocks[:, 2:66] | spread(blocks[:, 66:74], 1, 1).astype(np.uint16) << 8
    scales = _odd(spread(blocks[:, 106:110], 1, 4))
    return _on_grid(_codes("IQ3_S", points, blocks[:, 74:106]), scales, unit(blocks, 0), points)


def _iq1_s(blocks: Array) -> Decoded:
    words = _words(blocks, 34, 50, 2)
    points = blocks[:, 2:34] | _cut(words, 3) << 8
    odd = _odd(words >> 12 & 7)  # an eighth of a group's scale
    offsets = np.where(words >> 15, odd, -odd)
    return _on_grid(_codes("IQ1_S", points), 8 * odd, unit(blocks, 0), points, offsets)


def _iq1_m(blocks: Array) -> Decoded:
    words, high = _words(blocks, 48, 56, 2), spread(blocks[:, 32:48], 1, 4)  # [b, 4], [b, 32]
    points = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    bits = (words >> 12) << np.arange(0, 16, 4, dtype=np.uint16)  # the float16, a quarter in each word
    units = np.bitwise_or.reduce(bits, axis=1, keepdims=True).view("<f2")
    codes = _codes("IQ1_M", points, (high >> 3) * np.uint8(255))
    return _on_grid(codes, _odd(_cut(words, 3)), units, points)


def _tq1_0(blocks: Array) -> Decoded:
    digits = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    codes = np.concatenate(digits, axis=1)
    points = codes.reshape(len(blocks), -1, _TRITS) @ (3 ** np.arange(_TRITS)).astype(np.int16)
    return Decoded(codes, half(blocks, 52), points=points.astype(np.int16))


def _trits(packed: Array, count: int) -> Array:
    """The `count` highest digits, in base 3, of bytes as fractions of 256: first the highest of all bytes -> [b, n]."""
    fractions = packed[:, None] * (3 ** np.arange(count)).astype(np.uint8)[:, None]  # less their whole parts
    digits = (fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return digits.reshape(len(packed), -1)


def _q1_0(blocks: Array) -> Decoded:
    points = blocks[:, 2:]
    return Decoded(_codes("Q1_0", points), half(blocks, 0), points=points.astype(np.int16))


def _tabled(name: str, decode: Decode, nbytes: int, group: int, values: Values, signs: int, part: float) -> BlockType:
    """A type with a table of values; `part`: of the stored float16, what scales count."""
    return BlockType(decode, 256, nbytes, group, 4, BYTE_ZERO, values, part, partial(_grid, name, signs))


GRID_TYPES = {
    "IQ1_S": BlockType(_iq1_s, 256, 50, 32, 2, 1, unit_scale=1 / 8, grid=partial(_grid, "IQ1_S", 0)),
    "IQ1_M": _tabled("IQ1_M", _iq1_m, 56, 16, _IQ1_VALUES, 1, 1 / 8),
    "IQ2_XXS": _tabled("IQ2_XXS", _iq2_xxs, 66, 32, _IQ2_VALUES, 7, 1 / 8),
    "IQ2_XS": _tabled("IQ2_XS", _iq2_xs, 74, 16, _IQ2_VALUES, 7, 1 / 8),
    "IQ2_S": _tabled("IQ2_S", _iq2_s, 82, 16, _IQ2_VALUES, 8, 1 / 8),
    "IQ3_XXS": _tabled("IQ3_XXS", _iq3_xxs, 98, 32, _IQ3_XXS_VALUES, 7, 1 / 2),
    "IQ3_S": _tabled("IQ3_S", _iq3_s, 110, 32, _IQ3_S_VALUES, 8, 1),
    "TQ1_0": BlockType(_tq1_0, 256, 54, 256, 2, 1, grid=partial(_grid, "TQ1_0", 0)),
    "Q1_0": BlockType(_q1_0, 128, 18, 128, 2, 1, grid=partial(_grid, "Q1_0", 0)),
}
