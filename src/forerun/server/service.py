"""The engine on a thread of its own, and the streams that carry its results to asyncio.

Knows: commands in, deltas out, how full the queue is, what happens when a step fails. Does not know: HTTP,
JSON, chat. Only the engine's thread touches the engine; the event loop sends commands and reads queues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import NamedTuple

from forerun.cache.lower import LowerTiers
from forerun.engine.outputs import RequestGroup
from forerun.errors import RankLost
from forerun.llm import LLM
from forerun.server.errors import ApiError, as_api_error, never_fits
from forerun.server.metrics import EngineLoad, Metrics
from forerun.server.settings import ServerSettings
from forerun.server.streams import Delta, Sent, Stream, delta_of

MAX_FAILURES = 3  # steps failed in a row after which the server calls itself unhealthy
_REASONS = {499: "abort", 503: "abort", 504: "deadline"}  # how metrics count samples with this error; else "error"
_RISE = 0.1  # weight of a new sample in the running mean of their times

log = logging.getLogger("forerun.server")
Command = Callable[[], None]


@dataclass(slots=True, eq=False)
class TokenStream:
    """One request on its way: iterate for deltas; leaving early must be followed by `EngineService.abort`."""

    group: RequestGroup
    loop: asyncio.AbstractEventLoop
    constrained: bool
    sent: list[Sent]
    num_open: int = field(init=False)  # samples whose end has not been sent; the engine's thread only
    started: float = field(default_factory=perf_counter)
    arrived: asyncio.Queue[list[Delta] | ApiError] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.num_open = len(self.group.samples)

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""
        return self.group.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return self.group.samples[0].request.prompt_token_ids

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New pieces of all samples until each has ended; raises ApiError if the request fails."""
        left = {sample.request.sample_index for sample in self.group.samples}
        while left:
            item = await self.arrived.get()
            if isinstance(item, ApiError):
                raise item
            left -= {delta.index for delta in item if delta.finish_reason is not None}
            yield item


class _Parcel(NamedTuple):
    """Something on its way from the engine's thread to the event loop."""

    stream: TokenStream
    item: list[Delta] | ApiError
    num_done: int  # samples that have ended with it


