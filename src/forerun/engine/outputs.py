"""What users get back: texts, log-probabilities and figures of each request, gathered step by step.

Knows: requests and what each step emitted. Does not know: models, scheduling, how tokens were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from forerun.core import (
    CompletionOutput,
    DrafterCount,
    PositionLogprobs,
    Request,
    RequestOutput,
    RequestStats,
)
from forerun.engine.logprobs import position_logprobs
from forerun.engine.stopping import OutputText
from forerun.errors import DeadlineError, PromptError
from forerun.policy.base import StepResult
from forerun.speculation.draft import Draft


class StepTrace(NamedTuple):
    """One step of one request: the verified tree and the result.

    `tokens`, `parents` and `sources` have one entry per node, the root first. `accepted` are nodes in path order,
    without the root; `emitted` their tokens and, unless the request ended before it, the one the target chose after
    them.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    time_s: float  # on the clock of `time.perf_counter`


@dataclass(slots=True)
class SampleRecord:
    """One request's figures: where its tokens came from, log-probabilities and times."""

    request: Request
    text: OutputText
    arrival_s: float = field(default_factory=perf_counter)
    first_step_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_steps: int = 0
    num_first: int = 0  # tokens of the first step
    num_last: int = 0  # of the last one
    num_untimed: int = 0  # of steps whose tokens `plain_s` does not count yet
    sources: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)  # of the tokens chosen here
    num_elsewhere: int = 0  # leading tokens that another engine chose
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    figures: RequestStats = field(default_factory=RequestStats)  # the figures that grow step by step
    trace: list[StepTrace] | None = None  # steps that `take_trace` has not returned yet; None: no trace was asked for

    def go_on_after(self, token_ids: Sequence[int]) -> None:
        """Before the first step: the tokens that the request has had elsewhere, which go the way of all tokens.

        Raises PromptError if the request would have ended before the last of them, or with it.
        """
        self.num_elsewhere = self.text.take(token_ids)
        if self.request.finish_reason is not None:
            raise PromptError(
                f"token {self.num_elsewhere} of the {len(token_ids)} to go on after ends the answer: nothing follows it"
            )
        self.sources.extend([""] * len(token_ids))

    def logprobs_after(self, num_tokens: int) -> tuple[PositionLogprobs, ...]:
        """Log-probabilities of the tokens behind the first `num_tokens`, none of them chosen elsewhere."""
        return tuple(self.logprobs[num_tokens - self.num_elsewhere :])

    def scheduled(self) -> None:
        """The request is part of a step."""
        if self.first_step_s is None:
            self.first_step_s = perf_counter()

    def emitted(self, sources: Sequence[str], logprobs: Sequence[PositionLogprobs]) -> None:
        """A step emitted tokens."""
        self.last_token_s = perf_counter()
        if self.first_token_s is None:
            self.first_token_s, self.num_first = self.last_token_s, len(sources)
        self.num_steps += 1
        self.num_last = len(sources)
        self.sources.extend(sources)
        self.logprobs.extend(logprobs)

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens were asked for and some are still to be computed."""
        request, num_wanted = self.request, len(self.request.prompt_token_ids) - 1
        if request.prompt_logprobs is None or len(self.prompt_logprobs) == num_wanted:  # all, before a preemption
            return False
        return request.num_computed < num_wanted

    def read_prompt(self, logits: Tensor) -> None:
        """Record log-probabilities of the next prompt tokens, from logits [span, vocab_size]."""
        request, num_top = self.request, self.request.prompt_logprobs
        assert num_top is not None
        for position, row in enumerate(logits, request.num_computed + 1):  # of the token the row predicts
            if position < len(request.prompt_token_ids) and position not in self.prompt_logprobs:
                self.prompt_logprobs[position] = position_logprobs(row, request.prompt_token_ids[position], num_top)

    def drafted(self, draft: Draft, accepted: Sequence[int]) -> None:
        """A step verified a draft and accepted some of its nodes."""
        if draft.num_nodes == 1:
            self.figures.num_plain_steps += 1
            return
        nodes, sources, depths = draft.verified[1:], draft.tree.sources, draft.tree.depths
        drafted, right = [depths[node] for node in nodes], [depths[node] for node in accepted]
        self.figures.trees.count(drafted, right)
        names = {sources[node] for node in nodes}
        for name in names:
            if len(names) > 1:
                drafted, right = [[depths[n] for n in these if sources[n] == name] for these in (nodes, accepted)]
            self.drafters.setdefault(name, DrafterCount()).count(drafted, right)

    def traced(self, draft: Draft, accepted: Sequence[int], emitted: Sequence[int]) -> None:
        """Record a step if a trace was asked for; called after `emitted`."""
        if self.trace is None:
            return
        tree, nodes = draft.tree, draft.verified
        parents = (-1, *(draft.row_of(tree.parents[node]) for node in nodes[1:]))
        tokens, sources = tuple(tree.tokens[n] for n in nodes), tuple(tree.sources[n] for n in nodes)
        places = tuple(draft.row_of(node) for node in accepted)
        self.trace.append(StepTrace(tokens, parents, sources, places, tuple(emitted), self.last_token_s))

    def take_trace(self) -> tuple[StepTrace, ...]:
        """The steps since the last call; () if no trace was asked for."""
        steps = tuple(self.trace or ())
        if self.trace:
            self.trace.clear()
        return steps

    def drafted_for(self, draft_s: float) -> None:
        """Add the request's share of a step's drafting time."""
        self.figures.draft_s += draft_s

    def decoded(self, verify_s: float, step_s: float, plain_s: float | None) -> None:
        """Add a step without prefill; `verify_s`: its share of the pass, `plain_s`: what a plain step takes."""
        figures = self.figures
        figures.verify_s += verify_s
        figures.step_s += step_s
        self.num_untimed += self.num_last
        if plain_s is not None:  # earlier steps, too: it may have been measured in the middle of an answer
            figures.plain_s = (figures.plain_s or 0.0) + self.num_untimed * plain_s
            self.num_untimed = 0

    def ended(self, explain: Callable[[Request], str | None]) -> None:
        """The request is over; `explain` returns why it would have no drafts now, or None."""
        if 1 < self.num_steps < 2 * self.figures.num_plain_steps:
            self.figures.why_plain = _why_plain(self.request, explain(self.request))

    def stats(self) -> RequestStats:
        """The figures so far."""
        arrival_s = self.arrival_s if self.request.arrival_s is None else min(self.arrival_s, self.request.arrival_s)
        first_step = self.first_step_s or arrival_s
        first_token = self.first_token_s or first_step
        return replace(
            self.figures,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_tokens=self.request.num_output,
            num_elsewhere=self.num_elsewhere,
            num_first=self.num_first,
            num_steps=self.num_steps,
            num_preemptions=self.request.num_preemptions,
            num_cached_tokens=self.request.num_cached_tokens,
            queue_s=first_step - arrival_s,
            ttft_s=first_token - arrival_s,
            decode_s=max(0.0, self.last_token_s - first_token),
            drafters={name: DrafterCount().add(count) for name, count in self.drafters.items()},
            trees=DrafterCount().add(self.figures.trees),
            failed_drafters=self.request.failed_drafters,
        )


def share_time(result: StepResult, records: Mapping[str, SampleRecord], plain_s: float | None) -> None:
    """Give every request that chose tokens its share of a step's time.

    Without drafts the step would take `plain_s` on its own clock: so much longer as it took itself, where others
    had the engine's core.
    """
    seconds = result.seconds
    if plain_s is not None and seconds.own_s > 0.0:
        plain_s *= seconds.step_s / seconds.own_s
    num, num_asked = len(result.outcomes), sum([outcome.draft.max_nodes > 1 for outcome in result.outcomes])
    for outcome in result.outcomes:
        record = records[outcome.request.request_id]
        if outcome.draft.max_nodes > 1:
            record.drafted_for(seconds.draft_s / num_asked)
        if result.num_span == 0:
            record.decoded(seconds.verify_s / num, seconds.step_s, plain_s)


@dataclass(slots=True)
class RequestGroup:
    """The samples of one user request (`n` of them)."""

    request_id: str
    prompt: str | None
    samples: list[SampleRecord]

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.request.finish_reason is not None for sample in self.samples)

    @property
    def prediction(self) -> tuple[int, ...]:
        """What the answers are expected to repeat."""
        return self.samples[0].request.prediction

    @property
    def num_events(self) -> int:
        """Tokens and ended samples so far: while this number stays the same, `output` does not change."""
        return sum(s.request.num_output + (s.request.finish_reason is not None) for s in self.samples)

    def output(self) -> RequestOutput:
        """The output for the user so far."""
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
    """One entry per prompt token; None for the first, which nothing precedes."""
    if sample.request.prompt_logprobs is None:
        return None
    return (None, *(sample.prompt_logprobs.get(i) for i in range(1, len(sample.request.prompt_token_ids))))


def _why_plain(request: Request, reason: str | None) -> str:
    """Why most steps of a request had no drafts; simple reasons are checked first."""
    if not request.speculate:
        return "the request asked for no drafts"
    if request.failed_drafters:
        return f"drafter {', '.join(request.failed_drafters)} failed and was left out"
    return reason or "the drafter found nothing to propose in most steps"


def too_late(request: Request) -> DeadlineError:
    """What a request ends with whose deadline has passed."""
    max_tokens = request.max_len - len(request.prompt_token_ids)
    return DeadlineError(
        f"the deadline passed after {request.num_output} of at most {max_tokens} tokens: give the request more time, "
        "or ask for fewer tokens"
    )
