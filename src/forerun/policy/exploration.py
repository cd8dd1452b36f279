"""How much time may be lost to find out whether drafts pay.

Knows: seconds and tokens of steps. Does not know: drafters, requests, estimates.

Estimates may be wrong all at once: a chance believed too high, a cost too low. The budget sees only what steps took and
gave. It earns 1 % of the time and what drafting really gains, and pays what drafting loses; nothing is drafted while it
is in debt. What is not expected to pay is tried when the balance covers its price: gains pay for trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forerun.policy.costs import MAX_JUMP

SHARE: Final = 0.01  # of the time that may be lost
# Figures: `benchmarks/simulate.py --half choose --seeds 1 --work spec --work short`, costs of mini and of 1b-int4.
FIRST: Final = 4.0  # plain steps that may be lost at the beginning: with 8 mini has 0.963 instead of 0.965
MOST: Final = 32.0  # and later at once, after any gain: with 16 mini has 0.961 instead of 0.964, with 64 the same
# Steps over which reading a prompt for drafts is paid, and most steps of a rest: 0.964 and 1.003 (mini, 1b-int4); half
# as many 0.965 and 1.000, twice as many 0.970 and 1.003.
SPREAD: Final = 32


@dataclass(slots=True)
class Exploration:
    """An account in seconds, told of every step."""

    balance_s: float | None = None  # None: no step was booked
    _owed_s: float = 0.0  # for reading

    @property
    def may_draft(self) -> bool:
        """Whether nobody has to wait because drafts have lost too much."""
        return self.balance_s is None or self.balance_s > 0.0

    def covers(self, price_s: float, plain_s: float) -> bool:
        """Whether a trial of this price may begin: half of all that can be saved up covers any."""
        return self.balance_s is not None and self.balance_s >= min(price_s, MOST * plain_s / 2)

    def book(self, step_s: float, reading_s: float, plain_s: float, num_tokens: float, drafted: bool) -> None:
        """A step took so long, reading for drafts apart, and gave so many tokens a request, a plain one one."""
        if self.balance_s is None:
            self.balance_s = FIRST * plain_s
        self._owed_s += reading_s
        paid_s = self._owed_s / SPREAD
        self._owed_s -= paid_s
        self.balance_s += SHARE * step_s - paid_s
        if drafted:
            worth_s = plain_s * num_tokens
            self.balance_s += worth_s - min(step_s, MAX_JUMP * worth_s)
        self.balance_s = min(self.balance_s, MOST * plain_s)
