"""What a step costs in addition to the target's forward, at batch 1.

Knows: the engine's own timings, read before and after every step. Does not know: what a phase does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.core import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

FORWARD = "forward_s"


@dataclass(frozen=True, slots=True)
class StepTime:
    """One decoding step: seconds by phase, and how many tokens were drafted in it."""

    phases: dict[str, float]
    num_drafted: int

    @property
    def overhead_s(self) -> float:
        """Everything but the forward."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != FORWARD)


def steps_of(llm: LLM, prompt: list[int], params: SamplingParams) -> Iterator[StepTime]:
    """Run one request; its decoding steps (the first, which computes the prompt, is left out)."""
    before, drafted_before, first = dict(llm.timings), 0, True
    for output in llm.stream(prompt, params):
        after = dict(llm.timings)
        drafted = sum(count.drafted for count in output.outputs[0].stats.drafters.values())
        phases = {phase: after[phase] - before[phase] for phase in after if phase.endswith("_s")}
        if not first:
            yield StepTime(phases, drafted - drafted_before)
        before, drafted_before, first = after, drafted, False


def summary(steps: list[StepTime], num_drafted: int) -> dict[str, Any]:
    """Medians in milliseconds over the steps that drafted exactly `num_drafted` tokens."""
    counted = [step for step in steps if step.num_drafted == num_drafted]
    if not counted:
        return {"num_steps": 0, "num_drafted": num_drafted}
    phases = {phase.removesuffix("_s"): _ms(median(s.phases[phase] for s in counted)) for phase in counted[0].phases}
    overhead = _ms(median(step.overhead_s for step in counted))
    return {"num_steps": len(counted), "num_drafted": num_drafted, "overhead_ms": overhead, "phases_ms": phases}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
