"""How many nodes a member is asked for, request by request, so that a step gives the most tokens per second.

Knows: what nodes would bring and what rows and calls cost. Does not know: requests, drafters, where figures come from.

The step is planned as a whole: rows of all requests share one pass, and one call drafts for all of them. Nodes are
taken in the order of what they bring (greedy choice is optimal for a given number of rows: TETRIS, arXiv 2502.15197),
and of all numbers of nodes the best is chosen, none among them (SmartSpec's goodput, arXiv 2406.14066).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forerun.engine.calibration import MOST_LIKELY

_PAST_BEST = 5  # more nodes a request than so many past the best number are not looked at
_HOPELESS = 0.02  # chance of a right path below which deeper ones are not looked at
_NEARLY = 0.975  # of the best speed that fewer nodes may promise to be preferred


class Outlook(NamedTuple):
    """What a step would be if the member were not asked."""

    tokens: float  # expected
    num_rows: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Prices(NamedTuple):
    """Seconds of a step, drafting apart, by its rows, and of a call by drafts and requests."""

    step_s: Callable[[int], float]
    call_s: Callable[[int, int], float]


class Plan(NamedTuple):
    """How many nodes each request is to get of a call."""

    sizes: tuple[int, ...]
    speed: float  # of the step
    call_s: float  # of it, for the call
    rows_s: float  # of it, for verifying the nodes

    @property
    def num_asked(self) -> int:
        """Requests that get any."""
        return sum(size > 0 for size in self.sizes)


def found_by_depth(depths: Sequence[int], log_chances: Sequence[float]) -> list[float]:
    """Chance that the nodes of a tree hold the right token, by depth; the first of both lists is the root's."""
    mass = [0.0] * max(depths)
    for depth, chance in zip(depths[1:], log_chances[1:], strict=True):
        mass[depth - 1] += math.exp(chance)
    return [min(m, 1.0) for m in mass]


def plan_call(gains: Sequence[Sequence[float]], without: Outlook, prices: Prices) -> Plan:
    """The best sizes; `gains` [requests][nodes] are the tokens each next node of a request is expected to add."""
    order = _best_first(gains)
    speeds, calls_s, best = [without.speed], [0.0], 0
    tokens, asked, size = without.tokens, 0, 0
    for count, (_, depth, index) in enumerate(order, 1):
        tokens += gains[index][depth]
        asked, size = asked + (depth == 0), max(size, depth + 1)
        calls_s.append(prices.call_s(size, asked))
        speeds.append(tokens / (prices.step_s(without.num_rows + count) + calls_s[count]))
        if speeds[count] > speeds[best]:
            best = count
        elif count > best + _PAST_BEST * len(gains):
            break
    num = _fewest(speeds, best)
    sizes = [0] * len(gains)
    for _, _, index in order[:num]:
        sizes[index] += 1
    rows_s = prices.step_s(without.num_rows + num) - without.seconds if num else 0.0
    return Plan(tuple(sizes), speeds[num], calls_s[num], rows_s)


def expected_gains(rates: Sequence[float], found: Sequence[float], num_nodes: int) -> list[float]:
    """What each next node of a member is expected to add to the step's tokens.

    The likeliest nodes come first: a node's chance is `rates` [rank] times that of the one before it. One that is right
    adds a token unless an earlier member's node holds it already, of which `found` [depth] is the chance, as if the
    nodes were a chain.
    """
    gains, chance = list[float](), 1.0
    for place in range(num_nodes):
        chance *= rates[min(place, len(rates) - 1)]
        if chance < _HOPELESS:
            break
        gains.append(chance * (1.0 - found[place]) if place < len(found) else chance)
    return gains


def best_gain(n: int, plain_s: float, sizes: Sequence[int], prices: Prices) -> float:
    """Speed over plain decoding of n requests, were drafts for one or for all right as often as is ever believed."""
    p = MOST_LIKELY
    speeds = (
        (n + of * p * (1 - p**size) / (1 - p)) / (prices.step_s(n + of * size) + prices.call_s(size, of))
        for size in sizes
        for of in {1, n}
    )
    return max(speeds) * plain_s / n


def worth_verifying(
    chances: Sequence[Sequence[float]], without: Outlook, step_s: Callable[[int], float]
) -> list[list[int]]:
    """The nodes to keep of each tree, the root among them, given the chances of all others.

    Over all requests the likeliest, as many as give the most tokens per second. Nodes follow their parents, which are
    never less likely.
    """
    ranked = sorted((-chance, node, index) for index, tree in enumerate(chances) for node, chance in enumerate(tree, 1))
    tokens, best, best_speed = without.tokens, 0, without.speed
    for count, (minus_chance, _, _) in enumerate(ranked, 1):
        tokens -= minus_chance
        speed = tokens / step_s(without.num_rows + count)
        if speed > best_speed:
            best, best_speed = count, speed
    kept: list[list[int]] = [[0] for _ in chances]
    for _, node, index in ranked[:best]:
        kept[index].append(node)
    return [sorted(nodes) for nodes in kept]


def _fewest(speeds: Sequence[float], best: int) -> int:
    """The fewest nodes that are nearly as good as the best number: what is hoped of many is the least certain."""
    enough = max(_NEARLY * speeds[best], speeds[0])
    return next((num for num in range(1, best) if speeds[num] >= enough), best)


def _best_first(gains: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(minus what it brings, place among its request's, request) of every node, none before one it follows."""
    order = []
    for index, of_request in enumerate(gains):
        least = float("inf")
        for depth, gain in enumerate(of_request):
            least = min(least, gain)
            order.append((-least, depth, index))
    return sorted(order) if len(gains) > 1 else order


def profits_s(plan: Plan, gains: Sequence[Sequence[float]], without: Outlook) -> list[float]:
    """Seconds a step each request's nodes save beside what they cost.

    A token is worth what it takes without the member; the call is shared by what its nodes bring, rows by their number.
    """
    brought = [sum(of_request[:size]) for of_request, size in zip(gains, plan.sizes, strict=True)]
    call_s, row_s = plan.call_s / max(sum(brought), 1e-9), plan.rows_s / max(sum(plan.sizes), 1)
    saved = zip(brought, plan.sizes, strict=True)
    return [tokens * (1.0 / without.speed - call_s) - size * row_s for tokens, size in saved]
