"""Overhead per step: what is counted, and which steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forerun.bench.overhead import steps_of, summary
from forerun.core import CompletionOutput, DrafterCount, RequestOutput, SamplingParams


class Stepping:
    """An engine whose steps take known times; the third drafts nothing."""

    def __init__(self) -> None:
        self.timings = {"draft_s": 0.0, "forward_s": 0.0, "commit_s": 0.0, "steps": 0.0}

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
        drafted = 0
        for step in range(4):
            self.timings["forward_s"] += 1.0
            self.timings["draft_s"] += 0.002
            self.timings["commit_s"] += 0.001 * (step + 1)
            self.timings["steps"] += 1
            drafted += 0 if step == 2 else 4
            answer = CompletionOutput(0, "", (), None, None, 0, ())
            answer.stats.drafters = {"ngram": DrafterCount(drafted, 0)}
            yield RequestOutput("0", None, (), [answer], finished=step == 3)


def test_the_first_step_and_the_forward_do_not_count() -> None:
    llm: Any = Stepping()
    steps = list(steps_of(llm, [1], SamplingParams()))
    assert [step.num_drafted for step in steps] == [4, 0, 4]
    assert [step.overhead_s for step in steps] == pytest.approx([0.004, 0.005, 0.006])


def test_summary_takes_the_steps_that_drafted_as_asked() -> None:
    llm: Any = Stepping()
    steps = list(steps_of(llm, [1], SamplingParams()))
    assert summary(steps, 4) == {
        "num_steps": 2,
        "num_drafted": 4,
        "overhead_ms": 5.0,
        "phases_ms": {"draft": 2.0, "forward": 1000.0, "commit": 3.0},
    }
    assert summary(steps, 9) == {"num_steps": 0, "num_drafted": 9}
