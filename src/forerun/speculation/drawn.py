"""Trees of drafts without requests, as the runner of a drafter's passes returns them: read, or still on a device.

Knows: nodes, and where their KV lies. Does not know: who draws, `Draft`s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.kernels.device import to_host


class DrawnTree(NamedTuple):
    """The nodes below one root, in the order they were drawn; nodes are numbered from 1, the root is 0."""

    tokens: Sequence[int]
    parents: Sequence[int]
    log_chances: Sequence[float]  # of whole paths, by the drafter's own estimate
    places: Sequence[int]  # row after the root's that holds the node's KV; -1: not computed
    drawn_from: Mapping[int, Tensor]  # node -> q [V] of its children; absent: chosen without randomness


@dataclass(frozen=True, slots=True)
class PendingTrees:
    """Trees on their way: the device may not have drawn them yet. The next trees of the same size overwrite them."""

    unread: Tensor  # int64 on the device: all that `reading` takes
    tokens: Tensor  # [R, most nodes] int64 on the device; -1 for none
    depths: Tensor  # likewise, of the nodes
    masks: Tensor  # likewise: ancestors and self by bits, node i of column i - 1
    reading: Callable[[Tensor], list[DrawnTree]]  # of `unread` on the host

    def read(self) -> list[DrawnTree]:
        """Here the host waits."""
        return self.reading(to_host(self.unread))


Drawn = list[DrawnTree] | PendingTrees


def trees_of(tokens: Tensor, parents: Tensor, log_chances: Tensor, places: Tensor) -> list[DrawnTree]:
    """Columns [R, most nodes] on the host, tokens -1 after a tree's last, log chances float64 by their bits."""
    columns = (tokens, parents, log_chances.contiguous().view(torch.float64), places)
    lengths = (tokens >= 0).sum(1).tolist()
    told = zip(lengths, *(column.tolist() for column in columns), strict=True)
    return [DrawnTree(ids[:n], above[:n], chances[:n], rows[:n], {}) for n, ids, above, chances, rows in told]
