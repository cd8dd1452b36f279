"""A step is planned for all requests together: nodes by what they bring, as many as tokens per second are the most."""

from __future__ import annotations

from itertools import product

import pytest

from forerun.engine.policy_plan import Outlook, Prices, best_gain, expected_gains, plan_call, profits_s, worth_verifying


def prices(row: float, call: float, level: float = 0.0) -> Prices:
    return Prices(lambda rows: 1.0 + row * rows, lambda size, of: call + level * size)


def speed(gains: list[list[float]], sizes: tuple[int, ...], without: Outlook, cost: Prices) -> float:
    if not any(sizes):
        return without.speed
    tokens = without.tokens + sum(sum(g[:n]) for g, n in zip(gains, sizes, strict=True))
    return tokens / (cost.step_s(without.num_rows + sum(sizes)) + cost.call_s(max(sizes), sum(n > 0 for n in sizes)))


@pytest.mark.parametrize("row,call,level", [(0.0, 0.1, 0.0), (0.05, 0.1, 0.02), (0.2, 0.05, 0.05), (0.02, 0.6, 0.1)])
def test_no_other_sizes_are_much_better(row: float, call: float, level: float) -> None:
    gains = [[0.9**n for n in range(1, 6)], [0.6**n for n in range(1, 6)], [0.2, 0.04]]
    cost, without = prices(row, call, level), Outlook(3.0, 3, 1.0 + 3 * row)
    plan = plan_call(gains, without, cost)
    best = max(speed(gains, sizes, without, cost) for sizes in product(range(6), range(6), range(3)))
    assert plan.speed == pytest.approx(speed(gains, plan.sizes, without, cost))
    assert plan.speed >= 0.97 * best
    assert sum(plan.sizes) == 0 or plan.speed > without.speed


def test_the_likeliest_nodes_of_all_requests_come_first() -> None:
    cost = Prices(lambda rows: 1.0 if rows <= 6 else 9.0, lambda size, of: 0.1)  # room for three nodes
    plan = plan_call([[0.9, 0.8, 0.7], [0.3, 0.1], [0.85]], Outlook(3.0, 3, 1.0), cost)
    assert plan.sizes == (2, 0, 1)


def test_nothing_is_a_plan() -> None:
    without = Outlook(2.0, 2, 1.0)
    plan = plan_call([[0.9], [0.9]], without, prices(0.0, 5.0))
    assert plan.sizes == (0, 0) and plan.speed == without.speed and plan.call_s == plan.rows_s == 0.0
    assert plan_call([[], []], without, prices(0.0, 0.0)).sizes == (0, 0)


def test_of_sizes_that_are_nearly_as_good_the_smallest() -> None:
    flat = plan_call([[0.9, 0.005, 0.004]], Outlook(1.0, 1, 1.0), prices(0.0, 0.1))
    assert flat.sizes == (1,)
    assert plan_call([[0.9, 0.5, 0.004]], Outlook(1.0, 1, 1.0), prices(0.0, 0.1)).sizes == (2,)


def test_profits_share_what_the_step_saves() -> None:
    gains, without, cost = [[0.9, 0.8], [0.7]], Outlook(2.0, 2, 1.1), prices(0.05, 0.2)
    plan = plan_call(gains, without, cost)
    saved = 2.4 / without.speed - (cost.step_s(5) - without.seconds) - 0.2
    assert plan.sizes == (2, 1)
    assert sum(profits_s(plan, gains, without)) == pytest.approx(saved)
    assert all(profit > 0.0 for profit in profits_s(plan, gains, without))


def test_the_likeliest_nodes_are_verified_as_long_as_they_pay() -> None:
    chances = [[0.9, 0.8, 0.1], [0.5, 0.05], []]
    cheap = worth_verifying(chances, Outlook(3.0, 3, 1.0), lambda rows: 1.0 + 1e-6 * rows)
    assert cheap == [[0, 1, 2, 3], [0, 1, 2], [0]]
    dear = worth_verifying(chances, Outlook(3.0, 3, 1.0), lambda rows: 1.0 + 0.2 * (rows - 3))
    assert dear == [[0, 1, 2], [0], [0]]
    assert worth_verifying(chances, Outlook(3.0, 3, 1.0), lambda rows: 2.0) == [[0], [0], [0]]


def test_what_earlier_members_found_is_not_gained_again() -> None:
    assert expected_gains([0.5, 0.8], [], 3) == pytest.approx([0.5, 0.4, 0.32])
    assert expected_gains([0.5, 0.8], [1.0, 0.5], 3) == pytest.approx([0.0, 0.2, 0.32])
    assert len(expected_gains([0.1], [], 9)) == 1, "hopeless nodes are not looked at"


def test_the_best_that_drafts_could_do_at_a_load() -> None:
    light, heavy = (
        Prices(lambda rows: 1.0, lambda size, of: 0.1),
        Prices(lambda rows: float(rows), lambda size, of: 0.1),
    )
    assert best_gain(1, 1.0, [1, 4], light) == pytest.approx((1 + sum(0.97**n for n in range(1, 5))) / 1.1)
    assert best_gain(16, 16.0, [1, 4], heavy) < 1.0
