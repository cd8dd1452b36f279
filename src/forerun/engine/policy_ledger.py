"""What drafting has really gained over plain decoding, and whether more may be risked.

Knows: seconds and tokens of steps. Does not know: drafters, requests, estimates. A policy decides by estimates, which
may be wrong all at once: a chance believed too high, a cost too low. The ledger sees only what steps took and gave, so
that whatever the estimates say, drafting loses at most a small share of the time: losses are paid from earlier gains
and from an allowance, and where both are spent nothing is drafted until the allowance has grown again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SHARE: Final = 0.0075  # of the time that may be lost for finding out whether drafts pay
_PLAIN = 3  # steps without drafts that must have shown what plain decoding takes before anything is compared with it
_PATIENCE = 8  # steps after which that is not waited for any longer: where all read prompts, none says what it takes
_UNCOUNTED = 3  # first steps with drafts: what runs for the first time is slow
_EVERY = 128  # steps with drafts after which one is due again
FIRST: Final = 8.0  # plain steps that may be lost at the beginning
_MOST = 32.0  # and at once, after any gain
_SPREAD = 32  # steps over which reading a prompt for drafts is paid: it serves all that follow
_LONGEST = 4.0  # times the plain steps of the same tokens that a single step may count: others work on the machine too


@dataclass(slots=True)
class Ledger:
    """An account in seconds, told of every step."""

    balance_s: float = 0.0
    _draft_s: float = 0.0  # of this step
    _reading_s: float = 0.0  # of prompts, for drafts alone, not yet paid
    _num_tokens: int = 0  # of this step
    _num_requests: int = 0
    _num_begun: int = 0  # steps so far, booked or not
    _num_plain: int = 0  # steps without drafts so far
    _num_first: int = 0  # and with, up to those that count
    _num_drafted: int = 0  # and with, since the last one without

    @property
    def is_open(self) -> bool:
        """Whether drafting may go on; it begins when plain steps have shown what they take."""
        is_known = self._num_plain >= _PLAIN or self._num_begun > _PATIENCE
        return is_known and not self.is_spent and self._num_drafted < _EVERY

    @property
    def is_spent(self) -> bool:
        """Whether drafting has to wait because it lost too much."""
        return self._num_plain + self._num_drafted > 0 and self.balance_s <= 0.0

    def steps_shut(self, plain_s: float) -> int:
        """Plain steps that pass before it can be open again."""
        if self.is_spent:
            return 1 + math.floor(-self.balance_s / (SHARE * plain_s))
        return 0 if self.is_open else 1

    @property
    def is_waiting(self) -> bool:
        """Somebody drafted in a step that gave tokens and was not booked."""
        return self._draft_s > 0.0 and self._num_requests > 0

    def begin_step(self) -> None:
        """Forget what was noted of a step that was not booked."""
        self._num_begun += 1
        self._forget()

    def _forget(self) -> None:
        self._draft_s, self._num_tokens, self._num_requests = 0.0, 0, 0

    def note_drafting(self, seconds: float) -> None:
        """Somebody drafted for so long in this step."""
        self._draft_s += seconds

    def note_reading(self, seconds: float) -> None:
        """Somebody read for so long what he had missed, to draft now and in the steps to come."""
        self._reading_s += seconds

    def note_tokens(self, num_tokens: int) -> None:
        """One of the step's requests got so many tokens."""
        self._num_tokens += num_tokens
        self._num_requests += 1

    def book(self, rest_s: float, plain_s: float, drafts: bool, num_steps: int = 1) -> None:
        """The step is over, drafting apart it took `rest_s`; without drafts it would have taken `plain_s`.

        `drafts`: some were verified. Several plain steps may be booked as one.
        """
        if self._num_plain + self._num_drafted == 0:
            self.balance_s = FIRST * plain_s
        elapsed_s = rest_s + self._draft_s
        paid_s = self._reading_s / _SPREAD
        self._reading_s -= paid_s
        self.balance_s += SHARE * elapsed_s - paid_s
        if drafts or self._draft_s > 0.0:
            self._num_drafted += 1
            if self._num_first < _UNCOUNTED:
                self._num_first += 1
                self._forget()
                return
            worth_s = plain_s * self._num_tokens / max(self._num_requests, 1)
            self.balance_s += worth_s - min(elapsed_s, _LONGEST * worth_s)
        else:
            self._num_plain += num_steps
            self._num_drafted = 0 if self._num_plain >= _PLAIN else self._num_drafted
        self.balance_s = min(self.balance_s, _MOST * plain_s)
        self._forget()
