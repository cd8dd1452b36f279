"""How often what a drafter proposes is right.

Knows: proposals and the tokens that really followed. Does not know: costs, networks, who drafts next.

A drafter is scored on all it proposed, whatever was verified of it: the tokens that followed tell which nodes were
right. Two statistics are kept. *By rank*, for the plan that is made before there are drafts: how often the likeliest
node is right, and how that falls from one rank to the next. *By estimate*, for the drafts themselves: how often nodes
with about this estimate, given their parents, are right. The first are moved by how a request fares beside others.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from forerun.core import Request
from forerun.speculation.draft import Proposal

_EDGES: Final = (0.03, 0.08, 0.15, 0.3, 0.5, 0.7, 0.9)  # between bands of estimates; one of exactly 1 is no estimate
_LOG_EDGES: Final = tuple(map(math.log, _EDGES))
NUM_KINDS: Final = 4  # ranks and depths from here on are one kind
USUAL_CHANCE: Final = 0.6  # of a node, until some were seen: the drafters trained here have 0.3 to 0.85 at T = 0 and 1
# What is believed of a band until some of it were seen; the last band is that of nodes without an estimate.
_MIDDLES: Final = (*((a + b) / 2 for a, b in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)), USUAL_CHANCE)
LEAST: Final = 0.03  # chance below which, and above whose complement, nothing is believed: drafts always surprise
MEMORY: Final = 0.99  # what a node counts for after the next of its kind: kinds change within some hundred steps
# A prediction is tried before the answer has so many tokens, whatever was learned elsewhere, with so many drafts.
PROMISED_WITHIN, PROMISED = 8, 8
PRIOR: Final = 10.0  # nodes that what is usual counts for beside a kind's own, and beside a request's


@dataclass(slots=True)
class Tally:
    """A fading count of nodes that were tested and of those that were right (or were expected to be)."""

    tested: float
    right: float

    def add(self, tested: float, right: float, memory: float) -> None:
        """Count one more."""
        self.tested = self.tested * memory + tested
        self.right = self.right * memory + right

    @property
    def rate(self) -> float:
        """The share of right ones."""
        return self.right / max(self.tested, LEAST)


_UNSEEN: Final = Tally(1.0, USUAL_CHANCE)


@dataclass(slots=True)
class Acceptance:
    """Chances of nodes, learned from what followed."""

    ranks: dict[tuple[str, int], Tally] = field(default_factory=dict)  # by drafter and rank
    bands: dict[tuple[str, int, int], Tally] = field(default_factory=dict)  # by drafter, depth and band of estimates
    depths: dict[tuple[str, int], Tally] = field(default_factory=dict)  # right nodes with a right child
    calls: dict[str, Tally] = field(default_factory=dict)  # requests a drafter was asked for, and proposed anything

    # -- queries ------------------------------------------------------------------------------------------------

    def found(self, member: str) -> float:
        """The chance that a drafter proposes anything when asked."""
        tally = self.calls.get(member)
        return tally.rate if tally is not None else 1.0

    def rates(self, request: Request, member: str) -> list[float]:
        """The chance that a drafter's likeliest node is right, then how it changes from each rank to the next.

        The product of the first n is the chance of the n-th node, whatever the shape of the tree. The last one holds
        for all ranks behind it.
        """
        usual = [self.ranks.get((member, rank), _UNSEEN).rate for rank in range(1, NUM_KINDS + 1)]
        expected, right = request.right_drafts.get(member, (0.0, 0.0))
        prior = PRIOR * _believed(usual[0])
        factor = (right + prior) / (expected + prior)
        return [_believed(rate * factor) for rate in usual]

    def log_chances(self, proposal: Proposal) -> list[float]:
        """Log chance of the whole path to every node of a proposal, the root's being 0."""
        result = [0.0]
        for place, parent in enumerate(proposal.parents[1:], 1):
            tally = self.bands.get(kind := _kind(proposal, place))
            chance = _MIDDLES[kind[2]] if tally is None else tally.rate
            result.append(result[parent] + math.log(_believed(chance)))
        return result

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self, request: Request, proposal: Proposal, tokens: Sequence[int]) -> None:
        """These tokens followed the root."""
        path, expected, num_tested = [0], 0.0, 0
        for token in tokens:
            places = [place for place, parent in enumerate(proposal.parents) if parent == path[-1]]
            if not places:
                break
            right = next((place for place in places if proposal.tokens[place] == token), None)
            expected += self._learn_children(proposal, places, right)
            num_tested += 1
            if right is None:
                break
            path.append(right)
        if num_tested:
            before, memory = request.right_drafts.get(proposal.member, (0.0, 0.0)), MEMORY**num_tested
            now = before[0] * memory + expected, before[1] * memory + (len(path) - 1)
            request.right_drafts[proposal.member] = now
        self._learn_ranks(proposal, set(path[1:]), path[-1] if len(path) > len(tokens) else None)

    def learn_call(self, member: str, found: bool) -> None:
        """The drafter was asked, and proposed anything or not."""
        _tally(self.calls, member, 1.0).add(1.0, found, MEMORY)

    def _learn_children(self, proposal: Proposal, places: Sequence[int], right: int | None) -> float:
        """Count the children of a right node -> the chance that one of them was expected to have at this depth."""
        for place in places:
            kind = _kind(proposal, place)
            _tally(self.bands, kind, _MIDDLES[kind[2]]).add(1.0, place == right, MEMORY)
        depth = _tally(self.depths, (proposal.member, min(proposal.depths[places[0]], NUM_KINDS)), USUAL_CHANCE)
        expected = depth.rate
        depth.add(1.0, right is not None, MEMORY)
        return expected

    def _learn_ranks(self, proposal: Proposal, right: Set[int], end: int | None) -> None:
        """Count how often the node of a rank was right beside how often the one before it was.

        What follows place `end`, with which the known text ends, was neither right nor wrong.
        """
        chances = proposal.log_chances
        order = sorted(range(1, len(chances)), key=chances.__getitem__, reverse=True)  # equal ones as they are
        before, num_left = True, len(right)
        for rank, place in enumerate(order, 1):
            if proposal.parents[place] == end or not (before or num_left):
                break
            is_right = place in right
            num_left -= is_right
            if before or is_right:
                kind = (proposal.member, min(rank, NUM_KINDS))
                _tally(self.ranks, kind, USUAL_CHANCE).add(before, is_right, MEMORY)
            before = is_right


