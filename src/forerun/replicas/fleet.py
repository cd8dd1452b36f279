"""Several replicas as one service: requests go to one, and on to another if that one is lost.

Knows: what of an answer has arrived, what to ask for next, how often to try. Does not know: Ray, how a replica is
chosen, HTTP. A replica that goes on is told the tokens so far. It would have chosen them itself, since a token depends
on the seed, its position and the tokens before it, so that a client sees every token once and none that is not its own.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any, Final, NamedTuple

from prometheus_client import Counter

from forerun.core import RequestStats
from forerun.engine.outputs import RequestGroup
from forerun.errors import ConfigError, DeadlineError
from forerun.frontend import Frontend, NamedAdapter
from forerun.replicas.merged import labelled
from forerun.replicas.orders import Accepted, Ordered, PromptFigures, Refusal
from forerun.replicas.prefill import PromptReader
from forerun.replicas.replica import Description, Said
from forerun.replicas.transport import ReplicaLost, Replicas
from forerun.server.errors import TOO_MANY, ApiError, as_api_error, never_fits
from forerun.server.metrics import EngineLoad, Metrics
from forerun.server.settings import ServerSettings
from forerun.server.streams import Delta, Stream
from forerun.weights.tokenizer import Tokenizer

MAX_TRIES: Final = 8  # replicas that may be lost on a request, or refuse it, without bringing a token
# Replicas that may end under a request. One that brings an engine down does so again at the same place, so that the
# second is proof enough; where tokens came in between, or the request may still have waited behind others, it may be
# chance, such as nodes that are taken away.
MAX_DEATHS: Final = 2  # without a token in between, and with a seat from the start
MAX_ALL_DEATHS: Final = 5
RECOVERY_S: Final = 120.0  # for a replica to accept a request: one that died is started anew meanwhile
DESCRIBE_S: Final = 0.5  # until replicas are asked again what they are
RETRY_S: Final = 0.05  # before another replica is asked, doubled each time

log = logging.getLogger("forerun.server")


async def described_by(ask: Callable[[], Awaitable[Description | None]]) -> Description:
    """What a replica of one's own deployment is; `ask` gets None of one that is still the deployment's before."""
    while True:
        found = await ask()
        if found is not None:
            return found
        await asyncio.sleep(DESCRIBE_S)


class NamedFolder(NamedTuple):
    """A LoRA adapter that replicas have loaded."""

    name: str
    path: str


class RemoteFrontend(Frontend):
    """Prepares requests for the model of a replica."""

    def __init__(self, described: Description) -> None:
        super().__init__(described.config)
        self._described = described

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        found = pickle.loads(self._described.tokenizer)
        assert isinstance(found, Tokenizer)
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits."""
        return self._described.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens a request may have, prompt and output together."""
        return self._described.max_model_len

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's own sampling parameters."""
        return self._described.sampling_defaults

    @cached_property
    def adapters(self) -> Mapping[str, NamedAdapter]:
        """The LoRA adapters that the replicas have loaded, by name."""
        return {name: NamedFolder(name, path) for name, path in self._described.adapters.items()}


