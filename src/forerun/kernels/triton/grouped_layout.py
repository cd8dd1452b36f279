"""How matrices of small integers lie on the device: at the size they have in their files.

Knows: blocks of inputs, numbers and their planes of bits, points of a table, scales by group. Does not know: the
arithmetic (`forerun.kernels.grouped`), kernels.

A *block* is what one weight scale and one activation scale hold for: a step of the arithmetic, filled up to 32, 64 or
128 inputs with inputs that are always 0; groups of 16, which share an activation scale two by two, lie in pairs in
blocks of 32. A block has *pieces* of 32 inputs, each an operand of tensor cores; a *section* is some blocks, 256
inputs where that needs no filling, which a program takes in one round of its loop.

A *number* is what is stored of one input (its code), of two (their codes, where codes are indices of a table), or of
eight (the points of a grid they are, then their signs). Numbers of two and eight inputs are looked up in a table of
the values of each point, which signs negate. A number of B bits is stored as *planes* of 8, 4, 2 and 1 bits, those
that add up to B, the lowest first: 6 = 4 + 2, 18 = 8 + 8 + 2. A byte of a plane of 4, 2 or 1 bits holds the bits of
numbers of 2, 4 or 8 pieces, so that none moves between threads. The bytes of 16 outputs for one piece, or as many as
share them, lie together, then come those of the next. Scales lie in tiles of 16 outputs and 8 groups, so that a
program that adds step to step reads each line of memory once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.grouped import MAX_STEP, SMALLEST_GROUP, GroupedMatrix, PointGrid, check_matrix
from forerun.kernels.stored_scales import StoredScales, stored_scales
from forerun.kernels.triton.common import power_of_two

TILE_N = 16  # outputs whose bytes lie together
PIECE = 32  # inputs: the fewest a product of integers takes
SECTION = 256  # inputs of a section at most, unless planes or blocks need more
TOGETHER = 8  # neighbouring groups of an output whose scales lie together: one load of memory for several steps
PLANES = (4, 2, 1)  # bits of those that share bytes
OCTET = 8  # inputs whose points and signs are one number
MOST_BITS = 31  # of a number
SIGN = 128  # subtracted from values of eight bits, so that they fit a signed byte
MOST_TABLES = 64  # kept for matrices to come; a model has one for each type and each number of inputs


class TritonGroupedLayout(NamedTuple):
    """What a kernel must know of a packed matrix besides its tensors; alike for all experts of a bank."""

    num_outputs: int  # N
    num_inputs: int  # K
    block: int  # inputs of a block: 32, 64 or 128
    num_blocks: int
    blocks_a_section: int
    pairs: bool  # a block holds two groups of 16, a step each
    steps_a_group: int
    num_groups: int
    bits: int  # of a number
    span: int  # inputs a number stands for: 1, 2 or 8
    run: int  # inputs of a point; 1 where numbers are codes
    signs: int  # of the bits of a number, the highest ones; where they are 7 the eighth makes them even
    shift: int  # the integer a code or a value of the table stands for is itself plus this
    scales: str  # their kind, see `stored_scales`
    has_offsets: bool
    groups_a_unit: int  # 0 without units
    unit_scale: float

    @property
    def num_steps(self) -> int:
        """Sums of activations a row needs."""
        return self.num_blocks * (2 if self.pairs else 1)


class GroupedTensors(NamedTuple):
    """What `multiply` reads of a matrix; where there is nothing to read, the codes once more."""

    codes: Tensor  # [N / 16, sections, tiles of a section, 16, PIECE / span] uint8
    table: Tensor  # [points, run] int8, one for all matrices of a type
    scales: Tensor  # [N / 16, groups / 8, 16, 8], or half as many bytes
    offsets: Tensor  # likewise
    units: Tensor  # [N / 16, units / 8, 16, 8] float16
    offset_units: Tensor  # likewise


@dataclass(frozen=True, slots=True)
class TritonGrouped:
    """A grouped matrix on the device."""

    layout: TritonGroupedLayout
    tensors: GroupedTensors
    inputs: Tensor  # [num_blocks, block] int32: which input of a row stands here, -1 for none
    has_order: bool  # inputs are this matrix's own, else those of all with such blocks

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.layout.num_outputs, self.layout.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes held, without what is shared with other matrices: the table, and inputs that have no order."""
        codes, _, *scales = self.tensors
        own = [codes, *(tensor for tensor in scales if tensor is not codes), *([self.inputs] if self.has_order else [])]
        return sum(tensor.nbytes for tensor in own)


