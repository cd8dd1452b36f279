"""Products with matrices of small integers, and the activations' way to integers.

Knows: the arithmetic `forerun.kernels.grouped` defines, step by step, whose bits it gives. Does not know: how a matrix
is packed (`grouped_layout`), storage formats.

Two kernels: one turns every block of a row into 8-bit integers, a scale and their sum; one multiplies integers with
integers on tensor cores, which is exact, and adds a block's product to a row's total by one fused multiply-add. Codes
are counted from their zero afterwards: sum((code - zero) * q) = sum(code * q) - zero * sum(q), exactly, in integers.
Since only the chain of fused sums rounds, and it has one order, programs may take any number of rows and outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.triton.common import EXACT, round_to_integer
from forerun.kernels.triton.grouped_layout import TILE_N, TOGETHER, TritonGrouped, TritonGroupedLayout
from forerun.kernels.triton.grouped_tiles import PIECE, load_codes, load_scales, section_tiles

WANTED_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
MAX_ROWS = 64  # rows a program multiplies with codes it has read once
MIN_ROWS = 16  # of an integer product
QUANTIZED_ROWS = 8  # of which a program turns one block into integers


class QuantizedRows(NamedTuple):
    """Rows as 8-bit integers, block by block."""

    codes: Tensor  # [rows, num_blocks, block] int8
    scales: Tensor  # [num_blocks / 8, rows, 8] float32; NaN for a block that is not finite
    sums: Tensor  # [num_steps / 8, rows, 8] int32


def grouped_linear(x: Tensor, packed: TritonGrouped, bias: Tensor | None) -> Tensor:
    """x [M, K] times the matrix transposed, plus bias [N] -> [M, N]."""
    layout, num_rows = packed.layout, x.shape[0]
    out = torch.empty(num_rows, layout.num_outputs, device=x.device)
    if num_rows:
        rows = empty_rows(layout, num_rows, x.device)
        quantize[(triton.cdiv(num_rows, QUANTIZED_ROWS), layout.num_blocks)](
            x, packed.inputs, *rows, x, x, x, num_rows, **quantize_sizes(layout), LISTED=False, GATHERED=False, **EXACT
        )
        (along_n, along_m), sizes = product_sizes(layout, num_rows)
        multiply[(along_n, 1, along_m)](
            *rows, *packed.tensors, x if bias is None else bias, out, x, num_rows,
            **sizes, HAS_BIAS=bias is not None, LISTED=False, **EXACT,
        )  # fmt: skip
    return out


def grouped_rows(token_ids: Tensor, packed: TritonGrouped) -> Tensor:
    """Rows `token_ids` [M] of what the matrix stands for -> [M, K]; NaN for those outside it."""
    layout, num_rows = packed.layout, token_ids.shape[0]
    out = torch.empty(num_rows, layout.num_inputs, device=token_ids.device)
    if num_rows:
        embed[(triton.cdiv(num_rows, TILE_N), layout.num_blocks // layout.blocks_a_section)](
            token_ids, packed.inputs, *packed.tensors, out, num_rows,
            **stored_sizes(layout), NUM_INPUTS=layout.num_inputs, ROWS=TILE_N, num_warps=2, **EXACT,
        )  # fmt: skip
    return out


def empty_rows(layout: TritonGroupedLayout, num_rows: int, device: torch.device) -> QuantizedRows:
    """Room for `num_rows` quantized rows."""
    return QuantizedRows(
        torch.empty(num_rows, layout.num_blocks, layout.block, dtype=torch.int8, device=device),
        torch.empty(-(-layout.num_blocks // TOGETHER), num_rows, TOGETHER, device=device),
        torch.empty(-(-layout.num_steps // TOGETHER), num_rows, TOGETHER, dtype=torch.int32, device=device),
    )


def bytes_a_row(layout: TritonGroupedLayout) -> int:
    """Work space a quantized row takes, at most."""
    return layout.num_blocks * (layout.block + 4) + 4 * layout.num_steps + 2 * 4 * TOGETHER


def quantize_sizes(layout: TritonGroupedLayout) -> dict[str, Any]:
    """What `quantize` is compiled for."""
    return {
        "NUM_INPUTS": layout.num_inputs,
        "NUM_BLOCKS": layout.num_blocks,
        "BLOCK": layout.block,
        "PAIRS": layout.pairs,
        "ROWS": QUANTIZED_ROWS,
        "num_warps": 4,
    }


def product_sizes(layout: TritonGroupedLayout, num_rows: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs along outputs and rows, and what `multiply` is compiled for, for up to `num_rows` rows."""
    block_m = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(num_rows)))
    block_n = TILE_N if triton.cdiv(layout.num_outputs, 2 * TILE_N) < WANTED_PROGRAMS else 2 * TILE_N
    grid = (triton.cdiv(layout.num_outputs, block_n), triton.cdiv(num_rows, block_m))
    return grid, {
        **stored_sizes(layout),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 2 if block_m == MIN_ROWS else 4,
        "num_stages": 4 if block_m == MIN_ROWS else 3,
    }


