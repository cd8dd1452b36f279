"""Nodes are taken in the order of what they bring, as many as are worth their time."""

from __future__ import annotations

import math

import pytest

from forerun.policy.planner import (
    Outlook,
    expected_gains,
    found_by_depth,
    plan_call,
    worth_verifying,
)


def free(num_rows: int) -> float:
    return 1.0


def test_likely_nodes_are_taken_and_unlikely_ones_left() -> None:
    def step_s(num_rows: int) -> float:
        return 1.0 + 0.1 * (num_rows - 2)

    sizes, after = plan_call([[0.9, 0.8, 0.01], [0.05]], Outlook(2.0, 2, 1.0), step_s, lambda *_: 0.1, speed=2.0)
    assert sizes == [2, 0]
    assert after.tokens == pytest.approx(3.7) and after.seconds == pytest.approx(1.3)


def test_nothing_is_asked_where_nothing_is_gained() -> None:
    without = Outlook(1.0, 1, 1.0)
    assert plan_call([[0.3, 0.2]], without, free, lambda *_: 0.9, speed=1.0)[0] == [0]
    assert plan_call([[]], without, free, lambda *_: 0.0, speed=1.0)[1] == without


@pytest.mark.parametrize("gain", [0.0, 1e-20])
def test_rows_that_bring_nothing_are_not_asked_for_even_where_they_were_measured_as_cheaper(gain: float) -> None:
    without = Outlook(30.0, 2, 1.0)
    assert plan_call([[gain, gain]], without, lambda rows: 1.0 / rows, lambda *_: 0.0, 30.0) == ([0], without)
    assert plan_call([[0.5, gain]], without, lambda rows: 1.0 / rows, lambda *_: 0.0, 30.0)[0] == [1]


def test_a_call_is_paid_by_all_it_serves() -> None:
    """For one request it costs more than it brings, for four together it does not."""
    assert plan_call([[0.4]], Outlook(1.0, 1, 1.0), free, lambda *_: 0.5, speed=1.0)[0] == [0]
    assert plan_call([[0.4]] * 4, Outlook(4.0, 4, 1.0), free, lambda *_: 0.3, speed=4.0)[0] == [1, 1, 1, 1]


def test_a_step_in_costs_is_looked_past() -> None:
    def step_s(num_rows: int) -> float:
        return 1.0 if num_rows == 1 else 1.5

    assert plan_call([[0.4, 0.4, 0.4, 0.4]], Outlook(1.0, 1, 1.0), step_s, lambda *_: 0.0, speed=1.0)[0] == [4]


def test_gains_fall_with_the_chance_and_with_what_others_found() -> None:
    assert expected_gains([0.5, 0.8], [], 3) == pytest.approx([0.5, 0.4, 0.32])
    assert expected_gains([0.5, 0.8], [1.0, 0.5], 3) == pytest.approx([0.0, 0.2, 0.32])
    depths, chances = [0, 1, 1, 2], [0.0, math.log(0.5), math.log(0.4), math.log(0.25)]
    assert found_by_depth(depths, chances) == pytest.approx([0.9, 0.25])


def test_rows_of_all_requests_share_one_budget() -> None:
    trees = [[0.0, math.log(0.9), math.log(0.8)], [0.0, math.log(0.2), math.log(0.1)]]
    assert worth_verifying(trees, 2, lambda rows: 1.0 if rows <= 4 else 9.0, speed=2.0) == [[0, 1, 2], [0]]
    assert worth_verifying(trees, 2, free, speed=2.0) == [[0, 1, 2], [0, 1, 2]]
    assert worth_verifying(trees, 2, float, speed=2.0) == [[0], [0]]


def test_the_quicker_decoding_is_the_more_a_node_must_bring() -> None:
    def step_s(num_rows: int) -> float:
        return 1.0 + 0.3 * (num_rows - 1)

    for speed, num_worth in ((1.0, 3), (1.5, 2), (2.5, 1)):
        sizes, _ = plan_call([[0.8, 0.6, 0.4]], Outlook(1.0, 1, 1.0), step_s, lambda *_: 0.0, speed)
        assert sizes == [num_worth]
        tree = [0.0, math.log(0.8), math.log(0.6), math.log(0.4)]
        assert worth_verifying([tree], 1, step_s, speed) == [list(range(1 + num_worth))]
