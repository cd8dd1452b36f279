"""The ledger: whatever a policy believes, drafting loses at most a small share of the time."""

from __future__ import annotations

import pytest

from forerun.core import Request, SamplingParams
from forerun.engine.policy import StepCosts, VerifyCost
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.engine.policy_ledger import FIRST, SHARE, Ledger
from tests.support.drafted import Prices
from tests.support.drafted import step as step_of

PLAIN_S = 1.0


def step(ledger: Ledger, rest_s: float, draft_s: float, num_tokens: list[int]) -> float:
    """One step of requests that got so many tokens -> what it took."""
    ledger.begin_step()
    if draft_s:
        ledger.note_drafting(draft_s)
    for num in num_tokens:
        ledger.note_tokens(num)
    ledger.book(rest_s, PLAIN_S, max(num_tokens) > 1)
    return rest_s + draft_s


def opened() -> Ledger:
    """One that has seen plain steps."""
    ledger = Ledger()
    for _ in range(3):
        step(ledger, PLAIN_S, 0.0, [1])
    for _ in range(3):  # the first with drafts do not count
        step(ledger, 9.0, 9.0, [1])
    assert ledger.balance_s == pytest.approx(FIRST + (3 + 3 * 18) * SHARE)
    return ledger


@pytest.mark.parametrize("draft_s", [0.05, 0.3, 3.0])
def test_drafts_that_never_gain_cost_a_small_share(draft_s: float) -> None:
    ledger, taken, num = opened(), 0.0, 5000
    for _ in range(num):
        taken += step(ledger, 1.0 + 0.2 * ledger.is_open, draft_s * ledger.is_open, [1])
    assert taken <= num * PLAIN_S * (1 + 2 * SHARE) + 12, "the share, and what may be lost at first"
    assert taken > num * PLAIN_S * (1 + SHARE / 2), "they are tried again"


def test_drafts_that_gain_go_on() -> None:
    ledger = opened()
    for index in range(2000):  # three steps of five give two tokens for 1.2 plain steps
        drafts = ledger.is_open
        step(ledger, 1.1 if drafts else 1.0, 0.1 * drafts, [2 if index % 5 < 3 and drafts else 1])
        assert not ledger.is_spent


def test_gains_long_ago_do_not_pay_for_losses_for_ever() -> None:
    ledger = opened()
    for _ in range(1_000):
        step(ledger, 1.0, 0.1, [3])
    step(ledger, 1.0, 0.0, [1])
    num_open = 0
    while ledger.is_open:
        step(ledger, 1.5, 0.5, [1])
        num_open += 1
    assert num_open < 40


def test_a_tokens_worth_is_that_of_a_step_for_all_requests() -> None:
    ledger = opened()
    before = ledger.balance_s
    step(ledger, 1.2, 0.0, [2, 1, 1, 1])  # a token of four: a quarter of a plain step
    assert ledger.balance_s - before == pytest.approx(0.05 + SHARE * 1.2)


def test_one_step_beside_other_work_does_not_close_it_for_long() -> None:
    ledger = opened()
    step(ledger, 1000.0, 0.1, [2])
    assert ledger.is_open


def test_a_step_that_was_not_booked_is_forgotten() -> None:
    """One that read a prompt says nothing of drafting."""
    ledger = opened()
    before = ledger.balance_s
    ledger.begin_step()
    ledger.note_drafting(500.0)
    step(ledger, 1.0, 0.0, [1])
    assert ledger.balance_s - before == pytest.approx(SHARE)


def test_a_policy_with_wrong_estimates_is_stopped() -> None:
    """Its drafts are right, but a step with drafts takes far longer than it was ever told."""
    policy = AdaptivePolicy(6, StepCosts(VerifyCost({1: 1.0, 64: 1.02})), may_prune=True)
    request, drafted = Request("r", (1,), SamplingParams(), seed=0, max_len=9000), []
    for _ in range(400):
        done = step_of(policy, [request], {"r": 2}, Prices())
        if done.drafted:
            policy.ledger.balance_s -= 4.0  # spent where no estimate looks
        drafted.append(bool(done.drafted))
    assert drafted[3] and sum(drafted) < 30
    assert "cost more than they gained" in str(policy.explain(request))


def test_reading_for_drafts_is_paid_step_by_step() -> None:
    ledger = opened()
    before = ledger.balance_s
    ledger.note_reading(3.2)
    step(ledger, 1.0, 0.0, [1])
    first = before - ledger.balance_s
    assert 0.05 < first < 0.2
    for _ in range(400):
        step(ledger, 1.0, 0.0, [1])
    assert before - ledger.balance_s == pytest.approx(3.2 - 401 * SHARE, abs=0.01)


def test_drafting_beside_the_reading_of_prompts_is_booked() -> None:
    """Steps that read prompts say nothing of passes, but drafts in them cost what they cost."""
    policy = AdaptivePolicy(6, StepCosts(VerifyCost({1: 1.0, 64: 1.02})), may_prune=True)
    request = Request("r", (1,), SamplingParams(), seed=0, max_len=9000)
    for _ in range(10):
        step_of(policy, [request], {"r": 5}, Prices())
    before = policy.ledger.balance_s
    policy.begin_step(1)
    policy.ledger.note_drafting(0.5)
    policy.learn(request, 2, 1, 0)
    assert policy.ledger.balance_s == before
    policy.begin_step(1)
    assert policy.ledger.balance_s == pytest.approx(before - 0.5, abs=0.1)


def test_where_every_step_reads_prompts_plain_steps_are_not_waited_for() -> None:
    ledger, opens = Ledger(), []
    for _ in range(12):
        ledger.begin_step()
        opens.append(ledger.is_open)
    assert opens == [False] * 8 + [True] * 4


def test_plain_steps_are_due_before_much_is_judged_by_them() -> None:
    ledger, opens = Ledger(), []
    for _ in range(300):
        opens.append(ledger.is_open)
        step(ledger, 1.0, 0.1 * ledger.is_open, [2 if ledger.is_open else 1])
    assert opens[:40] == [False] * 3 + [True] * 37 and not ledger.is_spent
    assert opens[40:].count(False) == 2, "now and then again: machines and contexts change"
