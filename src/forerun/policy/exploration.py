"""How much may be lost to find out whether drafts pay.

Knows: what steps gave, and what plain ones would have given in their time. Does not know: drafters, requests,
estimates.

Estimates may be wrong all at once: a chance believed too high, a cost too low. The account sees only what steps took
and gave. It earns 1 % of the tokens and what drafting really gains, and pays what drafting loses. While it is in debt
nothing is drafted but what a user predicts, whose losses do not count then: other requests must not wait for them. What
is not expected to pay is tried when the balance covers its price: gains pay for trials.

It counts tokens, so that at any load it starts with as many observations: chance alone takes drafting that gains 0.15
tokens a step, more or less 1, below 0 from 4 tokens in 30 % of all cases, from 8 in 9 % (gambler's ruin). A debt is
time, though: 15 tokens are half a step of 30 requests, and when one of them is left it is not to wait 1,500 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forerun.policy.costs import MAX_JUMP

SHARE: Final = 0.01  # of the tokens that may be lost
# Tokens that may be lost at the beginning. `benchmarks/simulate.py --half choose --machine mini`, a new policy and one
# that has seen such work: 0.961 and 0.969 of the best fixed number; with 4 0.964 and 0.967, with 16 0.948 and 0.969.
FIRST: Final = 8.0
MOST: Final = 32.0  # and later at once, after any gain: with 64 the same
# After a step of 30 requests that took four times as long (`mini`) a single one had no drafts for 1,100 tokens.
LEFT: Final = 2.0
# Steps over which reading a prompt for drafts is paid, and most steps of a rest: 0.964 and 1.003 (mini, 1b-int4); half
# as many 0.965 and 1.000, twice as many 0.970 and 1.003.
SPREAD: Final = 32
# Steps that draft between two plain ones: at first, and, doubled each time, at most. Without plain steps one that is
# believed to take 28 ms where 0.7 are usual (the machine was busy) let drafts of mini lose for ever.
PLAIN_AFTER, PLAIN_EVERY = 4, 128
# The first time, and each eighth that PLAIN_EVERY steps have drafted, plain steps follow until one is as quick as in
# plain decoding, with which estimated speed-ups are told: six, or so many at most where prompts keep them slow.
WARM_EVERY, MOST_PLAIN = 8, 16


@dataclass(slots=True)
class Exploration:
    """An account in tokens, told of every step."""

    balance: float = FIRST
    _speed: float = 0.0  # tokens a second of plain decoding, at the load of the last step
    _owed: float = 0.0  # for reading
    _plain_every: int = PLAIN_AFTER
    _until_plain: int = PLAIN_AFTER  # steps that draft
    _num_plain: int = 0  # steps of the current run
    _num_runs: int = 0  # that need not have ended with a quick one

    @property
    def wants_plain(self) -> bool:
        """Whether it is time for plain steps: what gains are compared with is measured again."""
        return self._until_plain <= 0

    @property
    def may_draft(self) -> bool:
        """Whether nobody has to wait because drafts have lost too much."""
        return self.balance > 0.0

    def covers(self, price: float) -> bool:
        """Whether a trial of this price may begin: half of all that can be saved up covers any."""
        return self.balance >= min(price, MOST / 2)

    def meet(self, speed: float) -> None:
        """The next step's load, at which plain decoding gives so many tokens a second: a debt stays as many seconds.

        Where the load has fallen to a half or less, no more than LEFT remains: few do not pay for what many lost.
        """
        if self.balance < 0.0 and self._speed > 0.0:
            self.balance *= speed / self._speed
            if speed <= self._speed / 2:
                self.balance = max(self.balance, -LEFT)
        self._speed = speed

    def rest(self, num_tokens: int) -> None:
        """A plain step gave what plain ones give."""
        self.balance = min(self.balance + SHARE * num_tokens, MOST)

    def book(self, spent: float, reading: float, num_tokens: int, drafted: bool, is_warm: bool = True) -> None:
        """A step gave `num_tokens`; plain ones would have given `spent` in its time, `reading` in that of reading.

        is_warm: a plain step was as quick as in plain decoding.
        """
        if drafted:
            self._until_plain -= 1
        elif self.wants_plain:
            self._num_plain += 1
            if is_warm or self._num_runs % WARM_EVERY or self._num_plain >= MOST_PLAIN:
                self._plain_every = self._until_plain = min(2 * self._plain_every, PLAIN_EVERY)
                self._num_plain, self._num_runs = 0, self._num_runs + 1
        was_in_debt = not self.may_draft
        self._owed += 0.0 if was_in_debt else reading
        paid = self._owed / SPREAD
        self._owed -= paid
        self.balance += SHARE * spent - paid
        if drafted:
            gained = num_tokens - min(spent, MAX_JUMP * num_tokens)
            self.balance += max(gained, 0.0) if was_in_debt else gained  # in debt only predictions are tried
        self.balance = min(self.balance, MOST)
