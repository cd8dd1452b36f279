"""Speed reports: interleaving, medians, and the comparison with the plain run."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.bench.conversation import fitting_cases, run_cases
from forerun.bench.prompts import PromptCase
from forerun.bench.speed import measure, report, rows
from forerun.core import SamplingParams
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
    assert set(result["rows"][0]) == {"drafter", "tokens_per_s", "speedup", "acceptance_length", "identical"}
    assert list(result["categories"]) == ["chat", "code"]
    assert result["details"]["none"]["num_tokens"] == 24
    assert result["details"]["none"]["decode_speedup"] == 1.0


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
