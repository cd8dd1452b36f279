"""Why a policy drafts nothing, in words a user can act on.

Knows: chances, seconds and how to say it. Does not know: requests, policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_HALVINGS: Final = 20


def needed_rate(step_s: Mapping[int, float], speed: float) -> float | None:
    """The least chance of a draft to be right at which chains reach `speed` tokens a second; None if none does.

    `step_s` holds the seconds of a step with so many drafts. A chain of k drafts emits 1 + a + ... + a^k tokens
    (Leviathan et al., arXiv 2211.17192, eq. 1).
    """
    if not step_s or best_speed(1.0, step_s) < speed:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if best_speed(middle, step_s) >= speed else (middle, high)
    return high


def best_speed(rate: float, step_s: Mapping[int, float]) -> float:
    """Most tokens a second of one request with drafts that are right so often; `step_s` as above."""
    return max(_tokens(rate, num) / seconds for num, seconds in step_s.items())


def _tokens(rate: float, num_drafts: int) -> float:
    """Expected tokens of a step."""
    return float(num_drafts + 1) if rate >= 1.0 else (1.0 - rate ** (num_drafts + 1)) / (1.0 - rate)


def shortfall(who: str, rate: float, needed: float | None) -> str | None:
    """What is missing for drafts to be worth their cost; None if nothing is."""
    if needed is None:
        return f"{who} would cost more than they gain here, were they always right"
    if rate >= needed:
        return None
    return f"{who} are right {rate:.0%} of the time; it takes {needed:.0%}"
