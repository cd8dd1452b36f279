"""Costs of drafting are measured at start, on a text and blocks nobody sees afterwards."""

from __future__ import annotations

from itertools import count

import pytest

from forerun.drafters.base import DrafterHealth
from forerun.engine import measuring
from forerun.policy.policy import AdaptivePolicy
from tests.support import mini


@pytest.mark.parametrize("name", ["mtp", "eagle", "medusa", "draft"])
def test_what_calls_take_is_known_before_the_first_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_BUDGET_S", 60.0)  # on a busy machine few sizes are tried
    engine = mini.drafting("draft" if name == "draft" else name).engine
    assert isinstance(engine.policy, AdaptivePolicy)
    costs = engine.policy.costs.calls[name].by_size
    assert costs and all(0.0 < cost.value < 10.0 for cost in costs.values())
    assert name == "medusa" or max(size for _, size in costs) >= 4
    engine.scheduler.check_integrity()


def test_a_drafter_without_weights_is_not_tried() -> None:
    made = mini.drafting("suffix").engine
    costs = measuring.measure_calls(made.drafter, made.runner, made.kv_cache, 2048)
    assert not costs.by_size and not costs.draws_levels


@pytest.mark.parametrize(("drafter", "positions"), [("suffix", 32), ("draft", 32), ("draft", 70)])
def test_a_model_of_few_positions_is_measured_within_them(
    drafter: str, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, asked = mini.plain().loaded, list[int]()
    monkeypatch.setattr(loaded.model, "max_position", positions)
    inner = measuring._seconds_of
    monkeypatch.setattr(measuring, "_seconds_of", lambda *args: (asked.append(args[1].num_rows), inner(*args))[1])
    options = {"draft_model": "mini-draft"} if drafter == "draft" else {}
    engine = mini.drafting(drafter, max_model_len=positions, max_num_seqs=8, keep_learned=False, **options).engine
    assert isinstance(engine.policy, AdaptivePolicy) and not engine.policy.costs.calls[drafter].by_size
    assert asked and max(asked) <= positions


def test_nothing_stays_of_the_text() -> None:
    engine = mini.drafting("mtp").engine
    assert engine.drafter.health["mtp"] == DrafterHealth(num_errors=0, rest_s=0.0)
    assert engine.scheduler.pool.num_used == 0


def test_a_slow_moment_at_start_spoils_no_size(usual_passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes take turns, so that ten disturbed passes in a row are a few of each size, not all of one."""
    engine = mini.drafting("suffix").engine  # which is measured, too
    monkeypatch.setattr(measuring, "_MAX_PASSES", usual_passes)
    passes = count()
    monkeypatch.setattr(
        measuring, "_seconds_of", lambda *args: args[1].num_rows * (1.0 if next(passes) >= 10 else 9.0) / 1e4
    )
    seconds = measuring.measure_passes([1, 2, 4, 8, 16], engine.runner, engine.kv_cache)
    assert seconds == pytest.approx({rows: rows / 1e4 for rows in (1, 2, 4, 8, 16)})
