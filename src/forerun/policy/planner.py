"""Which nodes are worth their time: arithmetic of expected tokens and seconds.

Knows: what nodes would bring and what rows and calls cost. Does not know: requests, drafters, where figures come from.

A step is planned for all its requests together: their rows share one pass, and one call drafts for all of them. Nodes
are taken in the order of what they bring (greedy choice is optimal for a given number of rows: TETRIS, arXiv
2502.15197). Of all numbers of nodes, none among them, the one is chosen that leaves the most tokens over what its
seconds are worth at the speed of decoding so far: over many steps that gives the most tokens per second (renewal
reward), which the best ratio of every single step does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice, repeat
from operator import mul
from typing import NamedTuple


class Outlook(NamedTuple):
    """What a step would be without more nodes."""

    tokens: float  # expected
    num_rows: int
    seconds: float


def plan_call(
    gains: Sequence[Sequence[float]],
    without: Outlook,
    step_s: Callable[[int], float],
    call_s: Callable[[int, int], float],
    speed: float,
) -> tuple[list[int], Outlook]:
    """How many nodes each request should get of one call, and what that makes of the step.

    `gains` [requests][nodes] are the tokens each next node of a request is expected to add. `step_s` gives the
    seconds of a step by its rows, `call_s` those of a call by drafts and requests; `speed` is in tokens a second.
    """
    tokens, best_tokens, best_s = without.tokens, without.tokens, without.seconds
    best, num_asked, most, num_best = best_tokens - speed * best_s, 0, 0, 0
    order, left = _best_first(gains), sum(map(sum, gains))
    for count, (_, place, index) in enumerate(order, 1):
        gain = gains[index][place]
        tokens, left = tokens + gain, left - gain
        num_asked, most = num_asked + (place == 0), max(most, place + 1)
        seconds = step_s(without.num_rows + count) + call_s(most, num_asked)
        value = tokens - speed * seconds
        if value > best and tokens > best_tokens:  # not for rows that bring nothing and were measured as cheaper
            best, best_tokens, best_s, num_best = value, tokens, seconds, count
        elif value + left < best:
            break  # nor would it pay if all that is left came for nothing
    sizes = [0] * len(gains)
    for _, _, index in order[:num_best]:
        sizes[index] += 1
    return sizes, Outlook(best_tokens, without.num_rows + num_best, best_s)


def _best_first(gains: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """(minus what it brings, place among its request's, request) of every node, none before one it follows."""
    least = [accumulate(of_request, min) for of_request in gains]
    return sorted([(-gain, place, index) for index, so_far in enumerate(least) for place, gain in enumerate(so_far)])


def expected_gains(rates: Sequence[float], found: Sequence[float], num_nodes: int) -> list[float]:
    """What each next node of a drafter is expected to add to the step's tokens.

    The likeliest nodes come first: a node's chance is `rates` [rank] times that of the one before it. A right one adds
    a token unless an earlier drafter's node holds it, of which `found` [depth] is the chance, as if all were chains.
    """
    chances = islice(accumulate(chain(rates, repeat(rates[-1])), mul), num_nodes)
    return [chance * (1.0 - held) for chance, held in zip(chances, chain(found, repeat(0.0)), strict=False)]


def found_by_depth(depths: Sequence[int], log_chances: Sequence[float]) -> list[float]:
    """Chance that a tree's nodes hold the right token, by depth; the first entries of both are the root's."""
    mass = [0.0] * max(depths)
    for depth, chance in zip(depths[1:], log_chances[1:], strict=True):
        mass[depth - 1] += math.exp(chance)
    return [min(m, 1.0) for m in mass]


def worth_verifying(
    log_chances: Sequence[Sequence[float]], num_rows: int, step_s: Callable[[int], float], speed: float
) -> list[list[int]]:
    """The nodes to keep of each tree, given the log chances of all, the root's first -> ascending, the root among them.

    Over all requests the likeliest, as many as are worth their rows beside `num_rows` others. Nodes follow their
    parents, which are never less likely.
    """
    ranked = sorted(
        [(-chance, node, i) for i, tree in enumerate(log_chances) for node, chance in enumerate(tree) if node]
    )
    tokens, num_best, best = 0.0, 0, -speed * step_s(num_rows)
    for count, (minus_chance, _, _) in enumerate(ranked, 1):
        tokens += math.exp(-minus_chance)
        value = tokens - speed * step_s(num_rows + count)
        if value > best:
            num_best, best = count, value
    kept: list[list[int]] = [[0] for _ in log_chances]
    for _, node, index in ranked[:num_best]:
        kept[index].append(node)
    return [sorted(nodes) for nodes in kept]
