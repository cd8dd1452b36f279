"""Rows of a batch answered on a Ray cluster: workers with an engine each, of which any may die at any time.

Knows: how workers begin, die and are replaced, and which of them gets a row. Does not know: files, what an answer says.

An answer depends on its row and the job's seed alone, so a row whose worker died is simply answered by another one.
Plain actors and not Ray Data: an answer is written when it is there, and a row is asked again by itself, not with its
block.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from forerun import __version__
from forerun.errors import ConfigError, ForerunError
from forerun.server.batch_engine import Answering, RowOptions, answering
from forerun.server.batches import MAX_TRIES, Answered, AnswerRow, BatchRow, UnavailableError
from forerun.server.ray_token import refused, send_token

CONNECT_S: Final = 5.0  # for the cluster's port to answer
MAX_COMPANY: Final = 2  # workers that a row may lose together with others; then it is asked alone, as it may be why
START_S: Final = 900.0  # without any worker: nodes may have to be started, models to be downloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """How many workers, and what each is given.

    None: as many as there is room for, one on each node unless CPUs or GPUs are given; and as many CPUs as the smallest
    node has, or one beside GPUs.
    """

    num_workers: int | None = None
    cpus: float | None = None
    gpus: float = 0.0


class BatchWorker:
    """An engine in a process of the cluster."""

    def __init__(self, model: str, engine: Mapping[str, Any], options: RowOptions) -> None:
        self._model, self._engine, self._options = model, engine, options
        self._stack = AsyncExitStack()  # it is never left: the process is killed
        self._answer: AnswerRow

    async def begin(self, version: str) -> None:
        """Load the model. Raises ConfigError for another release, whose texts may differ."""
        if version != __version__:
            raise ConfigError(f"a node of the cluster has forerun {__version__}, this machine {version}: install one")
        from forerun.llm import LLM

        llm = await asyncio.to_thread(LLM, self._model, **self._engine)
        self._answer = (await self._stack.enter_async_context(answering(llm, self._options))).answer

    async def answer(self, row: BatchRow) -> Answered:
        """A row's answer. Raises UnavailableError when the engine has failed."""
        return await self._answer(row)


@dataclass(slots=True, eq=False)
class _Live:
    """A worker that has loaded its model."""

    actor: Any
    num_samples: int = 0  # that it works on
    num_answered: int = 0
    alone: bool = False  # it takes no row beside one that may be why workers die
    died_alone: bool = False
    why: str = ""  # it died
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class BatchCluster:
    """The workers of a job."""

    def __init__(self, begin: Any, num_workers: int) -> None:
        """`begin` makes a worker's actor."""
        self._begin = begin
        self._live: list[_Live] = []
        self._changed = asyncio.Condition()
        self._num_kept = num_workers  # those not given up
        self._why = "no worker of the cluster began"

    async def keep(self) -> None:
        """Start all workers, and replace those that die, until this is cancelled."""
        await asyncio.gather(*[self._keep_one() for _ in range(self._num_kept)])

    async def _keep_one(self) -> None:
        """One worker after the other, until one cannot begin for a reason that the next would have, or too many die.

        Those count that do not begin, or end before an answer. Those that died alone with a row do not: the row may be
        why, and has an end of its own.
        """
        from ray.exceptions import RayError, RayTaskError

        num_failed = 0
        while num_failed < MAX_TRIES:
            actor = self._begin()
            try:
                await actor.begin.remote(__version__)
            except RayTaskError as error:
                self._why = _cause(error)
                break
            except RayError as error:  # the process or its node died
                self._why, num_failed = _cause(error), num_failed + 1
                await asyncio.sleep(num_failed)
                continue
            worker = _Live(actor)
            self._live.append(worker)
            await self._tell()
            await worker.gone.wait()
            if worker.num_answered:
                num_failed = 0
            elif not worker.died_alone:
                self._why = f"workers die before they answer a row; the last one: {worker.why}"
                num_failed += 1
        self._num_kept -= 1
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _one(self, alone: bool = False) -> _Live:
        """The worker with the least to do; `alone`: for one row, when nothing else runs there any more.

        Raises UnavailableError if there is none for long, or will be none.
        """
        while True:
            await self._some()
            free = [worker for worker in self._live if not worker.alone]
            if not free:
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._live or not all(each.alone for each in self._live))
                continue
            worker = min(free, key=lambda each: each.num_samples)
            if not alone:
                return worker
            worker.alone = True
            async with self._changed:
                while worker.num_samples and not worker.gone.is_set():
                    await self._changed.wait()
            if not worker.gone.is_set():
                return worker

    async def _some(self) -> None:
        """Wait for a worker, busy or not."""
        while not self._live:
            if self._num_kept == 0:
                raise UnavailableError(self._why)
            try:
                async with asyncio.timeout(START_S), self._changed:
                    await self._changed.wait_for(lambda: self._live or self._num_kept == 0)
            except TimeoutError as error:
                raise UnavailableError(f"{self._why} within {START_S:.0f} s: does a node have room for it?") from error

    async def begun(self) -> None:
        """Wait for the first worker. Raises UnavailableError."""
        await self._some()

    async def answer(self, row: BatchRow) -> Answered:
        """A row's answer, from whichever worker lives. Raises UnavailableError."""
        from ray.exceptions import RayError, RayTaskError

        why, num_lost = "", 0
        for _ in range(MAX_TRIES):
            alone = num_lost >= MAX_COMPANY
            worker = await self._one(alone)
            worker.num_samples += row.num_samples
            try:
                answered: Answered = await worker.actor.answer.remote(row)
                worker.num_answered += 1
                return answered
            except RayError as error:
                why = _cause(error)
                if not isinstance(error, RayTaskError) or isinstance(error.cause, UnavailableError):
                    num_lost, worker.why, worker.died_alone = num_lost + 1, why, alone
                    self._drop(worker)
            finally:
                worker.num_samples -= row.num_samples
                worker.alone = worker.alone and not alone
                await self._tell()
        told = {"code": "worker_lost", "message": f"{MAX_TRIES} workers did not answer it; the last one: {why}"}
        return False, {"id": row.answer_id, "custom_id": row.custom_id, "response": None, "error": told}

    def _drop(self, worker: _Live) -> None:
        """It takes no further row, and another one takes its place."""
        import ray

        if worker in self._live:
            self._live.remove(worker)
            worker.gone.set()
            with suppress(Exception):  # it may be dead, or its node
                ray.kill(worker.actor)


