"""Best-first growth: which of the nodes drawn for a tree are kept, and which of them get children next.

Knows: one tree's nodes and their log chances, the rows their KV may lie in. Does not know: requests, logits, passes.

A tree is drawn level by level and larger than what is kept of it (EAGLE-2, arXiv 2406.16858, section 4): of all nodes
drawn so far the likeliest are kept, and of a level's new nodes those are expanded that are kept and whose children may
be. No child is likelier than its parent, so every kept node comes with its ancestors, and a node that is not kept at
one level never is again: its row is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from forerun.speculation.draft import Draft
from forerun.speculation.growth import Children
from forerun.speculation.tree import ROOT


class Candidates:
    """All nodes drawn for one tree, in the order they were drawn; node 0 is the root."""

    def __init__(self, root_token: int, num_kept: int, width: int) -> None:
        """`num_kept`: nodes kept in the end, without the root. `width`: most nodes of a level that are expanded."""
        self.tokens = [root_token]
        self.parents = [-1]
        self.survival = [0.0]  # log chance of each node's whole path
        self.places = {ROOT: 0}  # node -> row behind the root where the drafter's KV of it lies
        self._drawn_from: dict[int, Tensor] = {}  # node -> q of its children
        self._num_kept = num_kept
        self._width = width

    def hang(self, parent: int, children: Children) -> list[int]:
        """Add the children drawn after a node -> their nodes."""
        if children.q is not None:
            self._drawn_from[parent] = children.q
        first, above = len(self.tokens), self.survival[parent]
        self.tokens += children.tokens
        self.parents += [parent] * len(children.tokens)
        self.survival += [above + chance for chance in children.log_chances]
        return list(range(first, len(self.tokens)))

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def kept(self) -> set[int]:
        """The likeliest nodes; of equals those drawn first."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.survival[node], node))
        return set(order[: self._num_kept])

    def useful(self, new: Sequence[int], kept: set[int]) -> list[int]:
        """Those of a level's nodes that may have children that are kept, the likeliest first."""
        is_full = len(kept) == self._num_kept
        worst = min((self.survival[node] for node in kept), default=0.0)
        found = [node for node in new if node in kept and (not is_full or self.survival[node] > worst)]
        return sorted(found, key=lambda node: -self.survival[node])[: self._width]

    def chance(self, nodes: Sequence[int]) -> float:
        """The chance that one of these, none of which is above another, is right."""
        return sum(math.exp(self.survival[node]) for node in nodes)

    def expand(self, leaves: Sequence[int], kept: set[int]) -> list[int]:
        """Give these nodes rows of their own, those of nodes that are not kept being free -> the nodes by row."""
        self.places = {node: place for node, place in self.places.items() if node == ROOT or node in kept}
        taken = set(self.places.values())
        free = (place for place in range(self._num_kept + 1) if place not in taken)
        self.places.update(zip(leaves, free, strict=False))
        return sorted(leaves, key=self.places.__getitem__)

    def finish(self, draft: Draft, source: str) -> set[int]:
        """Add the kept nodes to a draft -> those of its nodes, the root included, whose KV lies in their own row."""
        here = {ROOT: ROOT}
        for parent, siblings in groupby(sorted(self.kept()), key=self.parents.__getitem__):
            nodes = list(siblings)  # in draw order, none left out before the last
            tokens, survival = [self.tokens[n] for n in nodes], [self.survival[n] for n in nodes]
            added = draft.add_drawn(here[parent], tokens, survival, self._drawn_from.get(parent), source)
            here |= zip(nodes, added, strict=True)
        return {number for node, number in here.items() if self.places.get(node) == number}
