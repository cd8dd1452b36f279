"""Which nodes are worth their time: arithmetic of expected tokens and seconds.

Knows: what nodes would bring and what rows and calls cost. Does not know: requests, drafters, where figures come from.

A step is planned for all its requests together: their rows share one pass, and one call drafts for all of them. Nodes
are taken in the order of what they bring (greedy choice is optimal for a given number of rows: TETRIS, arXiv
2502.15197), and of all numbers of nodes the one with the most tokens per second is chosen, none among them
(SmartSpec's goodput, arXiv 2406.14066).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Outlook(NamedTuple):
    """What a step would be without more nodes."""

    tokens: float  # expected
    num_rows: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class CallPlan(NamedTuple):
    """How many nodes each request gets of one call, and what that makes of the step."""

    sizes: list[int]
    after: Outlook


def plan_call(
    gains: Sequence[Sequence[float]],
    without: Outlook,
    step_s: Callable[[int], float],
    call_s: Callable[[int, int], float],
) -> CallPlan:
    """The best sizes. `gains` [requests][nodes] are the tokens each next node of a request is expected to add.

    `step_s` gives the seconds of a step by its rows, `call_s` those of a call by drafts and requests.
    """
    tokens, best_tokens, best_s = without.tokens, without.tokens, without.seconds
    num_asked = most = num_best = 0
    order, most_tokens = _best_first(gains), tokens + sum(map(sum, gains))
    for count, (_, place, index) in enumerate(order, 1):
        tokens += gains[index][place]
        if place == 0:
            num_asked += 1
        if place >= most:
            most = place + 1
        seconds = step_s(without.num_rows + count) + call_s(most, num_asked)
        if tokens * best_s > best_tokens * seconds:
            best_tokens, best_s, num_best = tokens, seconds, count
        elif most_tokens * best_s < best_tokens * seconds:
            break  # nor would it pay if all that is left came for nothing
    sizes = [0] * len(gains)
    for _, _, index in order[:num_best]:
        sizes[index] += 1
    return CallPlan(sizes, Outlook(best_tokens, without.num_rows + num_best, best_s))


def _best_first(gains: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(minus what it brings, place among its request's, request) of every node, none before one it follows."""
    order = []
    for index, of_request in enumerate(gains):
        least = math.inf
        for place, gain in enumerate(of_request):
            least = min(least, gain)
            order.append((-least, place, index))
    return sorted(order) if len(gains) > 1 else order


def expected_gains(rates: Sequence[float], found: Sequence[float], num_nodes: int) -> list[float]:
    """What each next node of a drafter is expected to add to the step's tokens.

    The likeliest nodes come first: a node's chance is `rates` [rank] times that of the one before it. A right one adds
    a token unless an earlier drafter's node holds it, of which `found` [depth] is the chance, as if all were chains.
    """
    gains, chance = list[float](), 1.0
    for place in range(num_nodes):
        chance *= rates[min(place, len(rates) - 1)]
        gains.append(chance * (1.0 - found[place]) if place < len(found) else chance)
    return gains


def found_by_depth(depths: Sequence[int], log_chances: Sequence[float]) -> list[float]:
    """Chance that a tree's nodes hold the right token, by depth; the first entries of both are the root's."""
    mass = [0.0] * max(depths)
    for depth, chance in zip(depths[1:], log_chances[1:], strict=True):
        mass[depth - 1] += math.exp(chance)
    return [min(m, 1.0) for m in mass]


def worth_verifying(
    log_chances: Sequence[Sequence[float]], without: Outlook, step_s: Callable[[int], float]
) -> list[list[int]]:
    """The nodes to keep of each tree, given the log chances of all, the root's first -> ascending, the root among them.

    Over all requests the likeliest, as many as give the most tokens per second. Nodes follow their parents, which are
    never less likely.
    """
    ranked = sorted(
        (-chance, node, i) for i, tree in enumerate(log_chances) for node, chance in enumerate(tree) if node
    )
    tokens, best, best_speed = without.tokens, 0, without.speed
    for count, (minus_chance, _, _) in enumerate(ranked, 1):
        tokens += math.exp(-minus_chance)
        speed = tokens / step_s(without.num_rows + count)
        if speed > best_speed:
            best, best_speed = count, speed
    kept: list[list[int]] = [[0] for _ in log_chances]
    for _, node, index in ranked[:best]:
        kept[index].append(node)
    return [sorted(nodes) for nodes in kept]
