"""Whatever estimates say, drafting loses at most about a hundredth of the time."""

from __future__ import annotations

import math

import pytest

from forerun.policy.exploration import FIRST, MOST, SHARE, Exploration


def lose(budget: Exploration, num_steps: int, step_s: float = 2.0) -> tuple[float, int]:
    """Steps that draft in vain whenever they may, and are plain else -> seconds, steps with drafts."""
    total = drafted = 0.0
    for _ in range(num_steps):
        drafts = budget.may_draft
        seconds = step_s if drafts else 1.0
        budget.book(seconds, 0.0, 1.0, 1.0, drafts)
        total, drafted = total + seconds, drafted + drafts
    return total, int(drafted)


@pytest.mark.parametrize("step_s", [1.2, 2.0, 3.0])
def test_losses_are_bounded(step_s: float) -> None:
    total, drafted = lose(Exploration(), 2000, step_s)
    assert total <= 2000 + FIRST + MOST / 4 + 1.1 * SHARE * total and drafted > 0


def test_gains_pay_for_losses_but_not_for_ever() -> None:
    budget = Exploration()
    for _ in range(1000):
        budget.book(1.0, 0.0, 1.0, 2.0, True)
    assert budget.balance_s == MOST
    _, drafted = lose(budget, 100)
    assert MOST <= drafted <= MOST + 2


def test_reading_is_paid_over_the_steps_that_follow() -> None:
    budget = Exploration()
    budget.book(1.0, 5.0, 1.0, 1.0, False)
    assert budget.balance_s > FIRST - 1.0
    for _ in range(300):
        budget.book(1e-9, 0.0, 1.0, 1.0, False)
    assert budget.balance_s == pytest.approx(FIRST - 5.0, abs=0.1)


def test_a_trial_waits_until_the_balance_covers_it() -> None:
    budget = Exploration()
    assert not budget.covers(0.1, 1.0)
    budget.book(1.0, 0.0, 1.0, 1.0, False)
    assert budget.covers(FIRST, 1.0) and not budget.covers(FIRST + 1.0, 1.0)
    for _ in range(200):
        budget.book(1.0, 0.0, 1.0, 1.0, False)
    assert budget.covers(FIRST + 1.0, 1.0)


def test_any_trial_is_covered_some_day() -> None:
    budget = Exploration()
    for _ in range(round(MOST / SHARE)):
        budget.book(1.0, 0.0, 1.0, 1.0, False)
    assert budget.covers(math.inf, 1.0)
