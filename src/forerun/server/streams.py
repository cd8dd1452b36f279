"""What endpoints ask of the engine behind them, wherever it runs, and the pieces in which its answers come.

Knows: deltas, how much of a sample was sent. Does not know: engines, threads, other machines, HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from forerun.core import FinishReason, PositionLogprobs, RequestStats
from forerun.engine.outputs import RequestGroup, SampleRecord, StepTrace
from forerun.server.metrics import EngineLoad, Metrics


@dataclass(frozen=True, slots=True)
class Delta:
    """What a sample gained since the last delta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int
    stats: RequestStats | None  # with the finish reason
    speedup: float | None  # estimated, so far; of requests with a trace
    steps: tuple[StepTrace, ...]  # empty unless the request asked for a trace


@dataclass(slots=True)
class Sent:
    """How much of a sample has been sent."""

    num_chars: int = 0
    num_tokens: int = 0
    done: bool = False


class Stream(Protocol):
    """One request on its way: iterate for deltas; leaving early must be followed by `Service.abort`."""

    def deltas(self) -> AsyncIterator[list[Delta]]:
        """New pieces of all samples until each has ended; raises ApiError if the request fails."""


class Service(Protocol):
    """An engine, or several, that run requests for many clients at once."""

    metrics: Metrics

    def start(self) -> None:
        """Begin to work."""

    def stop(self) -> None:
        """Accept no more requests and end all with an error; returns when that is done."""

    @property
    def healthy(self) -> bool:
        """Whether requests can be answered."""

    @property
    def num_seats(self) -> int:
        """Samples that are computed at the same time, at most."""

    def load(self) -> EngineLoad:
        """How busy it is."""

    async def metrics_text(self) -> bytes:
        """All metrics, as Prometheus reads them."""

    def check_room(self, num_samples: int) -> None:
        """Raise ApiError 429 if `num_samples` more would overfill the queue now, 400 if always, 503 if it is down."""

    def submit(self, group: RequestGroup, constrained: bool = False) -> Stream:
        """Hand over a prepared request; raises ApiError 429 if there is no room now, 400 if there never is."""

    def abort(self, stream: Stream) -> None:
        """End a request whose client is gone, if it still runs."""

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """See `LLM.load_adapter`."""

    async def unload_adapter(self, name: str) -> None:
        """See `LLM.unload_adapter`."""


def delta_of(sample: SampleRecord, sent: Sent) -> Delta:
    """What the sample has gained since, which then counts as sent."""
    request, text = sample.request, sample.text.visible()
    start = len(request.prompt_token_ids) + sent.num_tokens
    sent.done, steps = request.finish_reason is not None, sample.take_trace()
    delta = Delta(
        index=request.sample_index,
        text=text[sent.num_chars :],
        token_ids=tuple(request.token_ids[start:]),
        logprobs=sample.logprobs_after(sent.num_tokens),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        seed=request.seed,
        stats=sample.stats() if sent.done else None,
        speedup=sample.stats().estimated_speedup if steps else None,
        steps=steps,
    )
    sent.num_chars, sent.num_tokens = len(text), request.num_output
    return delta
