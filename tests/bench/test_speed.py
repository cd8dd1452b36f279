"""Speed reports: interleaving, medians, and the comparison with the plain run."""

from __future__ import annotations

from dataclasses import asdict
from math import exp
from typing import Any

import pytest

from forerun.bench.conversation import fitting_cases, run_cases
from forerun.bench.interval import geometric_mean, interval_of, student_t
from forerun.bench.prompts import PromptCase
from forerun.bench.report import gain, spread
from forerun.bench.speed import Rounds, SpeedRun, decode_tokens, detail, measure, report, rows
from forerun.core import RequestStats, SamplingParams
from forerun.errors import DataError
from tests.bench.fakes import FakeLLM

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=3)
CASES = [PromptCase(("one", "two"), True, "chat", "file:1"), PromptCase(("def f",), False, "code", "file:2")]


def engines(**others: FakeLLM) -> dict[str, Any]:
    return {"none": FakeLLM(), **others}


def test_speedup_is_the_ratio_of_paces() -> None:
    result = rows(measure(engines(fast=FakeLLM(0.005)), CASES, PARAMS, repeats=3), compare=True)
    assert [row.drafter for row in result] == ["none", "fast"]
    assert [row.speedup for row in result] == [1.0, 2.0]
    assert [row.tokens_per_s for row in result] == pytest.approx([100, 200])
    assert all(row.identical for row in result)


def test_one_wrong_token_anywhere_is_not_identical() -> None:
    rounds = measure(engines(wrong=FakeLLM(wrong_at=7)), CASES, PARAMS, repeats=1)
    assert [row.identical for row in rows(rounds, compare=True)] == [True, False]
    assert [row.identical for row in rows(rounds, compare=False)] == [None, None]


def test_report_has_rows_details_and_categories() -> None:
    result = report(measure(engines(), CASES, PARAMS, repeats=2), CASES, compare=True, by_category=True)
    assert set(result["rows"][0]) == {
        "drafter", "tokens_per_s", "speedup", "speedup_interval", "within_noise", "acceptance_length", "identical",
    }  # fmt: skip
    assert list(result["categories"]) == ["chat", "code"]
    assert result["details"]["none"]["num_tokens"] == 24
    assert result["details"]["none"]["decode_speedup"] == 1.0


def test_decoding_leaves_out_what_the_first_step_emitted() -> None:
    assert decode_tokens(RequestStats(num_tokens=24, num_steps=7, num_first=1)) == 23
    assert decode_tokens(RequestStats(num_tokens=24, num_steps=7, num_first=5)) == 19
    assert decode_tokens(RequestStats(num_tokens=24, num_elsewhere=10, num_steps=3, num_first=4)) == 10


def rounds_of(*prompts: tuple[float, ...], num_steps: int = 50) -> Rounds:
    """Rounds in which `x` is so many times as fast as plain decoding: a tuple a prompt, a ratio a repeat."""
    plain = SpeedRun(
        ((1,),), num_tokens=100, num_steps=100, seconds=1.0, decode_s=1.0, decode_tokens=100, drafted=0, accepted=0
    )

    def drafted(ratio: float) -> SpeedRun:
        seconds = 1.0 / ratio
        return SpeedRun(((1,),), 100, num_steps, seconds, seconds, 100, drafted=60, accepted=50)

    return [[{"none": plain, "x": drafted(ratio)} for ratio in ratios] for ratios in prompts]


def test_an_answer_of_one_step_says_nothing_of_decoding() -> None:
    rounds = rounds_of((2.0,), (2.0,), (2.0,))
    short = SpeedRun(((1,),), 3, 1, 0.01, 0.0, 0, drafted=3, accepted=2)
    assert detail("x", [*rounds, [{"none": rounds[0][0]["none"], "x": short}]]).decode_speedup == 2.0
    alone = detail("x", [[{"none": short, "x": short}]])
    assert (alone.decode_speedup, alone.decode_tokens_per_s, alone.decode_within_noise) == (1.0, 0.0, True)


def test_intervals_are_students_over_log_ratios() -> None:
    assert [round(student_t(freedom), 2) for freedom in (1, 2, 3, 9, 29)] == [12.71, 4.30, 3.18, 2.26, 2.05]
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert interval_of([exp(0.1), exp(0.2), exp(0.3)]) == pytest.approx((exp(-0.0484), exp(0.4484)), abs=1e-4)
    assert interval_of([2.0]) is None


def test_a_gain_has_an_interval_over_prompts() -> None:
    plain, row = rows(rounds_of((1.9, 2.0, 2.1), (2.2, 2.1, 3.9), (1.9, 1.9, 1.9)), compare=True)
    assert (plain.speedup, plain.speedup_interval, plain.within_noise) == (1.0, None, False)
    assert row.speedup == pytest.approx((2.0 * 2.2 * 1.9) ** (1 / 3), abs=1e-3) and not row.within_noise
    assert row.speedup_interval is not None and 1 < row.speedup_interval[0] < row.speedup < row.speedup_interval[1]
    assert detail("x", rounds_of((2.0,), (2.1,))).decode_interval is not None
    assert gain({"speedup": 2.5, "within_noise": False}) == "2.50x"


@pytest.mark.parametrize(
    ("prompts", "num_steps", "interval"),
    [
        (((1.3,), (0.9,), (1.2,)), 50, "0.69-1.81"),  # prompts disagree
        (((1.05, 0.9, 1.4),), 50, "0.63-1.92"),  # repeats of one prompt disagree
        (((1.48,),), 50, "-"),  # one measurement
        (((1.48,), (1.48,), (1.48,)), 100, "1.48-1.48"),  # 1.00 tokens a step: not by drafts, however steady
    ],
)
def test_what_may_be_no_gain_is_marked(prompts: tuple[tuple[float, ...], ...], num_steps: int, interval: str) -> None:
    rounds = rounds_of(*prompts, num_steps=num_steps)
    [_, row] = report(rounds, CASES, compare=True, by_category=False)["rows"]
    assert gain(row).startswith("~1.") and spread(row) == interval
    assert detail("x", rounds).decode_within_noise


def test_a_loss_is_a_loss_without_drafts_too() -> None:
    [_, row] = rows(rounds_of((0.90,), (0.91,), (0.92,), num_steps=100), compare=True)
    assert not row.within_noise
    [_, row] = rows(rounds_of((0.963,), (0.973,), (0.983,)), compare=True)
    assert spread(asdict(row)) == "0.95-1.00" and row.within_noise  # whatever lies behind the digits that are shown


def test_later_turns_see_the_models_own_answers() -> None:
    llm: Any = FakeLLM()
    [answers] = run_cases(llm, CASES[:1], [PARAMS])
    assert len(answers) == 2
    assert llm.prompts == ["<u>one", f"<u>one<a>{answers[0].text}<u>two"]


def test_a_conversation_ends_where_the_context_does() -> None:
    llm: Any = FakeLLM(max_model_len=8)
    assert [len(answers) for answers in run_cases(llm, CASES, [PARAMS, PARAMS])] == [1, 1]
    with pytest.raises(DataError, match="none of the 1 prompts fits"):
        fitting_cases(llm, [PromptCase(("x" * 20,), False, "", "file:1")])
