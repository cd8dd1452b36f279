"""How far a drafter's own estimates can be believed: acceptance of what it drafted, by depth and by estimate.

Knows: proposed trees and the tokens that really followed. Does not know: costs, models, who drafts next.

A member of a portfolio is scored on its own tree, whatever was verified of it: the tokens that followed tell which of
its nodes were right ("full information", Hedge-Spec). A node's chance given its parent is the share of nodes of its
kind (member, depth, the member's estimate) that were right, moved by how this request fared against that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from forerun.speculation.growth import Part
from forerun.speculation.tree import ROOT, DraftTree

_EDGES = (0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)  # between the kinds of estimates; one of exactly 1 is no estimate
_LOG_EDGES = tuple(map(math.log, _EDGES))
_DEEPEST = 4  # depths from here on are one kind
_LAST_RANK = 4  # ranks from here on are one kind
_MEMORY = 0.99  # what a past node of a kind counts for after another one
_REQUEST_MEMORY = 0.975  # what a past node of a request counts for after another one
_PRIOR_NODES = 6.0  # how many nodes the prior chance counts for
_REQUEST_PRIOR = 12.0  # how many nodes stand behind a request's being like all others
_NEWCOMER_STEPS, _NEWCOMER_MEMORY = 4, 0.98  # first steps of a request that tell what the next request is like
_PRIOR_CHANCE = 0.6
MOST_LIKELY: Final = 0.97  # no node is believed to be right more often
_LEAST = 0.005

Kind = tuple[str, int, int]  # member, depth, range of the estimate


@dataclass(slots=True)
class Tally:
    """A fading count of nodes and of those that were right (or were expected to be)."""

    tested: float = 0.0
    right: float = 0.0
    num_added: int = 0

    def add(self, tested: float, right: float, memory: float) -> None:
        """Count one more."""
        self.tested = self.tested * memory + tested
        self.right = self.right * memory + right
        self.num_added += 1

    @property
    def rate(self) -> float:
        """The share of right ones."""
        return self.right / max(self.tested, _LEAST)


_NOTHING: Final = Tally()


class Tested(NamedTuple):
    """Nodes of a request whose children a step has put to the test, and how many had a right one."""

    num: int
    expected: float
    right: int


@dataclass(slots=True)
class Calibration:
    """Chances of nodes, learned from what followed."""

    _kinds: dict[Kind, Tally] = field(default_factory=dict)
    _requests: dict[tuple[str, str], Tally] = field(default_factory=dict)  # tested: right ones expected
    _newcomers: dict[str, Tally] = field(default_factory=dict)  # likewise, of requests' first nodes, by member
    _ranks: dict[tuple[str, int], Tally] = field(default_factory=dict)  # right nodes, by member and rank in their tree

    def log_survival(self, request_id: str, part: Part) -> list[float]:
        """Log chance of every node of a member's tree, the root's being 0."""
        result, parents, tallies = [0.0], part.tree.parents, self._kinds
        factor = self._factor(request_id, part.member)
        for node in range(1, len(part.tree)):
            kind = _kind(part, node)
            tally = tallies.get(kind)
            chance = factor * (tally.right / tally.tested if tally is not None else _PRIORS[kind[2]])
            result.append(result[parents[node]] + math.log(min(max(chance, _LEAST), MOST_LIKELY)))
        return result

    def rank_rates(self, request_id: str, member: str) -> list[float]:
        """Chance that a member's likeliest node is right, then how that changes from one node to the next likely one.

        So the product of the first n is the chance of the n-th node, whatever the shape of the tree; in a chain they
        are the chances that a path which was right so far goes on. The last one holds for all ranks behind it.
        """
        factor = self._factor(request_id, member)
        ranks = range(1, _LAST_RANK + 1)
        rates = [tally.rate if (tally := self._ranks.get((member, rank))) else _PRIOR_CHANCE for rank in ranks]
        return [min(max(rate * factor, _LEAST), MOST_LIKELY) for rate in rates]

    def learn(self, request_id: str, part: Part, tokens: Sequence[int]) -> int:
        """These tokens followed the root -> how many of them the member's tree holds as a path."""
        path = _path(part.tree, tokens)
        expected, num_tested = 0.0, 0
        for parent, token in zip(path, tokens, strict=False):
            if part.tree.children(parent):
                expected += self._learn_children(part, parent, token)
                num_tested += 1
        if num_tested:
            self._learn_request(request_id, part.member, Tested(num_tested, expected, len(path) - 1))
        self._learn_ranks(part, set(path[1:]), path[-1] if len(path) > len(tokens) else None)
        return len(path) - 1

    def _learn_ranks(self, part: Part, right: Set[int], end: int | None) -> None:
        """Count how often the node of a rank was right beside how often the one before it was.

        What follows node `end`, with which the known text ends, was neither right nor wrong: where fewer nodes are
        verified than drafted, to count them as wrong would make all long drafts look bad.
        """
        survival, masks, before = part.survival, part.tree.masks, True
        order: Sequence[int] = range(1, len(part.tree))
        if is_tree := not part.tree.is_chain:
            order = sorted(order, key=lambda node: (-survival[node], node))
        for rank, node in enumerate(order, 1):
            if (end is not None and node != end and masks[node] >> end & 1) or not (before or is_tree):
                break
            is_right = node in right
            if before or is_right:
                _tally(self._ranks, (part.member, min(rank, _LAST_RANK)), _PRIOR_CHANCE).add(before, is_right, _MEMORY)
            before = is_right

    def forget(self, request_id: str) -> None:
        """A request is over."""
        for key in [key for key in self._requests if key[0] == request_id]:
            del self._requests[key]

    def _learn_children(self, part: Part, parent: int, token: int) -> float:
        """Count the children of a node that was right -> the chance one of them was expected to have."""
        expected, tokens = 0.0, part.tree.tokens
        for child in part.tree.children(parent):
            kind = _kind(part, child)
            tally = _tally(self._kinds, kind, _PRIORS[kind[2]])
            expected += tally.right / tally.tested
            tally.add(1.0, tokens[child] == token, _MEMORY)
        return min(expected, MOST_LIKELY)

    def _learn_request(self, request_id: str, member: str, tested: Tested) -> None:
        tally = self._requests.get((request_id, member))
        if tally is None:
            tally = self._requests[request_id, member] = Tally()
        if tally.num_added < _NEWCOMER_STEPS:
            newcomers = self._newcomers.get(member)
            if newcomers is None:
                newcomers = self._newcomers[member] = Tally(_REQUEST_PRIOR, _REQUEST_PRIOR)
            newcomers.add(tested.expected, tested.right, _NEWCOMER_MEMORY**tested.num)
        tally.add(tested.expected, tested.right, _REQUEST_MEMORY**tested.num)

    def _factor(self, request_id: str, member: str) -> float:
        """How much better or worse than expected the member fares in this request.

        At first as much as requests did in their beginnings: what is counted over all nodes is mostly of requests in
        which drafts are right, since those are drafted for.
        """
        tally, newcomers = self._requests.get((request_id, member), _NOTHING), self._newcomers.get(member)
        usual = newcomers.rate if newcomers is not None else 1.0
        first = self._ranks.get((member, 1))
        expected = _REQUEST_PRIOR * (first.rate if first is not None else _PRIOR_CHANCE) + _LEAST
        return (tally.right + expected * usual) / (tally.tested + expected)


