"""Best-first growth: which of the nodes drawn for a tree are kept, and which of them get children next.

Knows: one tree's nodes and their log chances, the rows their KV may lie in. Does not know: requests, logits, passes.

A tree is drawn level by level and larger than what is kept of it (EAGLE-2, arXiv 2406.16858, section 4): of all nodes
drawn so far the likeliest are kept, and of a level's new nodes those are expanded that are kept and whose children may
be. No child is likelier than its parent, so every kept node comes with its ancestors, and a node that is not kept at
one level never is again: its row is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from torch import Tensor

from forerun.speculation.drawn import DrawnTree
from forerun.speculation.growth import Children
from forerun.speculation.tree import ROOT


class Candidates:
    """All nodes drawn for one tree, in the order they were drawn; node 0 is the root."""

    def __init__(self, num_kept: int, width: int) -> None:
        """`num_kept`: nodes kept in the end, without the root. `width`: most nodes of a level that are expanded."""
        self.tokens = [-1]
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
        self.survival += [above + chance for _, chance in zip(children.tokens, children.log_chances, strict=False)]
        return list(range(first, len(self.tokens)))

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to this one."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens below the root on the way to this node, its own last."""
        return [self.tokens[above] for above in self.path(node)]

    def fill(self, leaves: Sequence[int], drawn: Iterator[Children]) -> list[int]:
        """Add each leaf's children while there is room -> the new nodes to expand next, none once the tree is full."""
        new = []
        for leaf in leaves:
            children, room = next(drawn), self._num_kept + 1 - len(self.tokens)
            if room > 0:
                new += self.hang(leaf, children._replace(tokens=children.tokens[:room]))
        if len(self.tokens) > self._num_kept:
            return []
        return sorted(sorted(new, key=lambda node: -self.survival[node])[: self._width])

    def kept(self) -> set[int]:
        """The likeliest nodes; ties go to those drawn first."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.survival[node], node))
        return set(order[: self._num_kept])

    def useful(self, new: Sequence[int], kept: set[int]) -> list[int]:
        """A level's nodes whose children may be kept, the likeliest first."""
        is_full = len(kept) == self._num_kept
        worst = min((self.survival[node] for node in kept), default=0.0)
        found = [node for node in new if node in kept and (not is_full or self.survival[node] > worst)]
        return sorted(found, key=lambda node: -self.survival[node])[: self._width]

    def chance(self, nodes: Sequence[int]) -> float:
        """The chance that one of these nodes is right; none may be an ancestor of another."""
        return sum(math.exp(self.survival[node]) for node in nodes)

    def expand(self, leaves: Sequence[int], kept: set[int]) -> list[int]:
        """Give these nodes rows of their own, reusing rows of nodes that are not kept -> the nodes by row."""
        self.places = {node: place for node, place in self.places.items() if node == ROOT or node in kept}
        taken = set(self.places.values())
        free = (place for place in range(self._num_kept + 1) if place not in taken)
        self.places.update(zip(leaves, free, strict=False))
        return sorted(leaves, key=self.places.__getitem__)

    def finish(self) -> DrawnTree:
        """The kept nodes, in the order they were drawn."""
        nodes = sorted(self.kept())
        numbers = {ROOT: ROOT, **{node: number for number, node in enumerate(nodes, 1)}}
        return DrawnTree(
            tokens=[self.tokens[node] for node in nodes],
            parents=[numbers[self.parents[node]] for node in nodes],
            log_chances=[self.survival[node] for node in nodes],
            places=[self.places.get(node, -1) for node in nodes],
            drawn_from={numbers[node]: q for node, q in self._drawn_from.items() if node in numbers},
        )


def best_products(tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], num_nodes: int) -> DrawnTree:
    """The tree of heads that do not see the drafted prefix: of all paths of ranks the likeliest, the likeliest first.

    tokens (-1 after the last possible one) and their log chances [depths][ranks], best first. Every node of a
    depth has the same candidates, so the best tree of n nodes consists of the n paths with the largest sums of log
    chances, found one by one with a heap (Medusa, arXiv 2401.10774, section 2.3.3, has such a tree fixed beforehand;
    here it is new for every step). A path's prefixes and its siblings of better rank have no smaller sums, so they come
    before it. Of equal sums the shorter path comes first, then the one whose parent does, then the better rank: an
    order that can be found level by level as well (`runtime.head_trees`, on a device).
    """
    return best_paths([[ids] for ids in tokens], [[best] for best in chances], None, num_nodes)


def best_paths(
    tokens: Sequence[Sequence[Sequence[int]]], chances: Sequence[Sequence[Sequence[float]]],
    places: Sequence[Sequence[Sequence[int]]] | None, num_nodes: int,
) -> DrawnTree:  # fmt: skip
    """`best_products` of heads that see the token above: candidates [depths][places above][ranks].

    The candidates of a depth are the same whatever is above, their order and log chances are not: `places` says which
    of them each is. None: nothing depends on what is above, and there is one place.
    """
    drawn, parents, survival = list[int](), list[int](), [0.0]
    heap = [(-chances[0][0][0], 0, ROOT, 0, 0)]  # (minus the path's log chance, depth, parent, rank, place above)
    while heap and len(drawn) < num_nodes:
        cost, depth, parent, rank, above = heappop(heap)
        if tokens[depth][above][rank] < 0:
            continue
        drawn.append(tokens[depth][above][rank])
        parents.append(parent)
        survival.append(-cost)
        if rank + 1 < len(chances[depth][above]):
            beside = chances[depth][above][rank + 1]
            heappush(heap, (-(survival[parent] + beside), depth, parent, rank + 1, above))
        if depth + 1 < len(chances):
            place = 0 if places is None else places[depth][above][rank]
            heappush(heap, (-(-cost + chances[depth + 1][place][0]), depth + 1, len(drawn), 0, place))
    return DrawnTree(drawn, parents, survival[1:], [-1] * len(drawn), {})