def is_promised(request: Request, readers: Set[str], in_debt: bool) -> bool:
    """Whether drafts of its prediction are made whatever was learned elsewhere: the user's word counts more.

    readers: drafters that read it. Once at the beginning; where drafts have lost too much (`in_debt`), also while most
    of it was right. What was right fades, so that it is compared with 64 tokens at most.
    """
    if not request.prediction:
        return False
    right = [request.right_drafts[member][1] for member in readers & request.right_drafts.keys()]
    if not right:
        return request.num_output < PROMISED_WITHIN
    return in_debt and sum(right) >= 0.4 * min(request.num_output, 64)


def _tally(tallies: dict[Any, Tally], key: Any, chance: float) -> Tally:
    """The count of a kind. It begins with an expectation, which it forgets like all it has counted."""
    known = tallies.get(key)
    if known is None:
        known = tallies[key] = Tally(PRIOR, PRIOR * chance)
    return known


def _believed(chance: float) -> float:
    return chance if LEAST <= chance <= 1.0 - LEAST else LEAST if chance < LEAST else 1.0 - LEAST


def _kind(proposal: Proposal, place: int) -> tuple[str, int, int]:
    log_estimate = proposal.log_chances[place] - proposal.log_chances[proposal.parents[place]]
    band = len(_MIDDLES) - 1 if log_estimate >= 0.0 else bisect_left(_LOG_EDGES, log_estimate)
    return proposal.member, min(proposal.depths[place], NUM_KINDS), band
