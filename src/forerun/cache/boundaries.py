"""Hidden states of the last token of every block, so that drafters that read them lose nothing at a prefix hit.

Knows: blocks and rows of hidden states. Does not know: whose blocks they are, which prefixes are shared. A block's
states are written whenever its last row is, so they always match its contents. Memory: per block, one row of the
drafter's hidden layers in float32, which is little beside block_size rows of all KV layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class BoundaryStates:
    """One row of hidden states per block: those of `layers`, concatenated."""

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
        """Keep states at block ends; positions from `first` on are these rows of `hidden` (layer -> [M, width]).

        Where `hidden` is empty the states are not known.
        """
        for offset in range(-(first + 1) % self._block_size, len(rows), self._block_size):
            block = block_table[(first + offset) // self._block_size]
            self.put(block, torch.cat([hidden[layer][rows[offset]] for layer in layers]) if hidden else None)

    def before(self, block_table: Sequence[int], position: int) -> Tensor | None:
        """Hidden states of the token before `position` -> [sum of the widths]; None unless it ends a block."""
        if position == 0 or position % self._block_size:
            return None
        return self._states.get(block_table[position // self._block_size - 1])

    def of(self, block: int) -> Tensor | None:
        """Hidden states of the block's last token -> [sum of the widths], if they are known."""
        return self._states.get(block)

    def put(self, block: int, state: Tensor | None) -> None:
        """The block was filled from elsewhere, with these states of its last token; None: they are not known."""
        if state is None:
            self._states.pop(block, None)
        else:
            self._states[block] = state