Key = TypeVar("Key")


def _tally(tallies: dict[Key, Tally], key: Key, chance: float) -> Tally:
    """The count of a kind.

    It begins with an expectation and forgets that like all it has counted: it must not outlive what was seen.
    """
    known = tallies.get(key)
    if known is None:
        known = tallies[key] = Tally(_PRIOR_NODES, _PRIOR_NODES * chance)
    return known


def _path(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """The root and the nodes below it along `tokens`, as far as they go."""
    path = [ROOT]
    for token in tokens:
        node = tree.child_with(path[-1], token)
        if node is None:
            break
        path.append(node)
    return path


def _kind(part: Part, node: int) -> Kind:
    survival, tree = part.survival, part.tree
    log_estimate = survival[node] - survival[tree.parents[node]]
    band = len(_EDGES) + 1 if log_estimate >= 0.0 else bisect_left(_LOG_EDGES, log_estimate)
    return part.member, min(tree.depths[node], _DEEPEST), band


def _prior(band: int) -> float:
    """The middle of a range of estimates; a common chance where there is no estimate."""
    if band > len(_EDGES):
        return _PRIOR_CHANCE
    edges = (0.0, *_EDGES, 1.0)
    return (edges[band] + edges[band + 1]) / 2


_PRIORS: Final = tuple(_prior(band) for band in range(len(_EDGES) + 2))