class EngineService:
    """Runs an LLM for many clients at once."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = Metrics(self.load)
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._streams: dict[str, TokenStream] = {}  # the engine's thread only
        self._outbox: list[_Parcel] = []  # likewise
        self._undelivered: Callable[[], None] | None = None  # likewise: delivers the results of the last step
        if llm.engine.kv_cache.device.type != "cpu":
            self.deliver_meanwhile()
        self._num_open = 0  # samples accepted and not ended; the event loop only
        self._usual_s = 1.0  # time a sample takes
        self._failures = 0
        self._why_down = "the engine has stopped working; see /health"
        self._step_began: float | None = None  # None: none is under way
        self._closing = False  # nothing more is taken
        llm.on_rank_lost(self._lose)
        self._stopping = self._ended = False  # the latter: the thread takes no more commands
        self._thread = Thread(target=self._run, name="forerun-engine", daemon=True)

    def deliver_meanwhile(self) -> None:
        """Deliver a step's results while the next step computes, if there is one: a GPU leaves the CPU free."""
        self.llm.engine.meanwhile = self._deliver_last

    # -- the event loop's side ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more requests, end all with an error, and stop the thread; returns when it has stopped."""
        self._closing = True
        self._commands.put(self._stop)
        self._thread.join()

    def _lose(self, error: RankLost) -> None:
        """Another rank of the model is lost: requests end with an error, and the server is unhealthy for good."""
        self._failures, self._why_down = MAX_FAILURES, str(error)
        answer = ApiError(503, str(error), code="rank_lost")
        self._commands.put(lambda: self._fail(list(self._streams.values()), answer))

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs and its last steps did not all fail."""
        return self._thread.is_alive() and self._failures < MAX_FAILURES

    @property
    def num_seats(self) -> int:
        """Samples that are computed at the same time, at most."""
        return self.llm.engine.scheduler.limits.max_num_seqs  # fewer than asked for where recurrent states need room

    @property
    def step_s(self) -> float:
        """How long the step under way has taken; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    @property
    def _lower(self) -> LowerTiers | None:
        return None if (cache := self.llm.engine.scheduler.prefix_cache) is None else cache.lower

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        scheduler, cache, timings = self.llm.engine.scheduler, self.llm.engine.kv_cache, self.llm.timings
        num_steps, lower = int(timings.pop("steps")), self._lower
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_used=scheduler.pool.num_used / max(1, cache.num_blocks),
            healthy=self.healthy,
            phase_s={name.removesuffix("_s"): seconds for name, seconds in timings.items()},
            num_steps=num_steps,
            drafters={n: (h.num_errors, h.rest_s) for n, h in self.llm.drafter_health().items() if n != "none"},
            tiers={} if lower is None else lower.counts(),
            num_tier_hits=0 if lower is None else lower.num_hits,
        )

    async def metrics_text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return await asyncio.to_thread(self.metrics.text)

    def num_behind(self, num_samples: int) -> int:
        """How many would wait for a seat with `num_samples` more."""
        return max(0, self._num_open + num_samples - self.num_seats)

    def check_room(self, num_samples: int) -> None:
        """Raise ApiError 429 if `num_samples` more would overfill the queue now, 400 if always, 503 if it is down."""
        if self._closing:
            raise _shutting_down()
        if not self.healthy:
            raise ApiError(503, self._why_down, headers={"Retry-After": "30"})
        if num_samples > (most := self.num_seats + self.settings.max_queue):
            raise never_fits(num_samples, most)
        if (behind := self.num_behind(num_samples)) > self.settings.max_queue:
            wait_s = ceil(max(1.0, self._usual_s * behind / self.num_seats))
            raise ApiError(
                429,
                f"{self._num_open} requests run or wait, as many as this server takes; try again in {wait_s} s",
                code="queue_full",
                headers={"Retry-After": str(wait_s)},
            )

    def submit(self, group: RequestGroup, constrained: bool = False) -> TokenStream:
        """Hand a prepared request to the engine; raises ApiError 429 if there is no room."""
        self.check_room(len(group.samples))
        for sample in group.samples if self.settings.prefill_only else ():
            sample.request.max_len = min(sample.request.max_len, len(sample.request.token_ids) + 1)
        sent = [
            Sent(len(sample.text.visible()), sample.num_elsewhere) if sample.num_elsewhere else Sent()
            for sample in group.samples
        ]
        stream = TokenStream(group, asyncio.get_running_loop(), constrained, sent)
        self._num_open += len(group.samples)
        self._commands.put(lambda: self._begin(stream))
        if self._ended:  # the thread may have ended before it saw the command
            raise _shutting_down()
        return stream

    async def between_steps(self, work: Callable[[], None]) -> None:
        """Run something on the engine's thread; raises what it raises, and ApiError 503 if the engine is down."""
        self.check_room(0)
        done: Future[None] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    work()
                    done.set_result(None)
                except Exception as error:
                    done.set_exception(error)
                except BaseException as error:  # libraries may panic with one; it would end the event loop
                    log.exception("work between two steps failed")
                    done.set_exception(RuntimeError(str(error)))

        self._commands.put(run)
        if self._ended and not done.done():
            raise _shutting_down()
        await asyncio.wrap_future(done)

    async def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """See `LLM.load_adapter`; between two steps."""
        await self.between_steps(lambda: self.llm.load_adapter(name, path, in_place))

    async def unload_adapter(self, name: str) -> None:
        """See `LLM.unload_adapter`; between two steps."""
        await self.between_steps(lambda: self.llm.unload_adapter(name))

    def abort(self, stream: Stream) -> None:
        """End a request whose client is gone, if it still runs; its blocks are freed before the next step."""
        assert isinstance(stream, TokenStream)
        self._commands.put(lambda: self._drop(stream))

    # -- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except BaseException as error:  # libraries may panic with one; clients must never wait forever
                self._recover(error)
        self._ended = True
        self._refuse_late()

    def _turn(self) -> None:
        """Do what there is to do now; wait if there is nothing."""
        self._take_commands()
        self._dispatch()
        if self._streams and not self._stopping:
            self._advance()
            self._dispatch()

    def _take_commands(self) -> None:
        """Run all waiting commands; if there is nothing to compute, wait for one."""
        try:
            command = self._commands.get(block=not self._streams)
            while True:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return

    def _stop(self) -> None:
        self._stopping = True
        self._deliver_last()  # finished requests still get their answer
        self._fail(list(self._streams.values()), _shutting_down())

    def _refuse_late(self) -> None:
        """Refuse requests that arrived while the thread was ending."""
        while not self._commands.empty():
            self._survives(self._commands.get())
        self._survives(lambda: self._fail(list(self._streams.values()), _shutting_down()))
        self._dispatch()

    def _begin(self, stream: TokenStream) -> None:
        self._streams[stream.request_id] = stream
        try:
            self.llm.start(stream.group)
        except Exception as error:
            log.exception("request failed to start", extra={"engine_request": stream.request_id})
            self._fail([stream], as_api_error(error))

    def _drop(self, stream: TokenStream) -> None:
        if stream.request_id in self._streams:
            self._fail([stream], ApiError(499, "the client went away"))

    def _fail(self, streams: Sequence[TokenStream], error: ApiError) -> None:
        """End these with an error and free what they hold."""
        for stream in streams:
            del self._streams[stream.request_id]
            self._send(stream, error, stream.num_open)  # first, so that clients are told even if the engine is broken
            reason = _REASONS.get(error.status_code, "error")
            for sample, sent in zip(stream.group.samples, stream.sent, strict=True):
                if not sent.done:
                    self.metrics.sample_finished(sample.stats(), reason)
            self.llm.abort(stream.request_id)

    def _advance(self) -> None:
        """One step of the engine; its results go to all streams."""
        if self._undelivered is not None and not self.llm.engine.has_work:  # the rest was aborted meanwhile
            self._deliver_last()
            return
        self._step_began = perf_counter()
        try:
            changed = self.llm.step()
            if self.settings.prefill_only and self._lower is not None:  # part of the step: a folder may hang
                self._lower.hand_over([sample.request for group in changed for sample in group.samples])
        finally:
            self._step_began = None
        self._undelivered = partial(self._deliver, changed)
        engine, failed = self.llm.engine, any(s.request.error is not None for group in changed for s in group.samples)
        if engine.meanwhile is None or not engine.has_work or failed:  # failed ones must be aborted now, between steps
            self._deliver_last()
        self._failures = 0

    def _deliver_last(self) -> None:
        """Deliver and send the results of the last step, if that has not been done."""
        deliver, self._undelivered = self._undelivered, None
        if deliver is not None:
            deliver()
            self._dispatch()

    def _recover(self, error: BaseException) -> None:
        """A step failed: its requests get an error, their blocks are freed, and the engine is clean again."""
        self._failures += 1
        self.metrics.errors.inc()
        log.error("a step of the engine failed", exc_info=None if isinstance(error, RankLost) else error)
        answer = ApiError(500, "the engine failed on a step this request was part of", code="engine_error")
        if isinstance(error, RankLost):  # the server ends with it, and prints it last
            self._why_down, answer = str(error), ApiError(503, str(error), code="rank_lost")
        clean = [self._survives(self._deliver_last)]
        clean += [self._survives(partial(self._fail, [stream], answer)) for stream in list(self._streams.values())]
        if not all([*clean, self._survives(self.llm.engine.scheduler.check_integrity)]):
            self._failures = MAX_FAILURES
        self._survives(self._dispatch)

    def _survives(self, cleaning: Command) -> bool:
        """Run `cleaning`; returns whether it succeeded."""
        try:
            cleaning()
        except BaseException:
            log.exception("the engine cannot be cleaned up")
            return False
        return True

    def _deliver(self, changed: Sequence[RequestGroup]) -> None:
        for group in changed:
            stream = self._streams.get(group.request_id)
            if stream is not None:
                self._deliver_one(stream)

    def _deliver_one(self, stream: TokenStream) -> None:
        error = next((s.request.error for s in stream.group.samples if s.request.error is not None), None)
        if error is not None:
            self._fail([stream], as_api_error(error, stream.constrained))
            return
        deltas, num_done = [], 0
        for sample, sent in zip(stream.group.samples, stream.sent, strict=True):
            if not sent.done and sample.request.num_output > sent.num_tokens:
                deltas.append(delta_of(sample, sent))
                num_done += sent.done
                self._count(deltas[-1])
        if stream.group.finished:
            del self._streams[stream.request_id]
            self._usual_s += _RISE * (perf_counter() - stream.started - self._usual_s)
        self._send(stream, deltas, num_done)

    def _count(self, delta: Delta) -> None:
        if delta.stats is not None and delta.finish_reason is not None:
            self.metrics.sample_finished(delta.stats, delta.finish_reason)

    def _send(self, stream: TokenStream, item: list[Delta] | ApiError, num_done: int) -> None:
        stream.num_open -= num_done
        self._outbox.append(_Parcel(stream, item, num_done))

    def _dispatch(self) -> None:
        """Hand over everything at once: waking the event loop takes longer than most of its work."""
        parcels, self._outbox = self._outbox, []
        for loop in {parcel.stream.loop for parcel in parcels}:
            own = [parcel for parcel in parcels if parcel.stream.loop is loop]
            try:
                loop.call_soon_threadsafe(self._arrive, own)
            except RuntimeError:  # the event loop has ended, and the waiting tasks with it
                log.debug("clients' event loop is closed")

    def _arrive(self, parcels: Sequence[_Parcel]) -> None:
        """Runs on the event loop: put items into their streams."""
        for stream, item, num_done in parcels:
            self._num_open -= num_done
            stream.arrived.put_nowait(item)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")
