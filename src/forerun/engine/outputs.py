"""What users get back: texts, log-probabilities and figures of each request, gathered step by step.

Knows: requests and what each step emitted. Does not know: models, scheduling, how tokens were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from forerun.core import (
    CompletionOutput,
    DrafterCount,
    PositionLogprobs,
    Request,
    RequestOutput,
    RequestStats,
)
from forerun.engine.stopping import OutputText


@dataclass(slots=True)
class SampleRecord:
    """One request's tokens' origins, log-probabilities and times."""

    request: Request
    text: OutputText
    arrival_s: float = field(default_factory=perf_counter)
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_steps: int = 0
    sources: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    drafters: dict[str, DrafterCount] = field(default_factory=dict)

    def scheduled(self) -> None:
        """The request is part of a step."""
        if self.first_step_s is None:
            self.first_step_s = perf_counter()

    def emitted(self, sources: Sequence[str], logprobs: Sequence[PositionLogprobs]) -> None:
        """A step emitted tokens."""
        self.last_token_s = perf_counter()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        self.num_steps += 1
        self.sources.extend(sources)
        self.logprobs.extend(logprobs)

    def drafted(self, sources: Sequence[str], accepted: Sequence[str]) -> None:
        """A step drafted nodes from these sources and accepted those."""
        for source in sources:
            self.drafters.setdefault(source, DrafterCount()).drafted += 1
        for source in accepted:
            self.drafters[source].accepted += 1

    def stats(self) -> RequestStats:
        """The figures so far."""
        first_step = self.first_step_s or self.arrival_s
        first_token = self.first_token_s or first_step
        return RequestStats(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_tokens=self.request.num_output,
            num_steps=self.num_steps,
            num_preemptions=self.request.num_preemptions,
            queue_s=first_step - self.arrival_s,
            ttft_s=first_token - self.arrival_s,
            decode_s=max(0.0, self.last_token_s - first_token),
            drafters={name: DrafterCount(c.drafted, c.accepted) for name, c in self.drafters.items()},
        )


@dataclass(slots=True)
class RequestGroup:
    """The samples of one user request (`n` of them)."""

    request_id: str
    prompt: str | None
    samples: list[SampleRecord]

    @property
    def finished(self) -> bool:
        """Every sample has ended."""
        return all(sample.request.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        """What the user sees now."""
        first = self.samples[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.request.prompt_token_ids,
            outputs=[_completion(sample) for sample in self.samples],
            finished=self.finished,
            prompt_logprobs=_prompt_logprobs(first),
        )


def _completion(sample: SampleRecord) -> CompletionOutput:
    request = sample.request
    wants = request.params.logprobs is not None
    return CompletionOutput(
        index=request.sample_index,
        text=sample.text.visible(),
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        seed=request.seed,
        token_sources=tuple(sample.sources),
        logprobs=tuple(sample.logprobs) if wants else None,
        cumulative_logprob=sum(entry.chosen.logprob for entry in sample.logprobs) if wants else None,
        error=request.error,
        stats=sample.stats(),
    )


def _prompt_logprobs(sample: SampleRecord) -> tuple[PositionLogprobs | None, ...] | None:
    """One entry a prompt token; None for the first, which nothing precedes."""
    if sample.request.params.prompt_logprobs is None:
        return None
    return (None, *(sample.prompt_logprobs.get(i) for i in range(1, len(sample.request.prompt_token_ids))))
