"""Sends conversations to a server at Poisson times or a fixed number at once, and keeps the outcome of each request.

Knows: arrivals, concurrency, turns that wait for the answer before. Does not know: HTTP, bodies beyond `Conversation`,
figures. The clock is the running event loop's, so a test may bring its own.

A request's times count from when it was due, not from when this program got around to sending it: otherwise a slow
server would delay requests and look fast (coordinated omission).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Protocol

from forerun.bench.serve_client import RequestOutcome
from forerun.bench.serve_events import AnswerError
from forerun.bench.serve_workload import Ask, Conversation, Lengths, Prefixes, RequestFields, Scale, synthetic
from forerun.errors import ConfigError

PROBE_WORDS = (8, 136)  # of the two texts that measure tokens per word
Advance = Callable[[int], None]


class Sender(Protocol):
    """Sends requests; `Client`, or a test's."""

    async def __call__(self, ask: Ask, arrived_s: float) -> RequestOutcome:
        """The outcome of a request that was due at `arrived_s`."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """When requests are sent: `rate` conversations a second at random times, or whenever one of `concurrency` ends."""

    concurrency: int | None
    rate: float | None
    seed: int

    def __post_init__(self) -> None:
        """Raises ConfigError for a load that never comes or never waits."""
        if self.rate is None and self.concurrency is None:
            raise ConfigError("neither a rate nor a concurrency was given: give one of them or both")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"--rate must be above 0, got {self.rate:g}")


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which a Poisson process of `rate` a second has its events, the first at 0."""
    random = Random(f"{seed}/arrivals")
    return list(accumulate((random.expovariate(rate) for _ in range(count - 1)), initial=0.0))[:count]


class LoadRun:
    """One load on one server."""

    def __init__(self, send: Sender, fields: RequestFields, advance: Advance = lambda num: None) -> None:
        """`advance` is called with the number of requests that have just ended."""
        self._send = send
        self._fields = fields
        self._advance = advance

    async def __call__(self, conversations: Sequence[Conversation], load: OfferedLoad) -> list[RequestOutcome]:
        """All requests' outcomes, in the order of the conversations and their turns."""
        if load.rate is None:
            answered = await self._closed(conversations, load.concurrency or 1)
        else:
            answered = await self._open(conversations, load)
        return [outcome for outcomes in answered for outcome in outcomes]

    async def _closed(self, conversations: Sequence[Conversation], concurrency: int) -> list[list[RequestOutcome]]:
        """A fixed number of users, each sending its next request as soon as it is answered."""
        clock, todo = asyncio.get_running_loop().time, iter(enumerate(conversations))
        answered: list[list[RequestOutcome]] = [[] for _ in conversations]

        async def user() -> None:
            for index, conversation in todo:
                answered[index] = await self._converse(index, conversation, clock())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(concurrency, len(conversations))):
                users.create_task(user())
        return answered

    async def _open(self, conversations: Sequence[Conversation], load: OfferedLoad) -> list[list[RequestOutcome]]:
        """Users that arrive whether or not others have been answered."""
        clock = asyncio.get_running_loop().time
        assert load.rate is not None
        room: AbstractAsyncContextManager[None] = (
            nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
        )

        async def user(index: int, conversation: Conversation, due_s: float) -> list[RequestOutcome]:
            await asyncio.sleep(due_s - clock())
            async with room:
                return await self._converse(index, conversation, due_s)

        start_s, times = clock(), arrival_times(len(conversations), load.rate, load.seed)
        pairs = enumerate(zip(conversations, times, strict=True))
        return list(await asyncio.gather(*(user(i, talk, start_s + time_s) for i, (talk, time_s) in pairs)))

    async def _converse(self, index: int, conversation: Conversation, due_s: float) -> list[RequestOutcome]:
        """Turn after turn; turns after a failed one are not sent."""
        outcomes: list[RequestOutcome] = []
        for _ in conversation.turns:
            if outcomes and outcomes[-1].error is not None:
                outcomes.append(_not_asked(outcomes[-1].ended_s))
            else:
                ask = conversation.ask([outcome.text for outcome in outcomes], self._fields.body(index))
                outcomes.append(await self._send(ask, outcomes[-1].ended_s if outcomes else due_s))
            self._advance(1)
        return outcomes


def _not_asked(now_s: float) -> RequestOutcome:
    error = AnswerError("not asked", "an earlier turn of the conversation failed")
    return RequestOutcome(now_s, now_s, now_s, error=error)


async def warm_up(send: Sender, fields: RequestFields, count: int, concurrency: int, endpoint: str) -> None:
    """`count` requests that are not measured, with texts of their own. Raises ConfigError if one fails."""
    own = f"{fields.seed}/warm-up"
    talks = synthetic(count, Lengths(32), Prefixes(), Scale(), Random(own).getrandbits(32), endpoint)
    for outcome in await LoadRun(send, fields)(talks, OfferedLoad(concurrency, None, fields.seed)):
        _check(outcome, "a warm-up request")


async def measure_scale(send: Sender, fields: RequestFields, endpoint: str) -> Scale:
    """Tokens per word on this server, from its counts for two prompts; assumed if it does not report them.

    Raises ConfigError if it does not answer.
    """
    short = RequestFields(fields.model, 1, 0.0, fields.seed, fields.usage, fields.extra)
    points = []
    for num_words in PROBE_WORDS:
        (probe,) = synthetic(1, Lengths(num_words), Prefixes(), Scale(), fields.seed - num_words, endpoint)
        (outcome,) = await LoadRun(send, short)([probe], OfferedLoad(1, None, fields.seed))
        _check(outcome, "the request that measures how long words are")
        points.append((num_words, outcome.num_prompt_tokens))
    (short_words, short_tokens), (long_words, long_tokens) = points
    if short_tokens is None or long_tokens is None:
        return Scale()
    return Scale.through((short_words, short_tokens), (long_words, long_tokens))


def _check(outcome: RequestOutcome, what: str) -> None:
    if outcome.error is not None:
        raise ConfigError(f"{what} failed, so nothing was measured: {outcome.error}")
