"""The policy: nothing is always a choice, and what is chosen follows costs and acceptance."""

from __future__ import annotations

import pytest

from forerun.core import Request, SamplingParams
from forerun.engine.policy import AdaptivePolicy, FixedPolicy, StepCosts, VerifyCost, rows_to_measure

FLAT = VerifyCost({1: 1.0, 64: 1.02})
STEEP = VerifyCost({1: 1.0, 2: 2.0, 64: 64.0})


def request(**options) -> Request:  # type: ignore[no-untyped-def]
    return Request("r", (1,), SamplingParams(), seed=0, max_len=1000, **options)


def taught(policy: AdaptivePolicy, accepted: int, tested: int) -> AdaptivePolicy:
    for _ in range(40):
        policy.learn(request(), tested, tested, accepted)
    policy.learn_draft_cost(0.05, 1)
    return policy


def test_cheap_verification_and_good_drafts_are_used_fully() -> None:
    assert taught(AdaptivePolicy(6, StepCosts(FLAT)), 5, 5).node_budget(request()) == 6


def test_bad_drafts_are_not_used_but_tried_again() -> None:
    policy = taught(AdaptivePolicy(6, StepCosts(FLAT)), 0, 5)
    budgets = [policy.node_budget(request()) for _ in range(100)]
    assert budgets.count(1) >= 90
    assert any(budget > 1 for budget in budgets)


def test_costly_verification_switches_good_drafts_off() -> None:
    assert taught(AdaptivePolicy(6, StepCosts(STEEP)), 4, 5).node_budget(request()) == 1


def test_load_counts() -> None:
    """Rows that are free alone are not free among many requests."""
    cost = VerifyCost({1: 1.0, 16: 1.05, 32: 8.0})
    policy = taught(AdaptivePolicy(6, StepCosts(cost)), 4, 5)
    policy.begin_step(1)
    assert policy.node_budget(request()) > 3
    policy.begin_step(16)
    assert policy.node_budget(request()) == 1


def test_one_requests_drafts_do_not_decide_for_another() -> None:
    policy = taught(AdaptivePolicy(6, StepCosts(FLAT)), 5, 5)
    bad = Request("bad", (1,), SamplingParams(), seed=0, max_len=1000)
    for _ in range(40):
        policy.learn(bad, 5, 1, 0)
    assert policy.node_budget(bad) < policy.node_budget(request())
    policy.end(bad)
    policy.end(request())
    assert not policy._requests and not policy._plain_steps and not policy._read


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    """A drafter that must read 900 tokens first, at a tenth of a step each, cannot earn that back in 20 tokens."""
    policy = taught(AdaptivePolicy(6, StepCosts(FLAT)), 5, 5)
    policy.learn_catch_up(90.0, 900)
    short = Request("s", (1,) * 900, SamplingParams(), seed=0, max_len=920)
    long = Request("l", (1,) * 900, SamplingParams(), seed=0, max_len=2900)
    assert policy.node_budget(long) == 6
    assert all(policy.node_budget(short) == 1 for _ in range(60))
    policy.learn(long, 5, 5, 5)  # it has drafted, so it has read the prompt
    assert policy._catch_up(long) == 0.0


def test_answers_that_turn_out_short_count() -> None:
    policy = taught(AdaptivePolicy(6, StepCosts(FLAT)), 5, 5)
    policy.learn_catch_up(90.0, 900)
    for _ in range(40):
        policy.end(Request("e", (1,), SamplingParams(), seed=0))
    prompt = Request("p", (1,) * 900, SamplingParams(), seed=0, max_len=2900)
    assert policy.node_budget(prompt) == 1


def test_a_gain_within_the_uncertainty_is_not_worth_it() -> None:
    # acceptance 0.5 gains 1.5 tokens for 1.44 + 0.05
    policy = AdaptivePolicy(2, StepCosts(VerifyCost({1: 1.0, 2: 1.44})))
    for _ in range(40):
        policy.learn(request(), 2, 2, 1)
    policy.learn_draft_cost(0.05, 1)
    assert policy.node_budget(request()) == 1


@pytest.mark.parametrize("policy", [AdaptivePolicy(6, StepCosts(FLAT)), FixedPolicy(6)])
def test_a_request_may_refuse(policy) -> None:  # type: ignore[no-untyped-def]
    assert policy.node_budget(request(speculate=False)) == 1


def test_one_slow_step_does_not_move_the_cost_far() -> None:
    policy = AdaptivePolicy(6, StepCosts(FLAT))
    for _ in range(20):
        policy.learn_draft_cost(0.01, 1)
    policy.learn_draft_cost(50.0, 1)
    assert policy._draft_cost() < 0.02


def test_reading_a_prompt_first_does_not_switch_drafting_off() -> None:
    """The first draft of a request costs a whole prefill of the draft model."""
    policy = AdaptivePolicy(6, StepCosts(FLAT))
    policy.learn_draft_cost(30.0, 3)
    for _ in range(3):
        policy.learn_draft_cost(0.09, 3)
    assert policy.node_budget(request()) > 2


def test_overhead_makes_drafting_worth_more() -> None:
    """A step's fixed cost is paid once for all the tokens it emits."""
    cost = VerifyCost({1: 1.0, 2: 1.3, 64: 20.0})
    lean, heavy = taught(AdaptivePolicy(6, StepCosts(cost)), 3, 5), taught(AdaptivePolicy(6, StepCosts(cost)), 3, 5)
    for _ in range(60):
        heavy.learn_step_cost(1, 1.0, 0.9)
        heavy.learn_step_cost(500, 999.0, 9.0)  # a prefill chunk says nothing about decoding
    assert heavy.node_budget(request()) > lean.node_budget(request())


def test_what_drafts_add_to_a_step_counts_against_them() -> None:
    policy = AdaptivePolicy(3, StepCosts(FLAT))
    for _ in range(2):
        policy.learn_step_cost(1, 1.0, 0.1)
    for _ in range(60):
        policy.learn(request(), 2, 1, 0)
        policy.learn(request(), 2, 2, 1)  # a quarter to a third of the drafts are right
        policy.learn_step_cost(1, 1.0, 0.1)
        policy.learn_draft_cost(0.01, 2)
    assert policy.node_budget(request()) > 1
    for _ in range(60):
        policy.learn_step_cost(3, 1.0, 0.9)
    assert policy.node_budget(request()) == 1
    assert policy.costs.overhead_s == pytest.approx(0.1, rel=0.01)


def test_verify_cost_interpolates() -> None:
    cost = VerifyCost({1: 1.0, 3: 2.0, 5: 6.0})
    assert [cost(n) for n in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]


def test_a_disturbed_measurement_is_mended() -> None:
    cost = VerifyCost({1: 1.0, 2: 9.0, 4: 1.5})
    assert [cost(n) for n in (1, 2, 4)] == [1.0, 1.5, 1.5]


def test_rows_to_measure() -> None:
    assert rows_to_measure(6, 512)[-1] == 8
    assert rows_to_measure(6, 2) == [1, 2]


def test_a_plain_step_is_judged_by_plain_steps() -> None:
    """Passes with drafts may be slower than measured by more than plain ones are."""
    costs = StepCosts(VerifyCost({1: 1.0, 4: 1.2}))
    for _ in range(20):
        costs.learn(4, True, 2.4, 0.3)
    assert costs.step_s(1, False) == pytest.approx(2.3, rel=0.05), "nothing else is known"
    costs.learn(1, False, 1.1, 0.1)
    assert costs.pass_s(1) == pytest.approx(1.1)
    assert costs.pass_s(4, drafts=True) == pytest.approx(2.4)
