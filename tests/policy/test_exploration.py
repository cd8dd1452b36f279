"""Whatever estimates say, drafting loses at most about a hundredth of the time."""

from __future__ import annotations

import math

import pytest

from forerun.policy.exploration import FIRST, LEFT, MOST, SHARE, Exploration


def lose(account: Exploration, num_steps: int, spent: float = 2.0) -> tuple[float, int]:
    """Steps draft in vain whenever they may, else are plain -> their time in plain steps, steps with drafts."""
    total = drafted = 0.0
    for _ in range(num_steps):
        drafts = account.may_draft
        took = spent if drafts else 1.0
        account.book(took, 0.0, 1, drafts)
        total, drafted = total + took, drafted + drafts
    return total, int(drafted)


def rest(account: Exploration, num_steps: int) -> None:
    for _ in range(num_steps):
        account.book(1.0, 0.0, 1, False)


@pytest.mark.parametrize("spent", [1.2, 2.0, 3.0])
def test_losses_are_bounded(spent: float) -> None:
    total, drafted = lose(Exploration(), 2000, spent)
    assert total <= 2000 + FIRST + MOST / 4 + 1.1 * SHARE * total and drafted > 0


def test_gains_pay_for_losses_but_not_for_ever() -> None:
    account = Exploration()
    for _ in range(1000):
        account.book(1.0, 0.0, 2, True)
    assert account.balance == MOST
    _, drafted = lose(account, 100)
    assert MOST <= drafted <= MOST + 2


def test_many_requests_spend_it_in_fewer_steps() -> None:
    account = Exploration()
    account.book(32.0, 0.0, 16, True)
    assert not account.may_draft


def test_reading_is_paid_over_the_steps_that_follow() -> None:
    account = Exploration()
    account.book(1.0, 5.0, 1, False)
    assert account.balance > FIRST - 1.0
    for _ in range(300):
        account.book(1e-9, 0.0, 1, False)
    assert account.balance == pytest.approx(FIRST - 5.0, abs=0.1)


def test_a_trial_waits_until_the_balance_covers_it() -> None:
    account = Exploration()
    assert account.covers(FIRST) and not account.covers(FIRST + 1.0)
    rest(account, 200)
    assert account.covers(FIRST + 1.0)


def test_any_trial_is_covered_some_day() -> None:
    account = Exploration()
    rest(account, round(MOST / SHARE))
    assert account.covers(math.inf)


def test_a_debt_is_time() -> None:
    """Thirty requests lost half a step of theirs; one alone would have waited 1,500 tokens for that."""
    account = Exploration()
    account.meet(3000.0)  # 30 tokens in 10 ms
    account.book(30.0 + FIRST + 15.0, 0.0, 30, True)
    many = account.balance
    assert not account.may_draft
    account.meet(1600.0)
    assert account.balance == pytest.approx(many * 1600 / 3000)
    account.meet(3000.0)
    assert account.balance == pytest.approx(many)
    account.meet(1500.0)
    assert account.balance == -LEFT, "and few do not pay all that many lost"
    account.meet(250.0)  # one in 4 ms
    assert account.balance == pytest.approx(-LEFT / 6)
    saved = Exploration()
    saved.meet(3000.0)
    saved.meet(250.0)
    assert saved.balance == FIRST, "what is saved up are tokens"
