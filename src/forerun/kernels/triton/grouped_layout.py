"""How matrices of small integers lie on the device.

Knows: blocks of inputs, what a byte holds, scales by group. Does not know: the arithmetic (`forerun.kernels.grouped`),
kernels.

A *block* is what one product of integers covers: a step of the arithmetic, filled up to 32, 64 or 128 inputs with
inputs that are always 0; groups of 16, which share an activation scale two by two, lie in pairs in blocks of 32.
A byte holds a code, or, of codes below 16, those of two neighbouring blocks: the even block in the low half. So both
halves of a loaded tile are operands as they are, without moving a bit between threads. Sixteen outputs' bytes of one
block follow each other, then come the next block's: what a program reads at a time lies in one piece.

Scales that count units are multiplied out, and codes that are indices of a table looked up, when a matrix is packed:
K-quants take 2 to 4 bits a weight more here than in their files, and IQ4 8 bits a code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.grouped import MAX_STEP, SMALLEST_GROUP, GroupedMatrix, check_matrix, scales_fit_half
from forerun.kernels.triton.common import power_of_two

TILE_N = 16  # outputs whose bytes lie together
LEAST_BLOCK = 32  # inputs an integer product takes at least
NIBBLE = 16  # codes below it take half a byte
SIGN = 128  # subtracted from codes of eight bits, so that they fit a signed byte


class TritonGroupedLayout(NamedTuple):
    """What a kernel must know of a packed matrix besides its tensors; alike for all experts of a bank."""

    num_outputs: int  # N
    num_inputs: int  # K
    block: int  # inputs of a block: 32, 64 or 128
    num_blocks: int  # even where bytes hold two blocks
    blocks_a_group: int  # 0: a block holds two groups of 16
    num_groups: int
    halves: bool  # a byte holds two codes
    shift: int  # the integer a packed code stands for is itself plus this
    has_offsets: bool
    half_scales: bool  # scales and offsets are float16, exactly

    @property
    def num_steps(self) -> int:
        """Sums of activations a row needs: one a block, two where it holds two groups."""
        return self.num_blocks * (1 if self.blocks_a_group else 2)


@dataclass(frozen=True, slots=True)
class TritonGrouped:
    """A grouped matrix on the device."""

    layout: TritonGroupedLayout
    codes: Tensor  # [N / 16, blocks or pairs of them, 16, block] uint8; int8 where a byte is one code
    scales: Tensor  # [num_groups, N] float16 where that is exact, else float32
    offsets: Tensor  # likewise; the scales once more where there are none
    inputs: Tensor  # [num_blocks, block] int32: which input of a row stands here, -1 for none

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.layout.num_outputs, self.layout.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        own = (self.codes, self.scales, self.inputs, *([self.offsets] if self.layout.has_offsets else []))
        return sum(tensor.nbytes for tensor in own)


def pack_grouped(matrix: GroupedMatrix, device: torch.device) -> TritonGrouped:
    """See `Kernels.pack_grouped`; raises KernelError where the tensors are not what the contract says."""
    check_matrix(matrix)
    matrix = matrix.plain()
    halves = int(matrix.codes.max()) < NIBBLE
    columns = block_columns(matrix.shape[1], matrix.group_size, even=halves)  # [num_blocks, block]
    layout = _layout(matrix, columns, halves)
    blocks = torch.nn.functional.pad(matrix.codes.to(device), (0, 1))[:, columns.to(device)]  # [N, num_blocks, block]
    codes = blocks[:, 0::2] | blocks[:, 1::2] << 4 if halves else (blocks ^ SIGN if _is_wide(matrix) else blocks)
    scales = _by_group(matrix.scales, layout.half_scales, device)
    offsets = scales if matrix.offsets is None else _by_group(matrix.offsets, layout.half_scales, device)
    return TritonGrouped(layout, _in_tiles(codes, halves), scales, offsets, _inputs(matrix, columns).to(device))


def block_columns(columns: int, group_size: int, even: bool) -> Tensor:
    """Which column of the matrix stands where in the blocks, -1 for none -> [num_blocks, block] int64."""
    if group_size == SMALLEST_GROUP:
        group_size = 2 * SMALLEST_GROUP
    block = min(MAX_STEP, power_of_two(group_size, LEAST_BLOCK))
    starts = [
        (start, min(start + MAX_STEP, first + group_size, columns))
        for first in range(0, columns, group_size)
        for start in range(first, first + group_size, MAX_STEP)
    ]
    starts += [(0, 0)] * (len(starts) % 2 if even else 0)
    places = torch.arange(block)
    rows = [torch.where(places < end - start, places + start, -1) for start, end in starts]
    return torch.stack(rows)  # [num_blocks, block]


def _layout(matrix: GroupedMatrix, columns: Tensor, halves: bool) -> TritonGroupedLayout:
    num_outputs, num_inputs = matrix.shape
    pairs = matrix.group_size == SMALLEST_GROUP
    return TritonGroupedLayout(
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        block=columns.shape[1],
        num_blocks=columns.shape[0],
        blocks_a_group=0 if pairs else -(-matrix.group_size // MAX_STEP),
        num_groups=matrix.scales.shape[1],
        halves=halves,
        shift=(SIGN if _is_wide(matrix) and not halves else 0) - matrix.zero,
        has_offsets=matrix.offsets is not None,
        half_scales=scales_fit_half(matrix),
    )


def _is_wide(matrix: GroupedMatrix) -> bool:
    """Codes use all eight bits: they are stored less 128, with the top bit turned round."""
    return matrix.bits == 8


def _in_tiles(codes: Tensor, halves: bool) -> Tensor:
    """[N, B, block] -> [N / 16, B, 16, block], outputs filled up with zeros."""
    filled = torch.nn.functional.pad(codes, (0, 0, 0, 0, 0, -len(codes) % TILE_N))
    tiles = filled.view(-1, TILE_N, *codes.shape[1:]).transpose(1, 2).contiguous()
    return tiles if halves else tiles.view(torch.int8)


def _by_group(values: Tensor, half: bool, device: torch.device) -> Tensor:
    """[N, num_groups] -> [num_groups, N], so that a program's outputs are neighbours."""
    return values.to(device, torch.float16 if half else torch.float32).T.contiguous()


def _inputs(matrix: GroupedMatrix, columns: Tensor) -> Tensor:
    """Which input of a row each place of the blocks reads -> [num_blocks, block] int32."""
    if matrix.input_order is None:
        return columns.int()
    order = matrix.input_order.cpu()
    return torch.where(columns < 0, columns, order[columns.clamp(min=0)]).int()
