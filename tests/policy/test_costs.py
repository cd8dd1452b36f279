"""Costs follow what the running engine measures; what was not measured is guessed from its neighbours."""

from __future__ import annotations

import random

import pytest

from forerun.policy.costs import LONG_LAG, CallCosts, Costs, Mean, Pace, PassCosts, rows_to_measure


def test_costs_between_points_and_beyond() -> None:
    cost = PassCosts({1: 1.0, 4: 4.0, 8: 6.0})
    assert [cost(rows) for rows in (1, 2, 4, 6, 8, 10)] == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    assert PassCosts({2: 3.0})(9) == 3.0 and cost.max_rows == 8
    assert [cost.nearest(rows) for rows in (1, 2, 3, 6, 7, 99)] == [1, 1, 4, 4, 8, 8]


def test_more_rows_never_cost_less() -> None:
    assert PassCosts({1: 5.0, 2: 1.0, 4: 2.0}).points == {1: 1.0, 2: 1.0, 4: 2.0}


@pytest.mark.parametrize("most,rows,expected", [(1, 99, 8), (64, 12, 12), (9999, 512, 64), (64, 1, 1)])
def test_rows_to_measure_end_where_steps_do(most: int, rows: int, expected: int) -> None:
    measured = rows_to_measure(most, rows)
    assert measured[0] == 1 and measured[-1] == expected


def test_a_mean_begins_with_the_least_and_falls_faster_than_it_rises() -> None:
    mean = Mean(99.0)
    for seen in (5.0, 2.0, 3.0, 4.0):
        mean.learn(seen)
    assert mean.value == 2.0
    mean.learn(100.0)
    assert mean.value == pytest.approx(2.0 + 0.1 * 6.0), "a jump is cut"
    before = mean.value
    mean.learn(1.0)
    assert mean.value == pytest.approx(before - 0.3 * (before - 1.0))


def test_steps_with_drafts_and_plain_ones_are_followed_apart() -> None:
    costs = Costs(PassCosts({1: 1.0, 8: 1.0, 16: 2.0}))
    assert not costs.knows_plain and costs.step_s(8, drafts=False) == 1.0
    costs.learn_step(1, drafts=False, seconds=1.5)
    assert costs.knows_plain and costs.step_s(1, drafts=True) == 1.5, "nothing better is known"
    costs.learn_step(8, drafts=True, seconds=3.0)
    assert (costs.step_s(1, drafts=False), costs.step_s(8, drafts=True)) == (1.5, 3.0)
    assert costs.step_s(16, drafts=True) == 6.0, "as the nearest number of rows known"
    costs.learn_step(17, drafts=True, seconds=99.0)
    assert costs.step_s(16, drafts=True) == 6.0, "beyond what was measured nothing is learned"


def test_calls_cost_by_drafts_and_requests() -> None:
    costs, pace = CallCosts(), Pace()
    assert costs.call_s(1, 1) == 0.0
    costs.learn(1, 2, 2, 0, 0.2, pace)
    costs.learn(16, 2, 2, 0, 0.5, pace)
    assert costs.call_s(2, 1) == 0.2 and costs.call_s(2, 16) == 0.5
    assert costs.call_s(4, 1) == pytest.approx(0.4) and costs.call_s(2, 4) == pytest.approx(0.4)
    costs.learn(1, 6, 6, 0, 0.6, pace)
    assert costs.level_s == pytest.approx(0.1)
    costs.learn(1, 0, 0, 0, 9.0, pace)
    assert costs.call_s(2, 1) == 0.2, "a call that gave nothing says nothing of drafting"


def test_what_was_measured_once_is_not_believed_over_what_was_measured_often() -> None:
    costs, calls, pace = Costs(PassCosts({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0})), CallCosts(), Pace()
    for number in range(100):
        costs.learn_step(2, drafts=True, seconds=1.6)
        if number < 20:
            costs.learn_step(4, drafts=True, seconds=1.5)
            calls.learn(1, 4, 4, 0, 0.2, pace)
    for disturbed in range(1, 9):
        costs.learn_step(8, drafts=True, seconds=20.0)
        calls.learn(1, 6, 6, 0, 2.0, pace)
        believed = 3.0 if disturbed < 5 else 3.2 if disturbed < 7 else 20.0  # 20 are fewer than 2^5, 100 than 2^7
        assert costs.step_s(8) == pytest.approx(believed)
        assert calls.call_s(6, 1) == pytest.approx(0.3 if disturbed < 5 else 2.0)
        assert calls.level_s == pytest.approx(0.05 if disturbed < 5 else 0.9)
    costs.learn_step(8, drafts=True, seconds=3.0)
    assert costs.step_s(8) == pytest.approx(3.0), "measured again, what disturbed it is gone"


