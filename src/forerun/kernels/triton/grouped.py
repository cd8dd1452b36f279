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
from forerun.kernels.triton.grouped_layout import TILE_N, TritonGrouped, TritonGroupedLayout

WANTED_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
MAX_ROWS = 64  # rows a program multiplies with codes it has read once
MIN_ROWS = 16  # of an integer product
QUANTIZED_ROWS = 8  # of which a program turns one block into integers


class QuantizedRows(NamedTuple):
    """Rows as 8-bit integers, block by block."""

    codes: Tensor  # [rows, num_blocks, block] int8
    scales: Tensor  # [num_blocks, rows] float32; NaN for a block that is not finite
    sums: Tensor  # [num_steps, rows] int32


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
            *rows, packed.codes, packed.scales, packed.offsets, x if bias is None else bias, out, x, num_rows,
            **sizes, HAS_BIAS=bias is not None, LISTED=False, **EXACT,
        )  # fmt: skip
    return out


def empty_rows(layout: TritonGroupedLayout, num_rows: int, device: torch.device) -> QuantizedRows:
    """Room for `num_rows` quantized rows."""
    return QuantizedRows(
        torch.empty(num_rows, layout.num_blocks, layout.block, dtype=torch.int8, device=device),
        torch.empty(layout.num_blocks, num_rows, device=device),
        torch.empty(layout.num_steps, num_rows, dtype=torch.int32, device=device),
    )


def quantize_sizes(layout: TritonGroupedLayout) -> dict[str, Any]:
    """What `quantize` is compiled for."""
    return {
        "NUM_INPUTS": layout.num_inputs,
        "NUM_BLOCKS": layout.num_blocks,
        "BLOCK": layout.block,
        "PAIRS": layout.blocks_a_group == 0,
        "ROWS": QUANTIZED_ROWS,
        "num_warps": 4,
    }