def pack_grouped(matrix: GroupedMatrix, device: torch.device) -> TritonGrouped:
    """See `Kernels.pack_grouped`; raises KernelError where the tensors are not what the contract says."""
    check_matrix(matrix)
    if matrix.grid is not None and not _keeps_points(matrix, matrix.grid):
        matrix = matrix.off_grid()
    if matrix.units is None:  # a factor of e4m3 scales would be a constant that kernels are compiled for
        matrix = matrix.multiplied_out()
    stored = stored_scales(matrix)
    shape = matrix.shape[1], matrix.group_size, _bits(matrix)
    columns, blocks_a_section = block_columns(*shape, device)
    layout = _layout(matrix, stored, columns, blocks_a_section)
    numbers = _numbers(matrix, columns, device)  # [N, num_blocks, block / span]
    pieces = numbers.reshape(len(numbers), -1, blocks_a_section * layout.block // PIECE, PIECE // layout.span)
    codes = _in_tiles(_planes(pieces, layout.bits))
    scales = [None if values is None else _by_group(values.to(device)) for values in stored[1:]]
    held = GroupedTensors(*(codes if tensor is None else tensor for tensor in (codes, _table(matrix, device), *scales)))
    if matrix.input_order is None:
        return TritonGrouped(layout, held, plain_inputs(*shape, device), has_order=False)
    order = matrix.input_order.to(device)[columns.clamp(min=0)]
    return TritonGrouped(layout, held, torch.where(columns < 0, columns, order).int(), has_order=True)


def _keeps_points(matrix: GroupedMatrix, grid: PointGrid) -> bool:
    """Whether whole octets stand in a group, their numbers fit, and signs negate values or are one for a point."""
    table = matrix.table
    negates = table is not None and bool((table[:8].int() + table[8:].int() == 2 * SIGN).all())
    signs_fit = negates if grid.signs > 1 else grid.signs == 0 or grid.run == OCTET
    return matrix.group_size % OCTET == 0 and _bits(matrix) <= MOST_BITS and signs_fit


def block_columns(columns: int, group_size: int, bits: int, device: torch.device) -> tuple[Tensor, int]:
    """Which column of the matrix stands where in blocks, for numbers of `bits` bits, and the blocks of a section.

    -> [num_blocks, block] int64, -1 for none; num_blocks is a multiple of a section's.
    """
    if group_size == SMALLEST_GROUP:
        group_size = 2 * SMALLEST_GROUP
    block = min(MAX_STEP, power_of_two(group_size, PIECE))
    starts = [
        (start, min(start + MAX_STEP, first + group_size, columns))
        for first in range(0, columns, group_size)
        for start in range(first, first + group_size, MAX_STEP)
    ]
    pieces = max((8 // width for width in PLANES if bits & width), default=1)  # that share a byte
    blocks_a_section = max(1, pieces * PIECE // block)
    starts += [(0, 0)] * (-len(starts) % blocks_a_section)
    while blocks_a_section * block < SECTION and len(starts) % (2 * blocks_a_section) == 0:
        blocks_a_section *= 2
    places = torch.arange(block)
    rows = [torch.where(places < end - start, places + start, -1) for start, end in starts]
    return torch.stack(rows).to(device), blocks_a_section


@lru_cache(MOST_TABLES)
def plain_inputs(columns: int, group_size: int, bits: int, device: torch.device) -> Tensor:
    """`block_columns` as inputs that have no order of their own."""
    return block_columns(columns, group_size, bits, device)[0].int()


@lru_cache(MOST_TABLES)
def point_table(grid: PointGrid | None, table: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """The values of every point of a grid, or of two codes -> [points, run] int8."""
    codes = torch.arange(256)
    points = torch.stack([codes & 15, codes >> 4], dim=1).byte() if grid is None else grid.points
    if grid is not None and grid.signs == 1:  # of a whole point: the highest bit of its number
        points = torch.nn.functional.pad(points, (0, 0, 0, (1 << grid.bits) - len(points)))
        points = torch.cat([points, points | 8])
    values = points if table is None else torch.tensor(table, dtype=torch.uint8)[points.int()] ^ SIGN
    return values.view(torch.int8).contiguous().to(device)


def _table(matrix: GroupedMatrix, device: torch.device) -> Tensor | None:
    if matrix.table is None and matrix.grid is None:
        return None
    return point_table(matrix.grid, None if matrix.table is None else tuple(matrix.table.tolist()), device)


def _layout(matrix: GroupedMatrix, stored: StoredScales, columns: Tensor, blocks_a_section: int) -> TritonGroupedLayout:
    (num_outputs, num_inputs), grid, pairs = matrix.shape, matrix.grid, matrix.group_size == SMALLEST_GROUP
    looked_up = grid is not None or matrix.table is not None
    return TritonGroupedLayout(
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        block=columns.shape[1],
        num_blocks=columns.shape[0],
        blocks_a_section=blocks_a_section,
        pairs=pairs,
        steps_a_group=1 if pairs else -(-matrix.group_size // MAX_STEP),
        num_groups=matrix.scales.shape[1],
        bits=_bits(matrix),
        span=OCTET if grid is not None else 2 if looked_up else 1,
        run=grid.run if grid is not None else 2 if looked_up else 1,
        signs=0 if grid is None or grid.signs == 1 else grid.signs,
        shift=(SIGN if _is_wide(matrix) else 0) - matrix.zero,
        scales=stored.kind,
        has_offsets=matrix.offsets is not None,
        groups_a_unit=0 if matrix.units is None else matrix.groups_a_unit,
        unit_scale=matrix.unit_scale,
    )


def _bits(matrix: GroupedMatrix) -> int:
    """Of a number."""
    if matrix.grid is not None:
        return OCTET // matrix.grid.run * matrix.grid.bits + matrix.grid.signs
    return 8 if matrix.table is not None else matrix.bits


def _is_wide(matrix: GroupedMatrix) -> bool:
    """Values use all eight bits: they are stored less 128, with the top bit turned round."""
    return matrix.bits == 8 or matrix.table is not None


def _numbers(matrix: GroupedMatrix, columns: Tensor, device: torch.device) -> Tensor:
    """What is stored of the inputs -> [N, num_blocks, block / span], uint8 or, with a grid, int32."""
    codes = torch.nn.functional.pad(matrix.codes.to(device), (0, 1))[:, columns]  # [N, num_blocks, block]
    grid = matrix.grid
    if grid is None:
        if matrix.table is not None:
            return codes[:, :, 0::2] | codes[:, :, 1::2] << 4
        return codes ^ SIGN if _is_wide(matrix) else codes
    assert matrix.points is not None
    firsts = torch.where(columns < 0, -grid.run, columns)[:, :: grid.run] // grid.run  # [num_blocks, block / run]
    points = torch.nn.functional.pad(matrix.points.to(device).int(), (0, 1))[:, firsts]  # [N, num_blocks, block / run]
    count, low = OCTET // grid.run, OCTET // grid.run * grid.bits
    numbers = points[:, :, 0::count].clone()
    for index in range(1, count):
        numbers |= points[:, :, index::count] << grid.bits * index
    for index in range(grid.signs):
        numbers |= (codes[:, :, index::OCTET] >> 3).int() << low + index
    return numbers


def _planes(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [N, sections, pieces, width] plane by plane -> [N, sections, pieces * bits / 8, width] uint8."""
    tiles, low = list[Tensor](), 0
    for width in (*[8] * (bits // 8), *(width for width in PLANES if bits & width)):
        parts = (numbers >> low & (1 << width) - 1).byte().unflatten(2, (-1, 8 // width))
        tile = parts[:, :, :, 0].clone()
        for index in range(1, 8 // width):
            tile |= parts[:, :, :, index] << width * index
        tiles.append(tile)
        low += width
    return torch.cat(tiles, dim=2)


def _in_tiles(codes: Tensor) -> Tensor:
    """[N, sections, tiles, width] -> [N / 16, sections, tiles, 16, width], outputs filled up with zeros."""
    filled = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, 0, 0, -len(codes) % TILE_N))
    return filled.view(-1, TILE_N, *codes.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


def _by_group(values: Tensor) -> Tensor:
    """[N, groups] -> [N / 16, groups / 8, 16, 8], filled up with zeros."""
    num_outputs, num_groups = values.shape
    filled = torch.nn.functional.pad(values, (0, -num_groups % TOGETHER, 0, -num_outputs % TILE_N))
    return filled.view(-1, TILE_N, filled.shape[1] // TOGETHER, TOGETHER).transpose(1, 2).contiguous()