def test_plain_steps_and_what_another_process_knew_are_not_doubted() -> None:
    costs = Costs(PassCosts({1: 1.0, 16: 3.0}), {(True, 16): Mean(2.0)})
    for _ in range(1000):
        costs.learn_step(1, drafts=False, seconds=1.0)
        costs.learn_step(1, drafts=True, seconds=1.5)
    assert costs.step_s(16) == 6.0
    costs.learn_step(16, drafts=False, seconds=6.0)
    assert costs.step_s(16, drafts=False) == 6.0


def test_reading_is_told_from_drafting() -> None:
    costs, pace = CallCosts(), Pace()
    costs.expect(4, 4, 0.1)
    assert costs.reading_s(900) == 0.0, "not known yet"
    assert costs.learn(1, 4, 4, 100, 1.1, pace) == pytest.approx(1.0)
    assert costs.reading_s(LONG_LAG - 1) == 0.0 and costs.reading_s(50) == pytest.approx(0.5)
    assert costs.call_s(4, 1) == 0.1
    assert costs.learn(1, 4, 4, 2, 0.2, pace) == 0.0 and costs.call_s(4, 1) == 0.2


def test_what_is_not_measured_falls_with_what_is() -> None:
    pace, stale, other, gauge = Pace(), Mean(1.0), Mean(1.0), Mean(1.0)
    for _ in range(6):
        pace.learn(stale, 8.0)
        pace.learn_gauge(other, 6.0)
        pace.learn_gauge(gauge, 4.0)
    pace.learn_gauge(gauge, 3.9)
    assert (stale.value, other.value) == (8.0, 6.0), "noise"
    for _ in range(40):
        pace.learn_gauge(gauge, 1.0)
    assert stale.value == pytest.approx(2.0, rel=0.3) and other.value == pytest.approx(1.5, rel=0.3)
    assert stale.value / other.value == pytest.approx(8 / 6), "one follows the other"
    before = stale.value
    for _ in range(40):
        pace.learn_gauge(gauge, 4.0)
    assert stale.value == before, "it does not rise"
    for _ in range(40):
        pace.learn_gauge(gauge, 1.0)
    pace.learn(stale, 3.0)
    measured = stale.value
    for _ in range(40):
        pace.learn_gauge(gauge, 0.9)
    assert stale.value == measured, "what was measured again no longer follows what was measured after it before"


def test_on_a_quiet_machine_nothing_falls() -> None:
    """Neither where the first step of a kind is slow, nor where the number of requests changes, nor long after."""
    costs = Costs(PassCosts({1: 1.0, 4: 1.3, 16: 3.0}))
    costs.calls["m"] = CallCosts()
    for seconds in (3.7, 2.0, 2.0, 2.0, 2.0):
        costs.learn_step(4, True, seconds)
        costs.learn_call("m", 1, 3, 3, 0, 0.5)
    costs.learn_plain(1, 1.0)
    for _ in range(8):
        costs.learn_plain(16, 2.5)
        costs.learn_step(16, True, 2.0)
    assert costs.calls["m"].call_s(3, 1) == 0.5 and costs.step_s(4) == pytest.approx(2.0)
    for _ in range(8):
        costs.learn_plain(1, 4.0)  # busy
    for _ in range(200):
        costs.learn_call("m", 1, 3, 3, 0, 0.5)  # by a device, whose steps with drafts are not measured
    for _ in range(40):
        costs.learn_plain(1, 1.0)
    assert costs.calls["m"].call_s(3, 1) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(40))
def test_what_was_measured_in_a_busy_time_ends_near_what_a_quiet_one_gives(seed: int) -> None:
    """Whatever is measured afterwards, as long as it was measured in the busy time, too."""
    rng = random.Random(seed)
    costs, slow, rows = Costs(PassCosts({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})), rng.uniform(2.0, 8.0), (2, 4, 8)
    costs.calls["m"] = CallCosts()

    def measure(kind: int, factor: float) -> None:
        if kind == 1:
            costs.learn_plain(1, factor)
        costs.learn_step(kind, kind > 1, factor * kind)
        if kind > 1:
            costs.learn_call("m", 1, kind, kind, 0, 0.1 * factor * kind)

    for kind in [*rows, 1] * 4 + [rng.choice((1, *rows)) for _ in range(rng.randint(0, 60))]:
        measure(kind, slow)
    chosen = rng.sample((1, *rows), rng.randint(1, 2))
    for _ in range(60):
        measure(rng.choice(chosen), 1.0)
    for kind in rows:
        calls = costs.calls["m"]
        assert 0.6 < costs.slowness[True, kind].value / kind < 1.4, (kind, chosen)
        assert 0.6 < calls.by_size[1, kind].value / (0.1 * kind) < 1.4, (kind, chosen)
        assert costs.step_s(kind) / kind < 1.4 and calls.call_s(kind, 1) / (0.1 * kind) < 1.4, "doubt makes none dearer"


def test_what_took_no_time_was_not_measured() -> None:
    """A negative value would grow with every measurement: later ones may be at most four times as high."""
    mean = Mean(1.0)
    for seen in (0.0, 2.0, -1.0, 0.0, *[2.0] * 20):
        mean.learn(seen)
    assert mean.value == 2.0