def product_sizes(layout: TritonGroupedLayout, num_rows: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs along outputs and rows, and what `multiply` is compiled for, for up to `num_rows` rows."""
    block_m = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(num_rows)))
    block_n = TILE_N if triton.cdiv(layout.num_outputs, 2 * TILE_N) < WANTED_PROGRAMS else 2 * TILE_N
    grid = (triton.cdiv(layout.num_outputs, block_n), triton.cdiv(num_rows, block_m))
    return grid, {
        "NUM_OUTPUTS": layout.num_outputs,
        "NUM_BLOCKS": layout.num_blocks,
        "NUM_GROUPS": layout.num_groups,
        "BLOCK": layout.block,
        "BLOCKS_A_GROUP": layout.blocks_a_group,
        "HALVES": layout.halves,
        "SHIFT": layout.shift,
        "HAS_OFFSETS": layout.has_offsets,
        "HALF_SCALES": layout.half_scales,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": 2 if block_m == MIN_ROWS else 4,
        "num_stages": 5,
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
    tl.store(scales + block * num_rows + rows, tl.where(finite, scale, float("nan")), mask=inside)
    if PAIRS:
        head = tl.sum(tl.where(places[None, :] < 16, whole, 0), axis=1)
        tl.store(sums + 2 * block * num_rows + rows, head, mask=inside)
        tl.store(sums + (2 * block + 1) * num_rows + rows, tl.sum(whole, axis=1) - head, mask=inside)
    else:
        tl.store(sums + block * num_rows + rows, tl.sum(whole, axis=1), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    quantized, row_scales, sums, codes, scales, offsets, bias, out, starts, num_rows,
    NUM_OUTPUTS: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS_A_GROUP: tl.constexpr, HALVES: tl.constexpr, SHIFT: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    HALF_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M quantized rows times BLOCK_N outputs; LISTED: of the slots of one matrix of a bank."""
    first, end = tl.program_id(2) * BLOCK_M, num_rows
    if LISTED:
        matrix = tl.program_id(1)
        first += tl.load(starts + matrix)
        end = tl.load(starts + matrix + 1)
        if first >= end:
            return
        kind: tl.constexpr = tl.float16 if HALF_SCALES else tl.float32
        codes = tl.multiple_of(tl.load(codes + matrix).to(tl.pointer_type(tl.uint8 if HALVES else tl.int8)), 16)
        scales = tl.multiple_of(tl.load(scales + matrix).to(tl.pointer_type(kind)), 16)
        offsets = tl.multiple_of(tl.load(offsets + matrix).to(tl.pointer_type(kind)), 16)
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    bytes_a_block: tl.constexpr = 2 if HALVES else 1
    tiles: tl.constexpr = NUM_BLOCKS // bytes_a_block
    places = codes + (columns // 16).to(tl.int64)[:, None] * (tiles * 16 * BLOCK) + (columns % 16)[:, None] * BLOCK
    places += tl.arange(0, BLOCK)[None, :]  # [BLOCK_N, BLOCK]
    for tile in range(tiles):
        packed = tl.load(places + tile * 16 * BLOCK, mask=columns[:, None] < NUM_OUTPUTS, other=0)
        if HALVES:
            low, high = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
            total = add_block(
                total, low, 2 * tile, quantized, row_scales, sums, scales, offsets, rows, end, num_rows, columns,
                NUM_OUTPUTS, NUM_BLOCKS, NUM_GROUPS, BLOCK, BLOCKS_A_GROUP, SHIFT, HAS_OFFSETS,
            )  # fmt: skip
            total = add_block(
                total, high, 2 * tile + 1, quantized, row_scales, sums, scales, offsets, rows, end, num_rows, columns,
                NUM_OUTPUTS, NUM_BLOCKS, NUM_GROUPS, BLOCK, BLOCKS_A_GROUP, SHIFT, HAS_OFFSETS,
            )  # fmt: skip
        else:
            total = add_block(
                total, packed, tile, quantized, row_scales, sums, scales, offsets, rows, end, num_rows, columns,
                NUM_OUTPUTS, NUM_BLOCKS, NUM_GROUPS, BLOCK, BLOCKS_A_GROUP, SHIFT, HAS_OFFSETS,
            )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < NUM_OUTPUTS, other=0.0)[None, :]
    mask = (rows[:, None] < end) & (columns[None, :] < NUM_OUTPUTS)
    tl.store(out + rows[:, None].to(tl.int64) * NUM_OUTPUTS + columns[None, :], total, mask=mask)


@triton.jit
def add_block(
    total, codes, block, quantized, row_scales, sums, scales, offsets, rows, end, num_rows, columns,
    NUM_OUTPUTS: tl.constexpr, NUM_BLOCKS: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS_A_GROUP: tl.constexpr, SHIFT: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_M, BLOCK_N] plus one block's steps; codes [BLOCK_N, BLOCK] int8."""
    places = tl.arange(0, BLOCK)
    at = rows[:, None].to(tl.int64) * (NUM_BLOCKS * BLOCK) + block * BLOCK + places[None, :]
    q = tl.load(quantized + at, mask=rows[:, None] < end, other=0)  # [BLOCK_M, BLOCK] int8
    a = tl.load(row_scales + block * num_rows + rows, mask=rows < end, other=0.0)  # [BLOCK_M]
    if BLOCKS_A_GROUP:
        dots = tl.dot(q, tl.trans(codes), out_dtype=tl.int32)  # [BLOCK_M, BLOCK_N]
        return add_step(
            total, dots, a, block, block // BLOCKS_A_GROUP, sums, scales, offsets, rows, end, num_rows, columns,
            NUM_OUTPUTS, NUM_GROUPS, SHIFT, HAS_OFFSETS,
        )  # fmt: skip
    else:
        zero = tl.zeros_like(q)
        first = tl.dot(tl.where(places[None, :] < 16, q, zero), tl.trans(codes), out_dtype=tl.int32)
        total = add_step(
            total, first, a, 2 * block, 2 * block, sums, scales, offsets, rows, end, num_rows, columns,
            NUM_OUTPUTS, NUM_GROUPS, SHIFT, HAS_OFFSETS,
        )  # fmt: skip
        second = tl.dot(tl.where(places[None, :] < 16, zero, q), tl.trans(codes), out_dtype=tl.int32)
        return add_step(
            total, second, a, 2 * block + 1, 2 * block + 1, sums, scales, offsets, rows, end, num_rows, columns,
            NUM_OUTPUTS, NUM_GROUPS, SHIFT, HAS_OFFSETS,
        )  # fmt: skip


@triton.jit
def add_step(
    total, dots, a, step, group, sums, scales, offsets, rows, end, num_rows, columns,
    NUM_OUTPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, SHIFT: tl.constexpr, HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """total plus one step, exactly as `forerun.kernels.grouped` has it; dots [BLOCK_M, BLOCK_N] int32."""
    sums_of_rows = tl.load(sums + step * num_rows + rows, mask=rows < end, other=0)  # [BLOCK_M]
    inside = (columns < NUM_OUTPUTS) & (group < NUM_GROUPS)
    scale = tl.load(scales + group * NUM_OUTPUTS + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_N]
    whole = (dots + SHIFT * sums_of_rows[:, None]).to(tl.float32)
    total = tl.fma(scale[None, :] * a[:, None], whole, total)
    if HAS_OFFSETS:
        offset = tl.load(offsets + group * NUM_OUTPUTS + columns, mask=inside, other=0.0).to(tl.float32)
        shares = tl.broadcast_to(sums_of_rows.to(tl.float32)[:, None], total.shape)
        total = tl.fma(-(offset[None, :] * a[:, None]), shares, total)
    return total
