"""How far a drafter's own estimates can be believed: acceptance of what it drafted, by depth and by estimate.

Knows: proposed trees and the tokens that really followed. Does not know: costs, models, who drafts next.

A member of a portfolio is scored on its own tree, whatever was verified of it: the tokens that followed tell which of
its nodes were right ("full information", Hedge-Spec). A node's chance given its parent is the share of nodes of its
kind (member, depth, the member's estimate) that were right, moved by how this request fared against that.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeVar

from forerun.speculation.draft import Proposal

_EDGES = (0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)  # between the kinds of estimates; one of exactly 1 is no estimate
_LOG_EDGES = tuple(map(math.log, _EDGES))
_DEEPEST = 4  # depths from here on are one kind
_LAST_RANK = 4  # ranks from here on are one kind
_MEMORY = 0.99  # what a past node of a kind counts for after another one
_REQUEST_MEMORY = 0.975  # what a past node of a request counts for after another one
_PRIOR_NODES = 6.0  # how many nodes the prior chance counts for
_REQUEST_PRIOR = 16.0  # how many nodes stand behind a request's being like all others
_NEWCOMER_STEPS, _NEWCOMER_MEMORY = 4, 0.98  # first steps of a request that tell what the next request is like
_PRIOR_CHANCE = 0.6
MOST_LIKELY: Final = 0.97  # no node is believed to be right more often
_LEAST = 0.005
_REACH = 2  # nodes more that a right one lets a member be asked for

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


@dataclass(slots=True)
class Standing:
    """How much better or worse than expected members fare in single requests, and in requests at their beginnings."""

    _requests: dict[tuple[str, str], Tally] = field(default_factory=dict)  # tested: right ones expected
    _newcomers: dict[str, Tally] = field(default_factory=dict)  # likewise, of requests' first nodes, by member

    def learn(self, request_id: str, member: str, num: int, expected: float, right: int) -> None:
        """Of so many nodes put to the test in a step so many were expected to have a right child, and had one."""
        tally = self._requests.get((request_id, member))
        if tally is None:
            tally = self._requests[request_id, member] = Tally()
        if tally.num_added < _NEWCOMER_STEPS:
            newcomers = self._newcomers.get(member)
            if newcomers is None:
                newcomers = self._newcomers[member] = Tally(_REQUEST_PRIOR, _REQUEST_PRIOR)
            newcomers.add(expected, right, _NEWCOMER_MEMORY**num)
        tally.add(expected, right, _REQUEST_MEMORY**num)

    def factor(self, request_id: str, member: str, rate: float) -> float:
        """Of the request, which a member of such a rate is expected to fare in like newcomers until more is known.

        Not like all others: what is counted over all nodes is mostly of requests in which drafts are right, since those
        are drafted for.
        """
        tally, newcomers = self._requests.get((request_id, member), _NOTHING), self._newcomers.get(member)
        usual = newcomers.rate if newcomers is not None else 1.0
        expected = _REQUEST_PRIOR * rate + _LEAST
        return (tally.right + expected * usual) / (tally.tested + expected)

    def forget(self, request_id: str) -> None:
        """A request is over."""
        for key in [key for key in self._requests if key[0] == request_id]:
            del self._requests[key]


@dataclass(slots=True)
class Calibration:
    """Chances of nodes, learned from what followed."""

    _kinds: dict[Kind, Tally] = field(default_factory=dict)
    _depths: dict[tuple[str, int], Tally] = field(default_factory=dict)  # nodes with a right child, by depth
    _of_kinds: Standing = field(default_factory=Standing)  # beside what kinds of estimates were right
    _of_depths: Standing = field(default_factory=Standing)  # beside what was right without looking at estimates
    _ranks: dict[tuple[str, int], Tally] = field(default_factory=dict)  # right nodes, by member and rank in their tree
    _num_right: Counter[str] = field(default_factory=Counter)  # nodes by member, never forgotten

    def log_survival(self, request_id: str, proposal: Proposal) -> list[float]:
        """Log chance of every node of a member's tree, the root's being 0."""
        result, parents, tallies = [0.0], proposal.parents, self._kinds
        factor = self._of_kinds.factor(request_id, proposal.member, self._first_rate(proposal.member))
        for node in range(1, len(parents)):
            kind = _kind(proposal, node)
            tally = tallies.get(kind)
            chance = factor * (tally.right / tally.tested if tally is not None else _PRIORS[kind[2]])
            result.append(result[parents[node]] + math.log(min(max(chance, _LEAST), MOST_LIKELY)))
        return result

    def rank_rates(self, request_id: str, member: str) -> list[float]:
        """Chance that a member's likeliest node is right, then how that changes from one node to the next likely one.

        So the product of the first n is the chance of the n-th node, whatever the shape of the tree; in a chain they
        are the chances that a path which was right so far goes on. The last one holds for all ranks behind it.
        """
        factor = self._of_depths.factor(request_id, member, self._first_rate(member))
        ranks = range(1, _LAST_RANK + 1)
        rates = [tally.rate if (tally := self._ranks.get((member, rank))) else _PRIOR_CHANCE for rank in ranks]
        return [min(max(rate * factor, _LEAST), MOST_LIKELY) for rate in rates]

    def reach(self, member: str) -> int:
        """How many nodes a member may be asked for: one that was never right gets one, and soon as many as it likes.

        What nobody has seen drafting is believed to be as good as most are; if it is not, to learn so from single
        drafts costs least.
        """
        return 1 + _REACH * self._num_right[member]

    def learn(self, request_id: str, proposal: Proposal, tokens: Sequence[int]) -> int:
        """These tokens followed the root -> how many of them the member's tree holds as a path."""
        children = _children(proposal)
        path = _path(proposal, children, tokens)
        num_right, by_kind, by_depth, num_tested = len(path) - 1, 0.0, 0.0, 0
        self._num_right[proposal.member] += num_right
        for parent, token in zip(path, tokens, strict=False):
            if children[parent]:
                by_kind += self._learn_children(proposal, children[parent], token)
                by_depth += self._learn_depth(proposal.member, num_tested, num_tested < num_right)
                num_tested += 1
        if num_tested:
            self._of_kinds.learn(request_id, proposal.member, num_tested, by_kind, num_right)
            self._of_depths.learn(request_id, proposal.member, num_tested, by_depth, num_right)
        self._learn_ranks(proposal, set(path[1:]), path[-1] if len(path) > len(tokens) else None)
        return num_right

    def _learn_depth(self, member: str, depth: int, is_right: bool) -> float:
        """Count a node of the right path with children -> the chance one of them was expected to have."""
        tally = _tally(self._depths, (member, min(depth, _DEEPEST)), _PRIOR_CHANCE)
        expected = tally.rate
        tally.add(1.0, is_right, _MEMORY)
        return expected

    def _first_rate(self, member: str) -> float:
        first = self._ranks.get((member, 1))
        return first.rate if first is not None else _PRIOR_CHANCE

    def _learn_ranks(self, proposal: Proposal, right: Set[int], end: int | None) -> None:
        """Count how often the node of a rank was right beside how often the one before it was.

        What follows node `end`, with which the known text ends, was neither right nor wrong: where fewer nodes are
        verified than drafted, to count them as wrong would make all long drafts look bad.
        """
        survival, member, before = proposal.log_chances, proposal.member, True
        order: Sequence[int] = range(1, len(survival))
        if is_tree := proposal.parents != tuple(range(-1, len(survival) - 1)):
            order = sorted(order, key=lambda node: (-survival[node], node))
        for rank, node in enumerate(order, 1):
            if (end is not None and node != end and _is_below(proposal, node, end)) or not (before or is_tree):
                break
            is_right = node in right
            if before or is_right:
                _tally(self._ranks, (member, min(rank, _LAST_RANK)), _PRIOR_CHANCE).add(before, is_right, _MEMORY)
            before = is_right

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._of_kinds.forget(request_id)
        self._of_depths.forget(request_id)

    def _learn_children(self, proposal: Proposal, children: Sequence[int], token: int) -> float:
        """Count the children of a node that was right -> the chance one of them was expected to have."""
        expected, tokens = 0.0, proposal.tokens
        for child in children:
            kind = _kind(proposal, child)
            tally = _tally(self._kinds, kind, _PRIORS[kind[2]])
            expected += tally.right / tally.tested
            tally.add(1.0, tokens[child] == token, _MEMORY)
        return min(expected, MOST_LIKELY)


