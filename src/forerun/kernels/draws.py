"""What many draws of one step are told at once: trees to walk down, chains to draft.

Knows: nodes, temperatures, keys of noise, as plain numbers and as tensors. Does not know: requests, who draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class PlainTree(NamedTuple):
    """A draft tree to verify, whose rows of logits need no shaping; csrc/tree_walk.h reads the fields in this order."""

    first_row: int  # of the logits: that of the root; those of the other verified nodes follow
    tokens: Sequence[int]  # of all nodes, the root first
    parents: Sequence[int]
    verified: Sequence[int]  # nodes, ascending, the root first, every one with its parent
    temperature: float
    seed: int
    position: int  # of the token after the root
    stream: int


class PlainChain(NamedTuple):
    """A root and a chain of drafts below it, to verify like a PlainTree; csrc/chain_step.h has this order, too."""

    block_table: Sequence[int]
    position: int  # of the root, all before which is computed
    tokens: Sequence[int]  # the root first
    temperature: float
    seed: int
    stream: int


class ChainNoise(NamedTuple):
    """The noise of R chains that are drawn token by token, longest chain first."""

    temperatures: Sequence[float]  # [R]
    seeds: Sequence[int]  # [R]
    streams: Sequence[int]  # [R]
    positions: Sequence[int]  # [steps * R], step by step: what `NoiseKeys.positions` is
    num_active: Sequence[int]  # [steps]: how many chains, from the first, have a token at that step
    least: float = 0.0  # drawing ends where the chains' chances to be right so far add up to less; see `Draft`

    def tensors(self) -> ChainTensors:
        """For kernels that draw on a device."""
        num, steps = len(self.seeds), len(self.num_active)
        wide = words([*self.seeds, *self.streams, *self.positions, *self.num_active])
        seeds, streams, positions, num_active = wide.split_with_sizes([num, num, num * steps, steps])
        heat = torch.tensor(self.temperatures, dtype=torch.float64)
        return ChainTensors(heat, seeds, streams, positions.view(steps, num), num_active)


class ChainTensors(NamedTuple):
    """The columns of `ChainNoise` on the host."""

    temperatures: Tensor  # [R] float64
    seeds: Tensor  # [R] int64
    streams: Tensor  # [R] int64
    positions: Tensor  # [steps, R] int64
    num_active: Tensor  # [steps] int64


def words(values: Sequence[int]) -> Tensor:
    """64-bit words by their bits -> [len(values)] int64."""
    return torch.from_numpy(np.array([v - (1 << 64) if v >> 63 else v for v in values], dtype=np.int64))