def _cause(error: Exception) -> str:
    """What went wrong in a worker, in a line."""
    cause = getattr(error, "cause", None) or error
    said = " ".join(str(cause).split())
    return said if isinstance(cause, ForerunError | UnavailableError) else f"{type(cause).__name__}: {said:.300}"


@asynccontextmanager
async def cluster_answering(
    address: str, shape: WorkerShape, model: str, engine: Mapping[str, Any], options: RowOptions
) -> AsyncIterator[Answering]:
    """A cluster as one that answers rows. Raises ConfigError if there is none at the address or it has no room."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))  # Ray prints that a node died
        ray = _connect(address)
        stack.callback(ray.shutdown)  # ends the workers, too
        num_workers, resources = _shaped(ray, shape)
        kind = ray.remote(BatchWorker).options(
            **resources, max_concurrency=options.num_at_once + 1, max_restarts=0, scheduling_strategy="SPREAD"
        )
        cluster = BatchCluster(lambda: kind.remote(model, dict(engine), options), num_workers)
        keeping = asyncio.create_task(cluster.keep())
        try:
            await cluster.begun()
            yield Answering(cluster.answer, num_workers * options.num_at_once)
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping


def _connect(address: str) -> Any:
    """The module ray, connected."""
    none = (
        f"no Ray cluster answers at {address}: start one with `ray start --head`, or give the HOST:PORT that it "
        "printed, ray://HOST:10001, or auto on one of its machines"
    )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if address != "auto":
            if not (host and port.isdecimal()):
                raise ConfigError(f"--ray must be HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{none} ({error})") from error
    send_token(address)
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f'--ray needs `pip install ".[ray]"` in the checkout of forerun, here and on every node ({error})'
        ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(refused(address, error) or f"{none} ({' '.join(str(error).split()):.300})") from error
    return ray


def _shaped(ray: Any, shape: WorkerShape) -> tuple[int, dict[str, float]]:
    """How many workers there will be, and what each asks for. Raises ConfigError if no node has it."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    able = [node for node in nodes if node.get("CPU", 0) >= 1 and node.get("GPU", 0) >= shape.gpus]
    cpus = shape.cpus or (1.0 if shape.gpus else min((node["CPU"] for node in able), default=1.0))
    room = 0
    for node in able:
        fitting = int(node["CPU"] // cpus)
        room += min(fitting, int(node["GPU"] // shape.gpus)) if shape.gpus else fitting if shape.cpus else 1
    if room == 0:
        have = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise ConfigError(
            f"no node of the cluster has {cpus:g} CPUs and {shape.gpus:g} GPUs for a worker (they have {have:.200}): "
            "ask for less with --ray-cpus and --ray-gpus"
        )
    num_workers = shape.num_workers or room
    return num_workers, {"num_cpus": cpus, "num_gpus": shape.gpus}