Key = TypeVar("Key")


def _tally(tallies: dict[Key, Tally], key: Key, chance: float) -> Tally:
    """The count of a kind.

    It begins with an expectation and forgets that like all it has counted: it must not outlive what was seen.
    """
    known = tallies.get(key)
    if known is None:
        known = tallies[key] = Tally(_PRIOR_NODES, _PRIOR_NODES * chance)
    return known


def _children(proposal: Proposal) -> list[list[int]]:
    """The children of each of a proposal's nodes."""
    children: list[list[int]] = [[] for _ in proposal.parents]
    for node, parent in enumerate(proposal.parents[1:], 1):
        children[parent].append(node)
    return children


def _is_below(proposal: Proposal, node: int, above: int) -> bool:
    while node > above:
        node = proposal.parents[node]
    return node == above


def _path(proposal: Proposal, children: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """The root and the nodes below it along `tokens`, as far as they go."""
    path = [0]
    for token in tokens:
        node = next((child for child in children[path[-1]] if proposal.tokens[child] == token), None)
        if node is None:
            break
        path.append(node)
    return path


def _kind(proposal: Proposal, node: int) -> Kind:
    survival = proposal.log_chances
    log_estimate = survival[node] - survival[proposal.parents[node]]
    band = len(_EDGES) + 1 if log_estimate >= 0.0 else bisect_left(_LOG_EDGES, log_estimate)
    return proposal.member, min(proposal.depths[node], _DEEPEST), band


def _prior(band: int) -> float:
    """The middle of a range of estimates; a common chance where there is no estimate."""
    if band > len(_EDGES):
        return _PRIOR_CHANCE
    edges = (0.0, *_EDGES, 1.0)
    return (edges[band] + edges[band + 1]) / 2


_PRIORS: Final = tuple(_prior(band) for band in range(len(_EDGES) + 2))