class RemoteStream:
    """One request on its way through replicas, from now on until its end."""

    def __init__(self, fleet: Fleet, ordered: Ordered) -> None:
        self._fleet = fleet
        self._ordered = ordered
        self._avoid: list[str] = []
        self._num_tries = 0  # that failed since the last token
        self._num_deaths = 0  # of replicas that computed it, among them
        self._num_all_deaths = 0
        self._num_steps: dict[int, int] = {}  # by sample
        self._lost_steps: dict[int, int] = {}  # of those, on replicas that were lost
        self._first_s: dict[int, float] = {}  # when a sample's first tokens came
        self._arrived: asyncio.Queue[list[Delta] | ApiError] = asyncio.Queue()
        self.num_samples = len(ordered.written)
        self.task = asyncio.create_task(self._read())

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New pieces of all samples until each has ended; raises ApiError if the request fails."""
        left = {sample.request.sample_index for sample in self._ordered.group.samples}
        while left:
            item = await self._arrived.get()
            if isinstance(item, ApiError):
                raise item
            left -= {delta.index for delta in item if delta.finish_reason is not None}
            yield item

    async def _read(self) -> None:
        """From one replica after the other, until all samples have ended or there is an error."""
        reader = self._fleet.reader
        try:
            if reader is not None:
                await reader.read(self._ordered, self._fleet.kind, self._left_s())
            while self._ordered.written:
                try:
                    async for deltas in self._one_replica():
                        self._num_tries = self._num_deaths = 0
                        self._arrived.put_nowait(deltas)
                except ReplicaLost as error:
                    if self._ordered.written:  # else it was lost behind the end
                        await self._lost(error)
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a request to replicas failed")
            self._arrived.put_nowait(as_api_error(error))

    async def _one_replica(self) -> AsyncIterator[list[Delta]]:
        """What one replica brings. Raises ReplicaLost if it ends before the answer does."""
        accepted: Accepted | None = None
        order = self._ordered.order(self._avoid, self._fleet.kind)
        try:
            async with aclosing(self._fleet.replicas.run(order)) as said:  # type: ignore[type-var]
                accepted = await self._accepted(said)
                async for each in said:
                    match each:
                        case Refusal():
                            self._refuse(each)
                        case PromptFigures():
                            self._ordered.group.samples[0].prompt_logprobs = each.logprobs
                        case list():
                            accepted = accepted._replace(waits=False)
                            yield [self._take(delta) for delta in each]
            if self._ordered.written:
                raise ReplicaLost("it ended in the middle of an answer")
        except ReplicaLost as error:
            error.accepted = accepted
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the client has left, or this process ends
                raise
            lost = ReplicaLost("its answer was given up on the way")
            lost.accepted = accepted
            raise lost from None

    async def _accepted(self, said: AsyncIterator[Said]) -> Accepted:
        """What the replica said that took the order."""
        try:
            first = await asyncio.wait_for(anext(said, None), min(RECOVERY_S, self._left_s()))
        except TimeoutError:
            self._check_deadline()
            raise _lost_for_good() from None
        if not isinstance(first, Accepted):
            raise ReplicaLost("it did not take the order")
        if self._fleet.reader is not None:
            self._fleet.reader.known(self._ordered)
        return first

    def _left_s(self) -> float:
        """Until the request's deadline."""
        deadline_s = self._ordered.group.samples[0].request.deadline_s
        return inf if deadline_s is None else deadline_s - perf_counter()

    def _check_deadline(self) -> None:
        """Raise ApiError 504 behind it."""
        if self._left_s() <= 0:
            raise as_api_error(DeadlineError("no replica could go on with the request before its deadline"))

    def _refuse(self, refusal: Refusal) -> None:
        """Raise what the replica said; ReplicaLost if another may do better."""
        if refusal.status in (429, 503) or refusal.code in ("engine_error", TOO_MANY):
            raise ReplicaLost(refusal.message, refusal)
        raise refusal.error()

    def _take(self, delta: Delta) -> Delta:
        """Count what has arrived."""
        self._num_steps[delta.index] = self._num_steps.get(delta.index, 0) + 1
        self._first_s.setdefault(delta.index, perf_counter())
        if delta.finish_reason is None:
            self._ordered.written[delta.index] += delta.token_ids
        else:
            answer = self._ordered.written.pop(delta.index) + delta.token_ids
            if self._fleet.reader is not None:
                self._fleet.reader.known(self._ordered, answer)
        steps = tuple(step._replace(time_s=perf_counter()) for step in delta.steps)  # on this process's clock
        stats = delta.stats and self._whole(delta.index, delta.stats)
        return replace(delta, stats=stats, steps=steps) if stats or steps else delta

    def _whole(self, index: int, stats: RequestStats) -> RequestStats:
        """A replica's figures of a sample's end, made those of the whole sample where others had begun it."""
        if not stats.num_elsewhere:
            return stats
        sample, first_s = self._ordered.group.samples[0], self._first_s[index]
        ttft_s = first_s - (sample.request.arrival_s or sample.arrival_s)
        return replace(
            stats, num_elsewhere=0, num_steps=stats.num_steps + self._lost_steps.get(index, 0), ttft_s=ttft_s,
            queue_s=ttft_s, decode_s=perf_counter() - first_s,  # at most so long: the first replica's own is lost
        )  # fmt: skip

    async def _lost(self, error: ReplicaLost) -> None:
        """Wait a little before another replica is asked; raises ApiError if none is to be."""
        request_id = self._ordered.group.request_id
        accepted = error.accepted or Accepted("")
        log.warning("a replica was lost", extra={"request": request_id, "replica": accepted.replica, "why": str(error)})
        if accepted.replica and accepted.replica not in self._avoid:
            self._avoid.append(accepted.replica)
        self._num_tries += 1
        self._num_deaths += error.died and not accepted.waits
        self._num_all_deaths += error.died
        enough = self._num_deaths >= MAX_DEATHS or self._num_all_deaths >= MAX_ALL_DEATHS
        if not self._fleet.failover or enough or self._num_tries >= MAX_TRIES:
            raise _lost_for_good() if error.refusal is None else error.refusal.error()
        self._lost_steps = dict(self._num_steps)
        self._fleet.moved.inc()
        await asyncio.sleep(min(RETRY_S * 2 ** (self._num_tries - 1), max(0.0, self._left_s())))
        self._check_deadline()


