"""What a packed matrix of small integers holds, put together in registers: codes, and scales by group.

Knows: planes of bits, tables of points, kinds of scales (`grouped_layout`, `stored_scales`). Does not know: products.

All loads of bytes that several pieces share are written alike, so that the compiler makes one of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forerun.kernels.triton import grouped_layout

PIECE = tl.constexpr(grouped_layout.PIECE)


@triton.jit
def section_tiles(
    codes, columns, section, SECTIONS: tl.constexpr, PIECES: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Where the first tile of a section of PIECES pieces lies, for outputs `columns`.

    -> pointers [columns, PIECE / SPAN] of bytes, or with a SPAN of 8 [columns, 1] of words of four bytes: loads of
    less could not run ahead.
    """
    width: tl.constexpr = PIECE // SPAN
    size: tl.constexpr = PIECES * BITS // 8 * 16 * width  # bytes of a section of 16 outputs
    at = ((columns // 16).to(tl.int64) * SECTIONS + section) * size + columns % 16 * width
    if SPAN == 8:
        return codes.to(tl.pointer_type(tl.int32)) + (at // 4)[:, None]
    else:
        return codes + at[:, None] + tl.arange(0, width)[None, :]


@triton.jit
def load_codes(
    tiles, table, inside, piece: tl.constexpr, PIECES: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr, RUN: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """The codes, or the values of the table, of one piece of a section -> [columns, PIECE] int8."""
    kind: tl.constexpr = tl.uint8 if BITS <= 8 else tl.int32
    numbers = tl.zeros((tiles.shape[0], PIECE // SPAN), kind)
    for plane in tl.static_range(BITS // 8):
        numbers |= load_plane(tiles, inside, piece, 8 * plane, 8, PIECES, SPAN).to(kind) << 8 * plane
    low: tl.constexpr = BITS // 8 * 8
    if BITS & 4:
        numbers |= load_plane(tiles, inside, piece, low, 4, PIECES, SPAN).to(kind) << low
    if BITS & 2:
        numbers |= load_plane(tiles, inside, piece, low + (BITS & 4), 2, PIECES, SPAN).to(kind) << low + (BITS & 4)
    if BITS & 1:
        numbers |= load_plane(tiles, inside, piece, low + (BITS & 6), 1, PIECES, SPAN).to(kind) << low + (BITS & 6)
    if SPAN == 1:
        return numbers.to(tl.int8)
    else:
        return look_up(table, numbers.to(tl.int32), BITS, SPAN, RUN, SIGNS)


@triton.jit
def load_plane(
    tiles, inside, piece: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Bits LOW .. LOW + WIDTH - 1 of a piece's numbers, moved to the bottom -> [columns, PIECE / SPAN]."""
    tile: tl.constexpr = LOW * PIECES // 8 + piece * WIDTH // 8
    if SPAN == 8:
        words = tl.load(tiles + tile * 16, mask=inside, other=0)
        packed = (words >> tl.arange(0, 4)[None, :] * 8) & 255
    else:
        packed = tl.load(tiles + tile * (16 * PIECE // SPAN), mask=inside, other=0)
    if WIDTH == 8:
        return packed
    else:
        return (packed >> piece % (8 // WIDTH) * WIDTH) & ((1 << WIDTH) - 1)


@triton.jit
def look_up(table, numbers, BITS: tl.constexpr, SPAN: tl.constexpr, RUN: tl.constexpr, SIGNS: tl.constexpr):
    """The values of the points that numbers [columns, n] int32 hold -> [columns, n * SPAN] int8."""
    point: tl.constexpr = (BITS - SIGNS) * RUN // SPAN  # bits of one
    runs, places = tl.arange(0, SPAN // RUN), tl.arange(0, RUN)
    points = (numbers[:, :, None] >> (runs * point)[None, None, :]) & ((1 << point) - 1)  # [columns, n, SPAN / RUN]
    values = tl.load(table + points[:, :, :, None] * RUN + places[None, None, None, :])  # [columns, n, SPAN / RUN, RUN]
    if SIGNS:
        signs = numbers >> (BITS - SIGNS)
        if SIGNS == 7:
            odd = signs ^ (signs >> 4)
            odd = odd ^ (odd >> 2)
            signs = signs | ((odd ^ (odd >> 1)) & 1) << 7
        inputs = (runs * RUN)[:, None] + places[None, :]
        negative = ((signs[:, :, None, None] >> inputs[None, None, :, :]) & 1).to(tl.int8)
        values = (values ^ -negative) + negative
    return tl.reshape(values, (numbers.shape[0], numbers.shape[1] * SPAN))


@triton.jit
def load_scales(
    scales, offsets, units, offset_units, columns, section, step: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, STEPS: tl.constexpr, STEPS_A_GROUP: tl.constexpr,
    GROUPS_A_UNIT: tl.constexpr, SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, UNIT_SCALE: tl.constexpr,
):  # fmt: skip
    """The scale and the offset of one of a section's STEPS steps, for outputs `columns` -> twice [columns] float32."""
    group = part_of(section, step, STEPS, STEPS_A_GROUP)
    inside = columns < tl.where(group < NUM_GROUPS, NUM_OUTPUTS, 0)
    halves: tl.constexpr = SCALES == "odd nibbles" or SCALES == "signed nibbles"
    at = place_of(group // 2 if halves else group, columns, NUM_GROUPS // 2 if halves else NUM_GROUPS)
    stored = tl.load(scales + at, mask=inside, other=0)
    offset = tl.zeros(stored.shape, tl.float32)
    if SCALES == "nibbles":
        scale, offset = (stored & 15).to(tl.float32), (stored >> 4).to(tl.float32)
    elif SCALES == "powers":
        scale = power_of_byte(stored.to(tl.int32))
    elif SCALES == "float8":
        scale = half_of_float8(stored.to(tl.int32))
    elif halves:
        count = (stored.to(tl.int32) >> group % 2 * 4) & 15
        scale = ((count & 7 if HAS_OFFSETS else count) * 2 + 1).to(tl.float32)
        if HAS_OFFSETS:
            offset = tl.where(count < 8, -scale, scale)
            scale = scale * 8.0
    else:
        scale = stored.to(tl.float32)
        if HAS_OFFSETS:
            offset = tl.load(offsets + at, mask=inside, other=0).to(tl.float32)
    if GROUPS_A_UNIT:
        number = part_of(section, step, STEPS, STEPS_A_GROUP * GROUPS_A_UNIT)
        at = place_of(number, columns, NUM_GROUPS // GROUPS_A_UNIT)
        inside = columns < tl.where(number < NUM_GROUPS // GROUPS_A_UNIT, NUM_OUTPUTS, 0)
        unit = tl.load(units + at, mask=inside, other=0.0).to(tl.float32) * UNIT_SCALE
        scale = unit * scale
        if HAS_OFFSETS:
            if SCALES != "signed nibbles":
                unit = tl.load(offset_units + at, mask=inside, other=0.0).to(tl.float32) * UNIT_SCALE
            offset = unit * offset
    return scale, offset


@triton.jit
def place_of(number, columns, COUNT: tl.constexpr):
    """Where scale or unit `number` of COUNT of each of the outputs `columns` lies."""
    tiles: tl.constexpr = (COUNT + 7) // 8
    return ((columns // 16 * tiles + number // 8) * 16 + columns % 16) * 8 + number % 8


@triton.jit
def part_of(section, step: tl.constexpr, STEPS: tl.constexpr, A_PART: tl.constexpr):
    """Which part of A_PART steps a section's step is in; written the same for all where they are in one."""
    if A_PART % STEPS == 0:
        return section // (A_PART // STEPS)
    else:
        return (section * STEPS + step) // A_PART


@triton.jit
def power_of_byte(byte):
    """2 ** (byte - 128) by its bits; the two smallest are denormal."""
    return tl.where(byte > 1, (byte - 1) << 23, (byte + 1) << 21).to(tl.float32, bitcast=True)


@triton.jit
def half_of_float8(byte):
    """Half of the number whose e4m3 a byte is; the smallest are denormal there."""
    normal = ((byte << 20) + (119 << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.0009765625, normal)
