"""Overhead per step: what is counted, and which steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forerun.bench.overhead import calls_of, summary
from forerun.core import CompletionOutput, DrafterCount, RequestOutput, SamplingParams


class Stepping:
    """An engine whose steps take known times; the third and the fourth draft nothing, and one call runs both."""

    def __init__(self) -> None:
        self.timings = {"draft_s": 0.0, "forward_s": 0.0, "commit_s": 0.0, "steps": 0.0, "calls": 0.0}

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        drafted = 0
        for step in range(5):
            self.timings["forward_s"] += 1.0
            self.timings["draft_s"] += 0.002
            self.timings["commit_s"] += 0.001 * (step + 1)
            self.timings["steps"] += 1
            self.timings["calls"] += step != 3
            drafted += 0 if step in (2, 3) else 4
            answer = CompletionOutput(0, "", (), None, None, 0, ())
            answer.stats.drafters = {"ngram": DrafterCount(drafted, 0)}
            yield RequestOutput("0", None, (), [answer], finished=step == 4)


def test_the_first_step_and_the_forward_do_not_count_and_steps_of_a_call_count_together() -> None:
    llm: Any = Stepping()
    calls = list(calls_of(llm, [1], SamplingParams()))
    assert [(call.num_drafted, call.num_steps) for call in calls] == [(4, 1), (0, 2), (4, 1)]
    assert [call.overhead_s for call in calls] == pytest.approx([0.004, 0.0055, 0.007])


def test_summary_takes_the_calls_that_drafted_as_asked() -> None:
    llm: Any = Stepping()
    calls = list(calls_of(llm, [1], SamplingParams()))
    assert summary(calls, 4) == {
        "num_steps": 2,
        "steps_a_call": 1.0,
        "num_drafted": 4,
        "overhead_ms": 5.5,
        "phases_ms": {"draft": 2.0, "forward": 1000.0, "commit": 3.5},
    }
    plain = summary(calls, 0)
    assert (plain["num_steps"], plain["steps_a_call"], plain["overhead_ms"]) == (2, 2.0, 5.5)
    assert summary(calls, 9) == {"num_steps": 0, "num_drafted": 9}
