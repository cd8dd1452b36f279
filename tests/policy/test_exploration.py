"""Whatever estimates say, drafting loses at most about a hundredth of the time."""

from __future__ import annotations

import math

import pytest

from forerun.policy.exploration import AGAIN, FIRST, FIRST_S, LEFT, MOST, MOST_BEHIND, MOST_S, SHARE, Exploration


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


@pytest.mark.parametrize("in_debt", [False, True])
def test_steps_behind_drafts_are_charged_as_far_as_drafts_slow_them(in_debt: bool) -> None:
    account = Exploration(-1.0 if in_debt else FIRST)
    for spent, charged in ((1.5, 0.5), (9.0, MOST_BEHIND - 1.0)):
        before = account.balance
        account.book(spent, 0.0, 1, False, behind=True)
        assert account.balance == pytest.approx(before - charged + SHARE * spent)


def test_no_trial_begins_before_drafts_may(in_steps: int = 2000) -> None:
    account = Exploration()
    account.meet(1, 1 / in_steps)
    lose(account, round(FIRST_S * in_steps) + 9)
    while not account.may_draft:
        assert not account.covers(0.1)
        rest(account, 1)
    assert account.covers(0.1)


def test_any_trial_is_covered_some_day() -> None:
    account = Exploration()
    rest(account, round(MOST / SHARE))
    assert account.covers(math.inf)


def test_a_debt_is_time() -> None:
    """Thirty requests lost half a step of theirs; one alone would have waited 1,500 tokens for that."""
    account = Exploration()
    account.meet(30, 0.01)
    for _ in range(2):
        account.book(30.0 + account.balance / 2 + 10.0, 0.0, 30, True)
    account.book(30.0 + account.balance + 15.0, 0.0, 30, True)
    many = account.balance
    assert not account.may_draft
    account.meet(16, 0.01)
    assert account.balance == pytest.approx(many * 1600 / 3000)
    account.meet(30, 0.01)
    assert account.balance == pytest.approx(many)
    account.meet(15, 0.01)
    assert account.balance == -LEFT, "and few do not pay all that many lost"
    account.meet(1, 0.004)
    assert account.balance == pytest.approx(-LEFT / 6)
    saved = Exploration()
    saved.meet(4, 0.04)
    saved.meet(1, 0.04)
    assert saved.balance == FIRST, "what is saved up are tokens"


def test_quick_tokens_may_be_lost_for_a_while() -> None:
    """The first steps with drafts are slow, and so are those after a rest: few of them tell nothing."""
    account = Exploration()
    account.meet(1, 1 / 2000)
    assert account.balance == FIRST_S * 2000
    _, drafted = lose(account, round(FIRST_S * 2000) + 9)
    assert FIRST_S * 2000 <= drafted < FIRST_S * 2000 + 10 and not account.may_draft
    rests = 0
    while not account.may_draft:
        rest(account, 1)
        rests += 1
    again = AGAIN * (MOST_S * 2000 - MOST)
    assert account.balance == pytest.approx(again, abs=1.0) and lose(account, 50)[1] >= again - 1
    assert rests > 0.9 * again / SHARE, "a hundredth of the time at most"
    account.meet(1, 0.01)
    assert account.balance <= account.most == MOST
