"""The comparison behind `forerun verify` finds what it should."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.bench.equality import Difference, check_equality, first_difference
from forerun.bench.prompts import PromptCase
from forerun.core import SamplingParams
from forerun.errors import ConfigError
from tests.bench.fakes import FakeLLM

CASES = [PromptCase((f"prompt {i}",), True, "", f"file:{i}") for i in range(5)]
PARAMS = [SamplingParams(max_tokens=6, temperature=t, seed=1) for t in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("expected", "got", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [5], 0), ([], [], None)],
)
def test_first_difference(expected: list[int], got: list[int], position: int | None) -> None:
    assert first_difference(expected, got) == position


def test_equal_engines_pass_in_batches() -> None:
    plain, other = FakeLLM(), FakeLLM()
    engines: Any = {"other": other}
    checks = check_equality(plain, engines, CASES, PARAMS, batch_size=3)  # type: ignore[arg-type]
    assert [(check.drafter, check.temperature, check.num_prompts) for check in checks] == [
        ("other", 0.0, 5),
        ("other", 1.0, 5),
    ]
    assert not any(check.differences for check in checks)
    assert plain.batch_sizes == [1] * 10 and other.batch_sizes == [3, 2, 3, 2]


def test_adapters_are_taken_in_turn() -> None:
    plain, other = FakeLLM(), FakeLLM()
    plain.adapters = other.adapters = {"sql": 1, "chat": 2}
    engines: Any = {"other": other}
    check_equality(plain, engines, CASES, PARAMS[:1], batch_size=3)  # type: ignore[arg-type]
    assert plain.loras == other.loras == [None, "sql", "chat", None, "sql"]


def test_fewer_prompts_than_adapters_are_refused() -> None:
    plain: Any = FakeLLM()
    plain.adapters = {"sql": 1, "chat": 2}
    with pytest.raises(ConfigError, match="at least 3"):
        check_equality(plain, {"other": plain}, CASES[:2], PARAMS[:1], batch_size=3)


def test_a_wrong_token_is_reported_with_its_place() -> None:
    engines: Any = {"wrong": FakeLLM(wrong_at=4)}
    plain: Any = FakeLLM()
    [check] = check_equality(plain, engines, CASES[:1], PARAMS[:1], batch_size=1)
    expected = 97 + (len("<u>prompt 0") + 1 + 4) % 26
    assert check.differences == [Difference("file:0", 0, 4, expected, 33)]
