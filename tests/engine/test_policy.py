"""Fixed policies, and what steps cost: as measured at start, corrected by what the engine sees."""

from __future__ import annotations

import pytest

from forerun.core import Request, SamplingParams
from forerun.engine.policy import FixedPolicy, StepCosts, VerifyCost, rows_to_measure


def request(**options) -> Request:  # type: ignore[no-untyped-def]
    return Request("r", (1,), SamplingParams(), seed=0, max_len=1000, **options)


def test_a_request_may_refuse() -> None:
    assert FixedPolicy(6).node_budget(request(speculate=False)) == 1
    assert FixedPolicy(6).node_budget(request()) == 6


def test_a_request_may_bound_its_trees() -> None:
    assert [FixedPolicy(6).node_budget(request(max_nodes=most)) for most in (1, 4, 60)] == [1, 4, 6]
    assert FixedPolicy(6).node_budget(request(max_nodes=4, speculate=False)) == 1


def test_verify_cost_interpolates() -> None:
    cost = VerifyCost({1: 1.0, 3: 2.0, 5: 6.0})
    assert [cost(n) for n in (1, 2, 3, 4, 5, 7)] == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]


def test_a_disturbed_measurement_is_mended() -> None:
    cost = VerifyCost({1: 1.0, 2: 9.0, 4: 1.5})
    assert [cost(n) for n in (1, 2, 4)] == [1.0, 1.5, 1.5]


def test_rows_to_measure() -> None:
    assert rows_to_measure(6, 512)[-1] == 8
    assert rows_to_measure(6, 2) == [1, 2]


def test_passes_are_corrected_by_those_of_as_many_rows() -> None:
    costs = StepCosts(VerifyCost({1: 1.0, 4: 1.2, 32: 4.0}))
    assert costs.pass_s(4) == 1.2, "as measured, before anything was seen"
    for _ in range(20):
        costs.learn(4, True, 2.4, 0.3)
    assert costs.step_s(1, False) == pytest.approx(2.3, rel=0.05), "the neighbour's word, where nothing else is known"
    costs.learn(1, False, 1.1, 0.1)
    assert costs.pass_s(1) == pytest.approx(1.1)
    assert costs.pass_s(4) == pytest.approx(2.4) and costs.pass_s(5) == pytest.approx(2.6)
    costs.learn(500, True, 999.0, 9.0)  # more rows than were ever measured say nothing
    assert costs.pass_s(32) == pytest.approx(8.0)


def test_what_drafts_add_to_a_step_is_not_a_plain_steps() -> None:
    costs = StepCosts(VerifyCost({1: 1.0, 64: 1.02}))
    for _ in range(60):
        costs.learn(1, False, 1.0, 0.1)
        costs.learn(3, True, 1.0, 0.9)
    assert costs.overhead_s == pytest.approx(0.1, rel=0.01) and costs.extra_s == pytest.approx(0.8, rel=0.01)
    assert costs.step_s(3, True) - costs.step_s(3, False) == pytest.approx(costs.extra_s)


def test_one_slow_pass_does_not_move_a_cost_far() -> None:
    costs = StepCosts(VerifyCost({1: 1.0, 64: 2.0}))
    for _ in range(20):
        costs.learn(1, False, 1.0, 0.0)
    costs.learn(1, False, 50.0, 0.0)
    assert costs.pass_s(1) < 1.5
