"""Hidden states of the last token of every block, so that a prefix hit costs a drafter that reads them nothing.

Knows: blocks and rows of hidden states. Does not know: whose blocks they are, which prefixes are shared. What is kept
for a block is written again whenever the block's last row is, so it always belongs to what the block holds. Memory:
one row of the drafter's hidden layers in float32 for a block of the pool, against block_size rows of all KV layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class BoundaryStates:
    """A row of hidden states a block: those of `layers`, one behind the other."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._states: dict[int, Tensor] = {}  # block -> [sum of the layers' widths] float32

    def keep(
        self,
        block_table: Sequence[int],
        first: int,
        rows: Sequence[int],
        layers: Sequence[int],
        hidden: Mapping[int, Tensor],
    ) -> None:
        """Positions first, first + 1, ... were computed at these rows of `hidden` (layer -> [M, width])."""
        for offset in range(-(first + 1) % self._block_size, len(rows), self._block_size):
            block = block_table[(first + offset) // self._block_size]
            self._states[block] = torch.cat([hidden[layer][rows[offset]] for layer in layers])

    def before(self, block_table: Sequence[int], position: int) -> Tensor | None:
        """Hidden states of the token before `position` -> [sum of the widths]; None if it ends no block."""
        if position == 0 or position % self._block_size:
            return None
        return self._states.get(block_table[position // self._block_size - 1])
