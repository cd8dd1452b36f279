"""What a step costs in addition to the target's forward, at batch 1.

Knows: the engine's own timings, read before and after every step. Does not know: what a phase does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.core import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

FORWARD = "forward_s"


@dataclass(frozen=True, slots=True)
class CallTime:
    """The decoding steps of one native call, mostly one: seconds a step by phase, and how many tokens each drafted."""

    phases: dict[str, float]
    num_drafted: float
    num_steps: int = 1

    @property
    def overhead_s(self) -> float:
        """Everything but the forward, a step."""
        return sum(seconds for phase, seconds in self.phases.items() if phase != FORWARD)


def calls_of(llm: LLM, prompt: list[int], params: SamplingParams) -> Iterator[CallTime]:
    """Run one request; the calls of its decoding steps (the first, which computes the prompt, is left out).

    A call's steps are counted together: the first of them pays for all, and the others are quick.
    """
    before, drafted_before, num_steps = dict(llm.timings), 0, 0
    states = [(dict(llm.timings), _num_drafted(output)) for output in llm.stream(prompt, params)]
    for (after, drafted), following in zip(states, [*states[1:], None], strict=True):
        num_steps += 1
        if following is not None and following[0]["calls"] == after["calls"]:
            continue
        phases = {phase: (after[phase] - before[phase]) / num_steps for phase in after if phase.endswith("_s")}
        if before["calls"] >= states[0][0]["calls"]:
            yield CallTime(phases, (drafted - drafted_before) / num_steps, num_steps)
        before, drafted_before, num_steps = after, drafted, 0


def _num_drafted(output: RequestOutput) -> int:
    return sum(count.drafted for count in output.outputs[0].stats.drafters.values())


def summary(calls: list[CallTime], num_drafted: int) -> dict[str, Any]:
    """Medians in milliseconds a step, over the calls whose steps drafted exactly `num_drafted` tokens each."""
    counted = [call for call in calls if call.num_drafted == num_drafted]
    if not counted:
        return {"num_steps": 0, "num_drafted": num_drafted}
    phases = {phase.removesuffix("_s"): _ms(median(c.phases[phase] for c in counted)) for phase in counted[0].phases}
    num_steps = sum(call.num_steps for call in counted)
    return {
        "num_steps": num_steps,
        "steps_a_call": round(num_steps / len(counted), 2),
        "num_drafted": num_drafted,
        "overhead_ms": _ms(median(call.overhead_s for call in counted)),
        "phases_ms": phases,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
