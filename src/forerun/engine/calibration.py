"""How far a drafter's own estimates can be believed: acceptance of what it drafted, by depth and by estimate.

Knows: proposed trees and the tokens that really followed. Does not know: costs, models, who drafts next.

A member of a portfolio is scored on its own tree, whatever was verified of it: the tokens that followed tell which of
its nodes were right ("full information", Hedge-Spec). A node's chance given its parent is the share of nodes of its
kind (member, depth, the member's estimate) that were right, moved by how this request fared against that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from forerun.speculation.growth import Part
from forerun.speculation.tree import ROOT, DraftTree

_EDGES = (0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)  # between the kinds of estimates; one of exactly 1 is no estimate
_DEEPEST = 4  # depths from here on are one kind
_LAST_RANK = 4  # ranks from here on are one kind
_MEMORY = 0.99  # what a past node of a kind counts for after another one
_REQUEST_MEMORY = 0.96  # what a past node of a request counts for after another one
_PRIOR_NODES = 6.0  # how many nodes the prior chance counts for
_REQUEST_PRIOR = 8.0  # how many right nodes stand behind a request's being like all others
_PRIOR_CHANCE = 0.6
_MOST, _LEAST = 0.97, 0.005

Kind = tuple[str, int, int]  # member, depth, range of the estimate


@dataclass(slots=True)
class Tally:
    """A fading count of nodes and of those that were right (or were expected to be)."""

    tested: float = 0.0
    right: float = 0.0

    def add(self, tested: float, right: float, memory: float) -> None:
        """Count one more."""
        self.tested = self.tested * memory + tested
        self.right = self.right * memory + right

    @property
    def rate(self) -> float:
        """The share of right ones."""
        return self.right / max(self.tested, _LEAST)


_NOTHING: Final = Tally()


@dataclass(slots=True)
class Calibration:
    """Chances of nodes, learned from what followed."""

    _kinds: dict[Kind, Tally] = field(default_factory=dict)
    _requests: dict[tuple[str, str], Tally] = field(default_factory=dict)  # tested: right ones expected
    _ranks: dict[tuple[str, int], Tally] = field(default_factory=dict)  # right nodes, by member and rank in their tree

    def log_survival(self, request_id: str, part: Part) -> list[float]:
        """Log chance of every node of a member's tree, the root's being 0."""
        result = [0.0]
        factor = self._factor(request_id, part.member)
        for node in range(1, len(part.tree)):
            chance = min(max(self._chance(_kind(part, node)) * factor, _LEAST), _MOST)
            result.append(result[part.tree.parents[node]] + math.log(chance))
        return result

    def rank_rates(self, request_id: str, member: str) -> list[float]:
        """Chance that a member's likeliest node is right, then how that changes from one node to the next likely one.

        So the product of the first n is the chance of the n-th node, whatever the shape of the tree; in a chain they
        are the chances that a path which was right so far goes on. The last one holds for all ranks behind it.
        """
        factor = self._factor(request_id, member)
        ranks = range(1, _LAST_RANK + 1)
        rates = [tally.rate if (tally := self._ranks.get((member, rank))) else _PRIOR_CHANCE for rank in ranks]
        return [min(max(rate * factor, _LEAST), _MOST) for rate in rates]

    def learn(self, request_id: str, part: Part, tokens: Sequence[int]) -> int:
        """These tokens followed the root -> how many of them the member's tree holds as a path."""
        right = set()
        for parent, token in zip(_path(part.tree, tokens), tokens, strict=False):
            if self._learn_children(request_id, part, parent, token):
                right.add(part.tree.child_with(parent, token))
        self._learn_ranks(part, right)
        return len(right)

    def _learn_ranks(self, part: Part, right: Set[int | None]) -> None:
        """Count how often the node of a rank was right beside how often the one before it was."""
        survival, before = part.survival, True
        order = sorted(range(1, len(part.tree)), key=lambda node: (-survival[node], node))
        for rank, node in enumerate(order, 1):
            is_right = node in right
            if before or is_right:
                tally = self._ranks.setdefault((part.member, min(rank, _LAST_RANK)), _expected(_PRIOR_CHANCE))
                tally.add(before, is_right, _MEMORY)
            before = is_right

    def forget(self, request_id: str) -> None:
        """A request is over."""
        for key in [key for key in self._requests if key[0] == request_id]:
            del self._requests[key]

    def _learn_children(self, request_id: str, part: Part, parent: int, token: int) -> bool:
        """Count the children of a node that was right; whether one of them is `token`."""
        expected, found = 0.0, False
        for child in part.tree.children(parent):
            is_right = part.tree.tokens[child] == token
            kind = _kind(part, child)
            expected += self._chance(kind)
            self._kinds.setdefault(kind, _expected(_prior(kind[2]))).add(1.0, is_right, _MEMORY)
            found |= is_right
        if expected:
            tally = self._requests.setdefault((request_id, part.member), Tally())
            tally.add(min(expected, _MOST), found, _REQUEST_MEMORY)
        return found

    def _chance(self, kind: Kind) -> float:
        """The share of right ones, leaning on the estimate itself while little is known."""
        tally = self._kinds.get(kind)
        return tally.rate if tally else _prior(kind[2])

    def _factor(self, request_id: str, member: str) -> float:
        """How much better or worse than expected the member fares in this request."""
        tally = self._requests.get((request_id, member), _NOTHING)
        return (tally.right + _REQUEST_PRIOR) / (tally.tested + _REQUEST_PRIOR)


def _expected(chance: float) -> Tally:
    """What a count begins with, and forgets like all it has counted: an expectation must not outlive what was seen."""
    return Tally(_PRIOR_NODES, _PRIOR_NODES * chance)


def _path(tree: DraftTree, tokens: Sequence[int]) -> Iterator[int]:
    """The nodes with children along `tokens`: those whose children were put to the test."""
    node: int | None = ROOT
    for token in tokens:
        if node is None or not tree.children(node):
            return
        yield node
        node = tree.child_with(node, token)


def _kind(part: Part, node: int) -> Kind:
    estimate = math.exp(part.survival[node] - part.survival[part.tree.parents[node]])
    band = len(_EDGES) + 1 if estimate >= 1.0 else sum(estimate > edge for edge in _EDGES)
    return part.member, min(part.tree.depths[node], _DEEPEST), band


def _prior(band: int) -> float:
    """The middle of a range of estimates; a common chance where there is no estimate."""
    if band > len(_EDGES):
        return _PRIOR_CHANCE
    edges = (0.0, *_EDGES, 1.0)
    return (edges[band] + edges[band + 1]) / 2
