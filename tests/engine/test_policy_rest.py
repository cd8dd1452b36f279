"""What is not worth it is left alone, ever longer, and tried again when that can be paid."""

from __future__ import annotations

import pytest

from forerun.engine.policy import StepCosts, VerifyCost
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.engine.policy_ledger import SHARE
from forerun.engine.policy_rest import LONGEST_REST, Pause, Rests, Trials
from tests.support.hopeful import show_plain_steps


def test_a_pause_is_as_long_as_was_said_unless_the_load_changes() -> None:
    pause = Pause()
    pause.stay(3)
    steps = []
    for _ in range(4):
        steps.append(pause.goes_on)
        pause.begin_step(is_new_load=False)
    assert steps == [True, True, True, False]
    pause.stay(1000)
    for _ in range(LONGEST_REST):
        assert pause.goes_on
        pause.begin_step(is_new_load=False)
    assert not pause.goes_on
    pause.stay(5)
    pause.begin_step(is_new_load=True)
    assert not pause.goes_on


def test_what_was_slept_through_is_told_once() -> None:
    pause = Pause()
    pause.stay(2)
    pause.sleep_through(1.0, 0.25)
    pause.sleep_through(2.0, 0.25)
    assert pause.wake() == (2, 3.0, 0.5)
    assert pause.wake() == (0, 0.0, 0.0)


def test_steps_slept_through_are_learned_and_booked() -> None:
    policy = AdaptivePolicy(8, StepCosts(VerifyCost({1: 1.0, 8: 1.1})), may_prune=True)
    show_plain_steps(policy, 1.0)
    policy.begin_step(1)
    policy.ledger.balance_s = -10.0 * SHARE
    before, slept = policy.ledger.balance_s, 0
    policy.begin_step(1)
    while policy._pause.goes_on:
        policy.learn_step_cost(1, 1.5, 0.1)
        slept += 1
        policy.begin_step(1)
    assert slept >= 10
    assert policy.ledger.balance_s == pytest.approx(before + slept * 1.6 * SHARE)
    assert 1.0 < policy.costs.pass_s(1) < 1.5, "as one measurement"


def test_rests_of_all_members_must_go_on() -> None:
    rests = Rests()
    assert not rests.all_go_on("r", ["a", "b"], 1)
    for member in ("a", "b"):
        rest = rests.of("r", member, found=0.5)
        assert rest.found == 0.5 and not rest.goes_on() and rests.of("r", member, found=1.0) is rest
    assert rests.all_go_on("r", ["a", "b"], 1)
    rests.of("r", "b", found=1.0).end()
    assert not rests.all_go_on("r", ["a", "b"], 1)
    rests.forget("r", ["a", "b"])
    assert rests.of("r", "a", found=1.0).found == 1.0


def test_the_less_there_is_to_pay_with_the_longer_trials_wait() -> None:
    waits = []
    for balance_s in (32.0, 8.0, 2.0):
        trials = Trials()
        assert trials.may_begin("m", 0, 1.0, balance_s) and trials.began("m", 0)
        waits.append(next(step for step in range(1, 999) if trials.may_begin("m", step, 1.0, balance_s)))
    assert waits == [2, 8, 32]
    assert not Trials().may_begin("m", 0, 1.0, 0.5), "it must cost no more than there is"
