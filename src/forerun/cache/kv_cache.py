"""The paged pool: KV tensors of every attention layer, target and drafter alike, under one block table.

Knows: layer shapes, blocks, where accepted rows must go. Does not know: requests, trees, who decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from forerun.kernels.device import to_device
from forerun.kernels.ops import Kernels, LayerKV
from forerun.models.base import LayerSpec


class Move(NamedTuple):
    """Rows of one sequence that move to where plain decoding would have written them."""

    block_table: Sequence[int]
    sources: Sequence[int]  # logical rows, ascending
    targets: Sequence[int]  # logical rows, ascending, each at most its source


class KVCache:
    """KV tensors for `num_blocks` blocks."""

    def __init__(self, kernels: Kernels, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = kernels.device
        self.layers = [_allocate(spec, num_blocks, block_size, self.device) for spec in specs]
        self.on_move: Callable[[Sequence[int], Sequence[int]], None] | None = None  # told from which slots to which
        self._kernels = kernels

    @property
    def num_rows(self) -> int:
        """Logical rows all blocks hold together."""
        return self.num_blocks * self.block_size

    def num_blocks_for(self, num_rows: int) -> int:
        """Blocks that hold `num_rows` logical rows."""
        return -(-num_rows // self.block_size)

    def commit(self, moves: Iterable[Move]) -> None:
        """Move accepted tree rows to the rows after their root, in every layer."""
        sources, targets = [], []
        for move in moves:
            for source, target in zip(move.sources, move.targets, strict=True):
                if source != target:
                    sources.append(self._slot(move.block_table, source))
                    targets.append(self._slot(move.block_table, target))
        self.move(sources, targets)

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first rows of one block into another, in every layer."""
        first, to_first = source * self.block_size, target * self.block_size
        self.move(range(first, first + num_rows), range(to_first, to_first + num_rows))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows from slot to slot, in every layer."""
        if len(sources) and self.on_move is not None:
            self.on_move(sources, targets)
        if len(sources) and self.layers:
            slots = torch.tensor([list(sources), list(targets)], dtype=torch.int32)
            slots = to_device(slots, self.device)  # [2, rows]
            self._kernels.move_rows(self.layers, slots[0], slots[1])

    def _slot(self, block_table: Sequence[int], row: int) -> int:
        block, offset = divmod(row, self.block_size)
        return block_table[block] * self.block_size + offset


def bytes_per_block(specs: Iterable[LayerSpec], block_size: int) -> int:
    """Bytes one block takes over all layers."""
    return sum(spec.bytes_per_position for spec in specs) * block_size


def _allocate(spec: LayerSpec, num_blocks: int, block_size: int, device: torch.device) -> LayerKV:
    return LayerKV.zeros(num_blocks, spec.num_kv_heads, spec.head_dim, block_size, spec.dtype, spec.latent, device)
