"""Draft trees: guessed continuations of one sequence.

Knows: tokens, parents, who proposed a node and from which distribution; derives depths, ancestor masks, paths.
Does not know: probabilities' meaning, verification, caches.

Node 0 is the root, the last known token. A chain is a tree without branches; a root alone means "do not speculate".
Nodes are added parents first, so every ancestor has a lower index and masks grow with one shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

MAX_NODES: Final = 64  # a node's ancestors are the bits of one 64-bit mask
ROOT: Final = 0


class DraftTree:
    """A tree of guessed tokens below a root.

    `proposal(node)` is the distribution [vocab_size] float64 the node's children were drawn from, without
    replacement and in the order of `children(node)`; None means they were chosen without randomness.
    """

    __slots__ = ("_children", "_depths", "_masks", "_parents", "_proposals", "_sources", "_tokens")

    def __init__(self, root_token: int) -> None:
        self._tokens = [root_token]
        self._parents = [-1]
        self._depths = [0]
        self._masks = [1]
        self._sources = [""]
        self._children: list[list[int]] = [[]]
        self._proposals: dict[int, Tensor] = {}

    def add(self, parent: int, token: int, source: str) -> int:
        """Append a node and return its index; an equal child of the same parent is returned instead of a new one."""
        for child in self._children[parent]:
            if self._tokens[child] == token:
                return child
        assert len(self._tokens) < MAX_NODES, "tree is full"
        node = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._masks.append(self._masks[parent] | 1 << node)
        self._sources.append(source)
        self._children[parent].append(node)
        self._children.append([])
        return node

    def add_chain(self, parent: int, tokens: Sequence[int], source: str) -> list[int]:
        """Append tokens one below the other and return their nodes, some of which may be there already."""
        nodes = list[int]()
        while len(nodes) < len(tokens) and self._children[parent]:
            parent = self.add(parent, tokens[len(nodes)], source)
            nodes.append(parent)
        first, depth, mask = len(self._tokens), self._depths[parent], self._masks[parent]
        new = tokens[len(nodes) :]
        end = first + len(new)
        assert end <= MAX_NODES, "tree is full"
        if new:
            self._children[parent].append(first)
            self._tokens += new
            self._parents += [parent, *range(first, end - 1)]
            self._depths += range(depth + 1, depth + 1 + len(new))
            self._masks += [mask | (2 << node) - (1 << first) for node in range(first, end)]
            self._sources += [source] * len(new)
            self._children += [*([node] for node in range(first + 1, end)), []]
        return [*nodes, *range(first, end)]

    def draw_children(self, parent: int, tokens: Sequence[int], proposal: Tensor | None, source: str) -> list[int]:
        """Add children drawn from `proposal` [vocab_size] in draw order (None: chosen without randomness)."""
        if proposal is not None:
            assert not self._children[parent], "a node's children are drawn once"
            self._proposals[parent] = proposal
        return [self.add(parent, token, source) for token in tokens]

    def truncate(self, num_nodes: int) -> None:
        """Remove all nodes but the first `num_nodes`."""
        for node in range(len(self._tokens) - 1, num_nodes - 1, -1):
            self._children[self._parents[node]].pop()  # the newest child is the last
            self._proposals.pop(self._parents[node], None)
        for column in (self._tokens, self._parents, self._depths, self._masks, self._sources, self._children):
            del column[num_nodes:]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """Token ids, root first."""
        return self._tokens

    @property
    def parents(self) -> Sequence[int]:
        """Parent indices; -1 for the root."""
        return self._parents

    @property
    def depths(self) -> Sequence[int]:
        """Distance from the root."""
        return self._depths

    @property
    def masks(self) -> Sequence[int]:
        """Ancestors and self, one bit per node."""
        return self._masks

    @property
    def sources(self) -> Sequence[str]:
        """Which drafter proposed each node; "" for the root."""
        return self._sources

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return all(len(children) <= 1 for children in self._children)

    def children(self, node: int) -> Sequence[int]:
        """Child nodes in the order they were added."""
        return self._children[node]

    def child_with(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if any."""
        for child in self._children[node]:
            if self._tokens[child] == token:
                return child
        return None

    def proposal(self, node: int) -> Tensor | None:
        """What the node's children were drawn from; None: chosen without randomness."""
        return self._proposals.get(node)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens below the root on the way to `node`, its own last."""
        return [self._tokens[i] for i in self.path(node)[1:]]
