"""Linear layers with dense matrices, a matrix for every head, and embedding tables.

Knows: layouts of packed matrices, how a product is cut into programs. Does not know: quantized matrices, models, how
a tile is multiplied (`products`).

A program multiplies up to 64 rows with 64 outputs, so that the matrix is read once for as many rows. Where the outputs
are too few to occupy the GPU, the inputs are split as well, into a number of parts that depends on the matrix alone,
and the parts' sums are added in their order: a row's bits are the same in every batch. A rank that has some of a
matrix's outputs splits the inputs as one process does, which has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import PackedHeads, PackedLinear
from forerun.kernels.reference import check_head_width, check_heads, check_weight
from forerun.kernels.triton.common import EXACT, power_of_two
from forerun.kernels.triton.products import ROWS, tile_product

BLOCK_N = 64  # outputs a program computes
BLOCK_K = 64  # inputs a tile has: 8 KiB of bfloat16 weights, of which three are on their way at a time
MAX_TILES = 4  # tiles of rows a program multiplies with weights it has read once
WANTED_PROGRAMS = 264  # two for each of an H200's 132 multiprocessors
LEAST_TILES_OF_INPUTS = 8  # a part of the inputs is no smaller
UNSPLIT = 1 << 62  # rows of a matrix that are enough for any GPU
BLOCK_COLUMNS = 1024  # of kernels that only move or add


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """A matrix on the device, row by row, in the checkpoint's precision."""

    weight: Tensor  # [N, K] float32, bfloat16 or float16, contiguous
    splits: int  # parts of the inputs whose sums are added

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class TritonHeads:
    """A matrix a head."""

    weight: Tensor  # [Q, N, K], contiguous

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Q, N, K)."""
        return self.weight.shape[0], self.weight.shape[1], self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes


class Strides(NamedTuple):
    """Elements from one row to the next and from one matrix's part of a row to the next's."""

    x_row: int
    x_part: int
    out_row: int
    out_part: int


def pack_linear(weight: Tensor, device: torch.device, num_rows: int | None = None) -> TritonLinear:
    """See `Kernels.pack_linear`; float16 stays what it is and is widened in registers.

    num_rows: of the matrix whose rows these are; None: these are all.
    """
    check_weight(weight)
    num_outputs, num_inputs = weight.shape
    splits = num_splits(num_outputs if num_rows is None else num_rows, num_inputs)
    return TritonLinear(weight.to(device).contiguous(), splits)


def pack_heads(weight: Tensor, device: torch.device) -> TritonHeads:
    """See `Kernels.pack_heads`."""
    check_heads(weight)
    return TritonHeads(weight.to(device).contiguous())


def dense_linear(x: Tensor, packed: TritonLinear, bias: Tensor | None) -> Tensor:
    """x [M, K] times the matrix transposed, plus bias [N] -> [M, N]."""
    num_outputs, num_inputs = packed.shape
    num_rows, splits = x.shape[0], packed.splits
    out, strides = torch.empty(num_rows, num_outputs, device=x.device), Strides(num_inputs, 0, num_outputs, 0)
    if splits == 1:
        _multiply(x, packed.weight, bias, out, packed.shape, strides, 1)
        return out
    parts = torch.empty(splits, num_rows, num_outputs, device=x.device)
    _multiply(x, packed.weight, None, parts, packed.shape, strides, 1, splits)
    if num_rows:
        grid, shift = (num_rows, triton.cdiv(num_outputs, BLOCK_COLUMNS)), parts if bias is None else bias
        add_parts[grid](parts, shift, out, num_rows, num_outputs, splits, bias is not None, BLOCK_COLUMNS, **EXACT)
    return out


def linear_heads(x: Tensor, weight: PackedHeads) -> Tensor:
    """See `Kernels.linear_heads`."""
    if not isinstance(weight, TritonHeads):
        raise KernelError(f"heads packed by {type(weight).__name__} given to the Triton kernels")
    num_heads, num_outputs, num_inputs = weight.shape
    passed = check_head_width(x.shape[1], weight.shape)
    x_width, out_width = num_inputs + passed, num_outputs + passed
    out = torch.empty(x.shape[0], num_heads * out_width, device=x.device)
    strides = Strides(num_heads * x_width, x_width, num_heads * out_width, out_width)
    _multiply(x, weight.weight, None, out, (num_outputs, num_inputs), strides, num_heads)
    heads, read = out.view(-1, num_heads, out_width), x.view(-1, num_heads, x_width)  # [M, Q, N or K + passed]
    heads[:, :, num_outputs:] = read[:, :, num_inputs:]
    return out


def embedding(token_ids: Tensor, table: Tensor | PackedLinear) -> Tensor:
    """See `Kernels.embedding`; an id outside the table gives a row of NaN, since nobody can be asked to wait."""
    weight = table.weight if isinstance(table, TritonLinear) else table
    if not isinstance(weight, Tensor):
        raise KernelError(f"an embedding table packed by {type(table).__name__} given to the Triton kernels")
    num_rows, (vocab_size, width) = token_ids.shape[0], weight.shape
    out = torch.empty(num_rows, width, device=weight.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK_COLUMNS))
        embed[grid](token_ids, weight, out, vocab_size, width, BLOCK_COLUMNS, **EXACT)
    return out


def num_splits(num_outputs: int, num_inputs: int) -> int:
    """Parts the inputs of a matrix are split into: enough programs for the GPU, none too short."""
    programs: int = triton.cdiv(num_outputs, BLOCK_N)
    most = max(1, -(-num_inputs // BLOCK_K) // LEAST_TILES_OF_INPUTS)
    return min(most, -(-WANTED_PROGRAMS // programs))


def num_tiles(num_rows: int) -> int:
    """Tiles of rows a program takes: 1, 2 or 4."""
    return min(MAX_TILES, power_of_two(-(-num_rows // ROWS.value)))


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, shape: tuple[int, int], strides: Strides,
    num_matrices: int, splits: int = 1,
) -> None:  # fmt: skip
    """Rows times `num_matrices` matrices of `shape` (N, K); `splits` parts of the inputs go to out[part]."""
    num_rows = x.shape[0]
    if num_rows:
        (along_n, along_m), sizes = product_sizes(shape, num_rows, splits)
        multiply[(along_n, num_matrices * splits, along_m)](
            x, weight, x if bias is None else bias, out, x, x, num_rows, *strides, **sizes, KIND=tl.float32,
            HAS_BIAS=bias is not None, LISTED=False, GATHERED=False, **EXACT,
        )  # fmt: skip


def product_sizes(shape: tuple[int, int], num_rows: int, splits: int = 1) -> tuple[tuple[int, int], dict[str, Any]]:
    """Programs along outputs and rows, and what `multiply` is compiled for, for up to `num_rows` rows."""
    num_outputs, num_inputs = shape
    tiles = num_tiles(num_rows)
    grid = (triton.cdiv(num_outputs, BLOCK_N), triton.cdiv(num_rows, ROWS.value * tiles))
    return grid, {
        "NUM_OUTPUTS": num_outputs,
        "NUM_INPUTS": num_inputs,
        "SPLITS": splits,
        "TILES": tiles,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": BLOCK_K,
        "num_warps": 8 if tiles == MAX_TILES else 4,  # with fewer, registers would spill
        "num_stages": 4,
    }


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x, weight, bias, out, sources, starts, num_rows,
    X_ROW: tl.constexpr, X_PART: tl.constexpr, OUT_ROW: tl.constexpr, OUT_PART: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr, SPLITS: tl.constexpr, TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    LISTED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Up to TILES * ROWS rows times BLOCK_N outputs of one matrix, over one part of its inputs.

    LISTED: `weight` holds addresses of matrices of type KIND, and the rows are the slots starts[matrix] ..
    starts[matrix + 1] - 1, which are rows of x, or stand for the rows `sources` names if GATHERED.
    """
    matrix, split = (tl.program_id(1) // SPLITS).to(tl.int64), tl.program_id(1) % SPLITS
    first, end = tl.program_id(2) * (ROWS * TILES), num_rows
    if LISTED:
        first += tl.load(starts + matrix)
        end = tl.load(starts + matrix + 1)
        if first >= end:
            return
        weight = tl.multiple_of(tl.load(weight + matrix).to(tl.pointer_type(KIND)), 16)
    else:
        weight += matrix * (NUM_OUTPUTS * NUM_INPUTS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x += matrix * X_PART
    out += matrix * OUT_PART + split.to(tl.int64) * num_rows * OUT_ROW
    total0 = tl.zeros((ROWS, BLOCK_N), tl.float32)
    total1, total2, total3 = total0, total0, total0
    all_tiles: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    a_split: tl.constexpr = (all_tiles + SPLITS - 1) // SPLITS
    for tile in range(split * a_split, tl.minimum((split + 1) * a_split, all_tiles)):
        inputs = tile * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        w = load_weights(weight, columns, inputs, NUM_OUTPUTS, NUM_INPUTS)  # [BLOCK_K, BLOCK_N]
        total0 += tile_product(load_rows(x, sources, first, end, inputs, X_ROW, NUM_INPUTS, GATHERED), w)
        if TILES > 1:
            total1 += tile_product(load_rows(x, sources, first + ROWS, end, inputs, X_ROW, NUM_INPUTS, GATHERED), w)
        if TILES > 2:
            rows2 = load_rows(x, sources, first + 2 * ROWS, end, inputs, X_ROW, NUM_INPUTS, GATHERED)
            total2 += tile_product(rows2, w)
            rows3 = load_rows(x, sources, first + 3 * ROWS, end, inputs, X_ROW, NUM_INPUTS, GATHERED)
            total3 += tile_product(rows3, w)
    shift = tl.zeros((BLOCK_N,), tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=columns < NUM_OUTPUTS, other=0.0)
    _store_rows(out, total0 + shift[None, :], first, end, columns, OUT_ROW, NUM_OUTPUTS)
    if TILES > 1:
        _store_rows(out, total1 + shift[None, :], first + ROWS, end, columns, OUT_ROW, NUM_OUTPUTS)
    if TILES > 2:
        _store_rows(out, total2 + shift[None, :], first + 2 * ROWS, end, columns, OUT_ROW, NUM_OUTPUTS)
        _store_rows(out, total3 + shift[None, :], first + 3 * ROWS, end, columns, OUT_ROW, NUM_OUTPUTS)


@triton.jit
def load_weights(weight, columns, inputs, NUM_OUTPUTS: tl.constexpr, NUM_INPUTS: tl.constexpr):
    """Entries of a matrix [N, K] transposed, 0 outside -> [inputs, columns]."""
    mask = (inputs[:, None] < NUM_INPUTS) & (columns[None, :] < NUM_OUTPUTS)
    return tl.load(weight + columns[None, :].to(tl.int64) * NUM_INPUTS + inputs[:, None], mask=mask, other=0.0)


@triton.jit
def load_rows(
    x, sources, first, end, inputs,
    X_ROW: tl.constexpr, NUM_INPUTS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + ROWS - 1, 0 from row `end` on -> [ROWS, inputs] float32."""
    rows = first + tl.arange(0, ROWS)
    mask = (rows[:, None] < end) & (inputs[None, :] < NUM_INPUTS)
    if GATHERED:
        rows = tl.load(sources + rows, mask=rows < end, other=0)
    return tl.load(x + rows[:, None].to(tl.int64) * X_ROW + inputs[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(out, values, first, end, columns, OUT_ROW: tl.constexpr, NUM_OUTPUTS: tl.constexpr):
    rows = first + tl.arange(0, ROWS)
    mask = (rows[:, None] < end) & (columns[None, :] < NUM_OUTPUTS)
    tl.store(out + rows[:, None].to(tl.int64) * OUT_ROW + columns[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_parts(
    parts, bias, out, num_rows,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of the parts [splits, M, N] added in their order, then the bias."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    places = parts + row * WIDTH + columns
    total = tl.load(places, mask=mask, other=0.0)
    for _ in range(1, SPLITS):
        places += num_rows * WIDTH
        total += tl.load(places, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + columns, total, mask=mask)


@triton.jit
def embed(token_ids, table, out, VOCAB: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row of a table, widened; NaN for a token outside it."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row)
    inside = (token >= 0) & (token < VOCAB)
    mask = columns < WIDTH
    values = tl.load(table + tl.where(inside, token, 0) * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, tl.where(inside, values, float("nan")), mask=mask)