def stored_sizes(layout: TritonGroupedLayout) -> dict[str, Any]:
    """What kernels that read a packed matrix are compiled for."""
    return {
        "NUM_OUTPUTS": layout.num_outputs,
        "NUM_BLOCKS": layout.num_blocks,
        "NUM_GROUPS": layout.num_groups,
        "BLOCK": layout.block,
        "BLOCKS": layout.blocks_a_section,
        "PAIRS": layout.pairs,
        "STEPS_A_GROUP": layout.steps_a_group,
        "GROUPS_A_UNIT": layout.groups_a_unit,
        "BITS": layout.bits,
        "SPAN": layout.span,
        "RUN": layout.run,
        "SIGNS": layout.signs,
        "SHIFT": layout.shift,
        "SCALES": layout.scales,
        "HAS_OFFSETS": layout.has_offsets,
        "UNIT_SCALE": layout.unit_scale,
    }


@triton.jit(do_not_specialize=["num_rows"])
def quantize(
    x, inputs, codes, scales, sums, sources, owners, ends, num_rows,
    NUM_INPUTS: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, LISTED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """One block of ROWS rows; see `forerun.kernels.grouped`, step 2. LISTED: of slots, which are rows if GATHERED."""
    first, block = tl.program_id(0) * ROWS, tl.program_id(1)
    rows, places, end = first + tl.arange(0, ROWS), tl.arange(0, BLOCK), num_rows
    sources_of_rows = rows
    if LISTED:
        end = tl.load(ends)
        if first >= end:
            return
        inputs = tl.load(inputs + tl.load(owners + rows, mask=rows < end, other=0)).to(tl.pointer_type(tl.int32))
        columns = tl.load(inputs[:, None] + block * BLOCK + places[None, :])
        if GATHERED:
            sources_of_rows = tl.load(sources + rows, mask=rows < end, other=0)
    else:
        columns = tl.load(inputs + block * BLOCK + places[None, :] + tl.zeros((ROWS, 1), tl.int32))
    inside = rows < end
    values = tl.load(  # [ROWS, BLOCK]
        x + sources_of_rows[:, None].to(tl.int64) * NUM_INPUTS + columns,
        mask=inside[:, None] & (columns >= 0),
        other=0.0,
    )
    finite = tl.min((tl.abs(values) < float("inf")).to(tl.int32), axis=1) != 0  # [ROWS]
    scale = tl.div_rn(tl.max(tl.abs(values), axis=1), 127.0)
    inverse = tl.div_rn(1.0, scale)
    inverse = tl.where(tl.abs(inverse) < float("inf"), inverse, 0.0)
    whole = round_to_integer(values * inverse[:, None])
    whole = tl.where(finite[:, None], tl.minimum(tl.maximum(whole, -127.0), 127.0), 0.0).to(tl.int32)
    at = (rows[:, None].to(tl.int64) * NUM_BLOCKS + block) * BLOCK + places[None, :]
    tl.store(codes + at, whole.to(tl.int8), mask=inside[:, None])
    tl.store(scales + place_of_row(block, rows, num_rows), tl.where(finite, scale, float("nan")), mask=inside)
    if PAIRS:
        head = tl.sum(tl.where(places[None, :] < 16, whole, 0), axis=1)
        tl.store(sums + place_of_row(2 * block, rows, num_rows), head, mask=inside)
        tl.store(sums + place_of_row(2 * block + 1, rows, num_rows), tl.sum(whole, axis=1) - head, mask=inside)
    else:
        tl.store(sums + place_of_row(block, rows, num_rows), tl.sum(whole, axis=1), mask=inside)


@triton.jit
def place_of_row(number, rows, num_rows):
    """Where scale or sum `number` of each of `rows` lies."""
    return (number // 8 * num_rows + rows) * 8 + number % 8


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    quantized, row_scales, sums, codes, table, scales, offsets, units, offset_units, bias, out, starts, num_rows,
    NUM_OUTPUTS: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, PAIRS: tl.constexpr, STEPS_A_GROUP: tl.constexpr, GROUPS_A_UNIT: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr, RUN: tl.constexpr, SIGNS: tl.constexpr, SHIFT: tl.constexpr,
    SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, UNIT_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, LISTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M quantized rows times BLOCK_N outputs; LISTED: of the slots of one matrix. A round takes a section."""
    first, end = tl.program_id(2) * BLOCK_M, num_rows
    if LISTED:
        matrix = tl.program_id(1)
        first += tl.load(starts + matrix)
        end = tl.load(starts + matrix + 1)
        if first >= end:
            return
        whole: tl.constexpr = tl.int8 if SCALES == "bytes" else tl.uint8
        kind: tl.constexpr = tl.float32 if SCALES == "float32" else tl.float16 if SCALES == "float16" else whole
        codes, table = listed(codes, matrix, tl.uint8), listed(table, matrix, tl.int8)
        scales, offsets = listed(scales, matrix, kind), listed(offsets, matrix, kind)
        units, offset_units = listed(units, matrix, tl.float16), listed(offset_units, matrix, tl.float16)
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    none = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    steps: tl.constexpr = BLOCKS * 2 if PAIRS else BLOCKS
    pieces: tl.constexpr = BLOCK // PIECE
    inputs, inside = tl.arange(0, PIECE)[None, :], rows < end
    at_rows = quantized + rows[:, None].to(tl.int64) * (NUM_BLOCKS * BLOCK) + inputs
    for section in range(NUM_BLOCKS // BLOCKS):
        tiles = section_tiles(codes, columns, section, NUM_BLOCKS // BLOCKS, BLOCKS * pieces, BITS, SPAN)
        for number in tl.static_range(BLOCKS):
            block = section * BLOCKS + number
            a = tl.load(row_scales + place_of_row(block, rows, num_rows), mask=inside, other=0.0)  # [BLOCK_M]
            dots, head = none, none
            for piece in tl.static_range(pieces):
                q = tl.load(at_rows + block * BLOCK + piece * PIECE, mask=inside[:, None], other=0)  # [BLOCK_M, PIECE]
                w = load_codes(
                    tiles, table, columns[:, None] < NUM_OUTPUTS, number * pieces + piece, BLOCKS * pieces,
                    BITS, SPAN, RUN, SIGNS,
                )  # fmt: skip
                dots = tl.dot(q, tl.trans(w), dots, out_dtype=tl.int32)
                if PAIRS:
                    head = tl.dot(tl.where(inputs < 16, q, tl.zeros_like(q)), tl.trans(w), head, out_dtype=tl.int32)
            if PAIRS:
                total = add_step(
                    total, head, a, section, 2 * number, sums, scales, offsets, units, offset_units, rows, end,
                    num_rows, columns, NUM_OUTPUTS, NUM_GROUPS, steps, STEPS_A_GROUP, GROUPS_A_UNIT, SHIFT, SCALES,
                    HAS_OFFSETS, UNIT_SCALE,
                )  # fmt: skip
            total = add_step(
                total, dots - head, a, section, steps // BLOCKS * (number + 1) - 1, sums, scales, offsets, units,
                offset_units, rows, end, num_rows, columns, NUM_OUTPUTS, NUM_GROUPS, steps, STEPS_A_GROUP,
                GROUPS_A_UNIT, SHIFT, SCALES, HAS_OFFSETS, UNIT_SCALE,
            )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < NUM_OUTPUTS, other=0.0)[None, :]
    mask = inside[:, None] & (columns[None, :] < NUM_OUTPUTS)
    tl.store(out + rows[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :], total, mask=mask)


@triton.jit
def add_step(
    total, dots, a, section, step: tl.constexpr, sums, scales, offsets, units, offset_units, rows, end, num_rows,
    columns, NUM_OUTPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, STEPS: tl.constexpr, STEPS_A_GROUP: tl.constexpr,
    GROUPS_A_UNIT: tl.constexpr, SHIFT: tl.constexpr, SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    UNIT_SCALE: tl.constexpr,
):  # fmt: skip
    """total plus one step, exactly as `forerun.kernels.grouped` has it; dots [BLOCK_M, BLOCK_N] int32."""
    at = place_of_row(section * STEPS + step, rows, num_rows)
    sums_of_rows = tl.load(sums + at, mask=rows < end, other=0)  # [BLOCK_M]
    scale, offset = load_scales(
        scales, offsets, units, offset_units, columns, section, step, NUM_OUTPUTS, NUM_GROUPS, STEPS, STEPS_A_GROUP,
        GROUPS_A_UNIT, SCALES, HAS_OFFSETS, UNIT_SCALE,
    )  # fmt: skip
    whole = (dots + SHIFT * sums_of_rows[:, None]).to(tl.float32)
    total = tl.fma(scale[None, :] * a[:, None], whole, total)
    if HAS_OFFSETS:
        shares = tl.broadcast_to(sums_of_rows.to(tl.float32)[:, None], total.shape)
        total = tl.fma(-(offset[None, :] * a[:, None]), shares, total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def embed(
    token_ids, inputs, codes, table, scales, offsets, units, offset_units, out, num_rows,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, STEPS_A_GROUP: tl.constexpr,
    GROUPS_A_UNIT: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, RUN: tl.constexpr, SIGNS: tl.constexpr,
    SHIFT: tl.constexpr, SCALES: tl.constexpr, HAS_OFFSETS: tl.constexpr, UNIT_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One section of ROWS rows of the matrix, as floats in the inputs' own order; NaN for a token outside it."""
    rows, section = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    tokens = tl.load(token_ids + rows, mask=rows < num_rows, other=0)
    known = (tokens >= 0) & (tokens < NUM_OUTPUTS)
    columns, places = tl.where(known, tokens, 0), tl.arange(0, PIECE)
    pieces: tl.constexpr = BLOCK // PIECE
    steps: tl.constexpr = BLOCKS * 2 if PAIRS else BLOCKS
    tiles = section_tiles(codes, columns, section, NUM_BLOCKS // BLOCKS, BLOCKS * pieces, BITS, SPAN)
    for number in tl.static_range(BLOCKS):
        scale, offset = load_scales(
            scales, offsets, units, offset_units, columns, section, steps // BLOCKS * number, NUM_OUTPUTS, NUM_GROUPS,
            steps, STEPS_A_GROUP, GROUPS_A_UNIT, SCALES, HAS_OFFSETS, UNIT_SCALE,
        )  # fmt: skip
        tail, tail_offset = load_scales(
            scales, offsets, units, offset_units, columns, section, steps // BLOCKS * (number + 1) - 1, NUM_OUTPUTS,
            NUM_GROUPS, steps, STEPS_A_GROUP, GROUPS_A_UNIT, SCALES, HAS_OFFSETS, UNIT_SCALE,
        )  # fmt: skip
        is_head = (places < 16)[None, :]  # of a pair; else both are the same
        scale = tl.where(is_head, scale[:, None], tail[:, None])  # [ROWS, PIECE]
        offset = tl.where(is_head, offset[:, None], tail_offset[:, None])
        for piece in tl.static_range(pieces):
            w = load_codes(
                tiles, table, known[:, None], number * pieces + piece, BLOCKS * pieces, BITS, SPAN, RUN, SIGNS
            )
            values = (w.to(tl.int32) + SHIFT).to(tl.float32) * scale
            if HAS_OFFSETS:
                values -= offset
            at = ((section * BLOCKS + number) * pieces + piece) * PIECE + places
            own = tl.load(inputs + at)[None, :]  # [1, PIECE]
            values = tl.where(known[:, None], values, float("nan"))
            mask = (rows < num_rows)[:, None] & (own >= 0)
            tl.store(out + rows[:, None].to(tl.int64) * NUM_INPUTS + own, values, mask=mask)


@triton.jit
def listed(addresses, matrix, KIND: tl.constexpr):
    """The pointer of one matrix of a bank."""
    return tl.multiple_of(tl.load(addresses + matrix).to(tl.pointer_type(KIND)), 16)
