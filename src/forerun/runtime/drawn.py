"""Drafts that a device was given to draw: where they will lie there, and how they are read.

Knows: the form of trees without requests. Does not know: who draws, drafts of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from forerun.kernels.device import to_host


class GrownTrees(NamedTuple):
    """Nodes of R trees on the host, in the order they were drawn, each [R, most nodes]."""

    tokens: Tensor  # int64; -1 behind a tree's last
    parents: Tensor  # int64: 0 the root, else the parent's column plus 1
    log_chances: Tensor  # float64, of whole paths
    places: Tensor  # int64: row behind the root's in which the node's KV lies, -1 where it was not computed


@dataclass(frozen=True, slots=True)
class EnqueuedDrafts:
    """Trees on their way: the card may not have drawn them yet. They lie where the next of their size will."""

    unread: Tensor  # int64 on the device: all that `reading` takes
    tokens: Tensor  # [R, most nodes] int64 on the device; -1 for none
    reading: Callable[[Tensor], GrownTrees]  # of `unread` on the host
    depths: Tensor | None = None  # likewise, of the nodes; None: chains, of which the host knows them
    masks: Tensor | None = None  # ancestors and self by bits, node i of column i - 1; likewise

    def read(self) -> GrownTrees:
        """Here the host waits."""
        return self.reading(to_host(self.unread))
