"""Scales of a grouped matrix in the fewest bytes that hold them exactly: what every backend keeps.

Knows: the kinds there are, and which of them holds a matrix's scales. Does not know: codes, nor where a backend puts
scales.

    kind             a group's scale and offset                                              groups of a unit
    float32          both as they are                                                        none
    float16          likewise, exactly                                                       none
    bytes            signed bytes                                                            any number
    nibbles          one byte for both, the scale below 16 in its low half                   likewise
    powers           a byte e for 2^(e - 128), no offsets                                    none
    float8           e4m3 without a sign of twice the scale / unit_scale, no offsets         none
    odd nibbles      half a byte n for the scale 2 n + 1, the even group's low, no offsets   an even number
    signed nibbles   likewise n < 8 for the scale 8 (2 n + 1), with an offset of 2 n + 1,    likewise; one unit for both
                     which is negative unless 8 is added to n
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.grouped import GroupedMatrix

# In the order of csrc's ScaleKind.
KINDS = ("float32", "float16", "bytes", "nibbles", "powers", "float8", "odd nibbles", "signed nibbles")


class StoredScales(NamedTuple):
    """What is kept of a matrix's scales."""

    kind: str
    scales: Tensor  # [N, num_groups], or half as many bytes where a group has half of one
    offsets: Tensor | None = None  # likewise, where the scales' bytes do not hold them
    units: Tensor | None = None  # [N, num_units] float16
    offset_units: Tensor | None = None  # likewise, where offsets have units of their own


def stored_scales(matrix: GroupedMatrix) -> StoredScales:
    """The kind that fits, and the numbers; experts of one type get the same kind, even one that is all zeros."""
    if matrix.units is None:
        return _floats(matrix)
    if matrix.groups_a_unit % 2 == 0 and (nibbles := _odd_nibbles(matrix)) is not None:
        kind = "odd nibbles" if matrix.offsets is None else "signed nibbles"
        return StoredScales(kind, nibbles[:, 0::2] | nibbles[:, 1::2] << 4, units=matrix.units)
    scales, offsets = matrix.scales, matrix.offsets
    if offsets is not None and matrix.bits == 2 and bool(((scales | offsets) & -16 == 0).all()):
        both = (scales | offsets << 4).view(torch.uint8)
        return StoredScales("nibbles", both, None, matrix.units, matrix.offset_units)
    return StoredScales("bytes", scales, offsets, matrix.units, matrix.offset_units)


def _odd_nibbles(matrix: GroupedMatrix) -> Tensor | None:
    """Scales 2 n + 1 as n; scales 8 (2 n + 1) with offsets of 2 n + 1 as n, and 8 more where those are positive."""
    scales, offsets = matrix.scales, matrix.offsets
    odd = scales if offsets is None else offsets.abs()
    if not bool(((odd & 1 == 1) & (odd > 0) & (odd < (32 if offsets is None else 16))).all()):
        return None
    if offsets is None:
        return (odd >> 1).byte()
    assert matrix.units is not None and matrix.offset_units is not None
    same = torch.equal(scales, 8 * odd) and torch.equal(matrix.units, matrix.offset_units)
    return ((odd >> 1) | (offsets > 0).char() << 3).byte() if same else None


def _floats(matrix: GroupedMatrix) -> StoredScales:
    """Float32 scales and offsets in the fewest bytes that hold them exactly."""
    scales = matrix.scales
    if matrix.table is not None and matrix.offsets is None:
        # by the group size, that of MXFP4 or of NVFP4: an expert's numbers alone may fit both
        kind, as_bytes = ("powers", _power_bytes) if matrix.group_size == 32 else ("float8", _float8_bytes)
        possible = kind == "float8" or matrix.unit_scale == 1
        if possible and as_bytes(scales[:1]) is not None and (stored := as_bytes(scales)) is not None:
            return StoredScales(kind, stored)
    matrix = matrix.multiplied_out()
    scales, offsets = matrix.scales, matrix.offsets
    held = (scales,) if offsets is None else (scales, offsets)
    if all(torch.equal(values.half().float(), values) for values in held):
        return StoredScales("float16", scales.half(), None if offsets is None else offsets.half())
    return StoredScales("float32", scales, offsets)


def _power_bytes(scales: Tensor) -> Tensor | None:
    """Powers of two: their exponents, counted from -128."""
    mantissas, exponents = torch.frexp(scales)
    fit = (mantissas == 0.5) & (exponents >= -127)
    return (exponents + 127).byte() if bool(fit.all()) else None


def _float8_bytes(scales: Tensor) -> Tensor | None:
    """Halves of numbers that e4m3 has."""
    small = (2 * scales).to(torch.float8_e4m3fn)
    exact = torch.equal(small.float(), 2 * scales) and not bool(scales.signbit().any())
    return small.view(torch.uint8) if exact else None