def _lost_for_good() -> ApiError:
    return ApiError(
        503, "the replica that answered was lost, and no other could go on: try again", code="replica_lost",
        headers={"Retry-After": "5"},
    )  # fmt: skip


class Fleet:
    """The service in front of replicas of one model. Raises ConfigError for what would make their tokens differ."""

    def __init__(
        self, replicas: Replicas, described: Description, settings: ServerSettings, failover: bool = True,
        reader: PromptReader | None = None,
    ) -> None:  # fmt: skip
        """`reader`: who reads long prompts before one of the replicas answers; None: nobody."""
        if described.config.verification != "coupled":
            raise ConfigError(
                f"with verification {described.config.verification} answers depend on drafts, so that no other replica "
                "could go on with them: replicas need coupled"
            )
        self.replicas, self.reader = replicas, reader
        self.kind = described.kind
        self.failover = failover
        self.metrics = Metrics(self.load)
        self.moved = Counter(
            "forerun_moved_requests", "Times a request went on at another replica.", registry=self.metrics.registry
        )
        if reader is not None:
            self.metrics.registry.register(reader.prompts)
        self._num_seats = described.config.max_num_seqs  # of a replica
        self._room = self._num_seats + settings.max_queue  # samples of one
        self._most = self._room  # of as many replicas as there have been
        self._num_open = 0
        self._closing = False

    def start(self) -> None:
        """Nothing is to be started here."""

    def stop(self) -> None:
        """Take no more requests. Those that run have been waited for: the deployment drains before it ends this."""
        self._closing = True

    @property
    def healthy(self) -> bool:
        """Whether some replica can answer."""
        return not self._closing and any(load.healthy for load in self.replicas.loads().values())

    @property
    def num_seats(self) -> int:
        """Samples that are computed at the same time, at most."""
        return self._num_seats * max(1, len(self.replicas.loads()))

    def load(self) -> EngineLoad:
        """What all of them have to do; of the KV cache the mean share."""
        loads = list(self.replicas.loads().values())
        names = {name for load in loads for name in load.drafters}
        phases = {name for load in loads for name in load.phase_s}
        return EngineLoad(
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            kv_used=sum(load.kv_used for load in loads) / max(1, len(loads)),
            healthy=self.healthy,
            phase_s={name: sum(load.phase_s.get(name, 0.0) for load in loads) for name in sorted(phases)},
            num_steps=sum(load.num_steps for load in loads),
            drafters={
                name: (
                    sum(load.drafters[name][0] for load in loads if name in load.drafters),
                    max(load.drafters[name][1] for load in loads if name in load.drafters),
                )
                for name in sorted(names)
            },
        )

    async def metrics_text(self) -> bytes:
        """The metrics of this process, then those of each replica, with its name as a label."""
        several = [self.replicas, *([] if self.reader is None else [self.reader.replicas])]
        texts = await asyncio.gather(*[replicas.metrics_texts() for replicas in several])
        return self.metrics.text() + labelled({name: text for each in texts for name, text in each.items()})

    def check_room(self, num_samples: int) -> None:
        """Raise ApiError 429 if `num_samples` more overfill all queues now, 400 if always; 503 without a replica."""
        if self._closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        loads = self.replicas.loads()
        if not any(load.healthy for load in loads.values()):
            raise ApiError(503, "no replica can answer now; try again", headers={"Retry-After": "5"})
        most = self._room * len(loads)
        self._most = max(self._most, most)
        if num_samples > self._most:
            raise never_fits(num_samples, self._most)
        num_open = max(self._num_open, sum(load.num_running + load.num_waiting for load in loads.values()))
        if num_open + num_samples > most:
            raise ApiError(
                429, f"{num_open} requests run or wait, as many as {len(loads)} replicas take; try again",
                code="queue_full", headers={"Retry-After": "1"},
            )  # fmt: skip

    def submit(self, group: RequestGroup, constrained: bool = False) -> RemoteStream:
        """A stream that begins when it is read; raises ApiError 429 if there is no room now, 400 if there never is."""
        if len(group.samples) > self._room:
            raise never_fits(len(group.samples), self._room)
        self.check_room(len(group.samples))
        stream = RemoteStream(self, Ordered(group, constrained))
        self._num_open += stream.num_samples
        stream.task.add_done_callback(lambda _: self._ended(stream.num_samples))
        return stream

    def _ended(self, num_samples: int) -> None:
        self._num_open -= num_samples

    def abort(self, stream: Stream) -> None:
        """End a request whose client is gone, if it still runs: its replica hears of it at once."""
        assert isinstance(stream, RemoteStream)
        stream.task.cancel()

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Not offered: every replica would have to."""
        raise ApiError(
            403, "replicas load their adapters when they start: name them in the deployment's engine options"
        )

    async def unload_adapter(self, name: str) -> None:
        """Not offered, either."""
        await self.load_adapter(name, "", False)
