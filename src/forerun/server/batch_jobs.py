"""Batches that a server was given, and the one that is answered, row by row, beside other requests.

Knows: how a batch goes on after a restart. Does not know: HTTP, how rows are answered (`batches`), files
(`batch_files`, `stored_files`).

One process, the owner (`batch_owner`), answers and writes the states. Others may use the folder with it: they read
states, add batches, and ask for the end of one by a file beside it. An owner that cannot go on lets another one try.

The folder may hang. So all that is done there, and with the states, is done by one thread, and what takes long by
another one; the event loop waits for the answers of rows, and for these threads. At the end they may hang still, and
go on later: so the lock is kept until they are through, or the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter

from forerun.errors import ConfigError, DataError, ResourceError
from forerun.server.auth import TENANT
from forerun.server.batch_files import AnswerFile, BatchInput, BatchOutput
from forerun.server.batch_job import OPEN, BatchJob
from forerun.server.batch_owner import BatchOwner
from forerun.server.batches import BatchServer, Shard, Stops, UnavailableError, answer_all, answer_row
from forerun.server.errors import ApiError
from forerun.server.folder_thread import FolderThread
from forerun.server.stored_files import FileStore, new_id, write_json

OUTPUT: Final = "batch_output"  # the purpose of what a batch writes
MAX_ROWS: Final = 50_000  # of a batch, as OpenAI has it
TRY_AGAIN_S: Final = 30.0  # after a disk was full, or the engine failed
BAD_AT_ONCE: Final = 256  # rows of which errors are written before others' calls
SAVE_S: Final = 1.0  # between two savings of a batch's counts
LOOK_S: Final = 1.0  # between two looks at what other processes have written
LEFT_S: Final = 3600.0  # since bytes of no file were written, where another process may be writing them
FAULTS: Final = (OSError, ValueError, UnavailableError)  # of a damaged file, a folder that fails, a lock that was lost
_ID: Final = re.compile(r"batch_[0-9a-f]{24}")
log = logging.getLogger("forerun.server")

_STATE: Final = TypeAdapter(BatchJob)


class _Run(NamedTuple):
    """The batch that is answered."""

    id: str
    stops: Stops


class BatchJobs:
    """The batches of a folder; one after the other is answered.

    `run` and `close` are for the event loop, everything else is for `thread`. Raises ConfigError for a folder it cannot
    use. A batch whose state is damaged is logged and left alone.
    """

    def __init__(
        self, folder: Path, files: FileStore, server: BatchServer, num_at_once: Callable[[], int], max_row_bytes: int,
        drain_s: float, deployment: str | None = None,
    ) -> None:  # fmt: skip
        """`deployment`: whose processes use the folder, and answer with the same model; None: this one does, alone."""
        self._folder, self._files, self._server = folder, files, server
        self._num_at_once, self._max_row_bytes, self._drain_s = num_at_once, max_row_bytes, drain_s
        self._jobs: dict[str, BatchJob] = {}
        self._damaged: set[str] = set()  # ids of those whose states cannot be read
        self._waited_s: dict[str, float] = {}  # when batches began to wait: others come first, then the longest
        self._running: _Run | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None  # once `run` has begun
        self.thread, self._reader = FolderThread("forerun-batches"), FolderThread("forerun-batch-rows")
        try:
            self._owner = BatchOwner(folder.parent, deployment)
            folder.mkdir(parents=True, exist_ok=True)
            if self._owner.is_shared:
                self._refresh()
            elif not self._own():
                raise ConfigError(f"another server uses {folder.parent}: give each a --batch-dir of its own")
        except OSError as error:
            raise ConfigError(f"cannot keep batches in {folder}: {error!r}; choose another folder") from error

    # -- the folder ---------------------------------------------------------------------------------------------

    def _own(self) -> bool:
        """Become the one that answers, unless it is this process already; False if another one is."""
        if self._owner.holds:
            if self._owner.is_still():
                return True
            self._pass_on()
        if not self._owner.take():
            return False
        self._jobs = {}
        self._refresh()
        if not self._damaged:  # nobody knows which files their batches write
            written = [i for j in self._jobs.values() if j.status in OPEN for i in (j.output_id, j.errors_id)]
            self._files.drop_unfinished(written, LEFT_S if self._owner.is_shared else 0.0)
        return True

    def _pass_on(self) -> None:
        """Something is wrong here: if others use the folder, one of them may answer."""
        if self._owner.is_shared:
            self._let_go()
            self._jobs = {}

    def _let_go(self) -> None:
        """Be the owner no more, once the reader, which may hang by itself, can change nothing."""
        self._reader.submit(bool).result()
        self._owner.let_go()

    def _refresh(self) -> None:
        """Learn what other processes have written; of what the owner knows, it alone writes states."""
        for path in self._folder.glob("*.json"):
            try:
                self._look(path.stem)
                self._damaged.discard(path.stem)
            except FAULTS as error:
                if path.stem not in self._damaged:
                    log.warning(
                        "a batch's state cannot be read or written", extra={"file": str(path), "why": repr(error)}
                    )
                self._damaged.add(path.stem)

    def _look(self, batch_id: str) -> BatchJob | None:
        """A batch as it is now; one that is over does not change. Raises OSError or ValueError for a damaged one."""
        path, job = self._folder / f"{batch_id}.json", self._jobs.get(batch_id)
        if job is None or (job.status in OPEN and not self._owner.holds):
            if not path.exists():
                return None
            job = _STATE.validate_json(path.read_bytes())
            if job.id != batch_id:
                raise ValueError(f"it is that of {job.id}")
            self._jobs[batch_id] = job
        if job.status in OPEN:
            asked_s = None
            with suppress(FileNotFoundError):
                asked_s = int(path.with_suffix(".cancel").stat().st_mtime)
            if asked_s is not None:
                self._cancel(job, asked_s)
        return job

    def _cancel(self, job: BatchJob, asked_s: int) -> None:
        """A client asks for its end: the owner begins no further row."""
        is_owner = self._owner.is_still()  # where this raises, nothing has changed, and the next look tries again
        was, running = job.status, self._running if self._running and self._running.id == job.id else None
        job.status, job.times["cancelling"] = "cancelling", asked_s
        if running is not None:
            self._on_loop(running.stops.soon.set)
        if was == "cancelling" or not is_owner:
            return
        if was == "validating" and running is None:
            self._end(job, "cancelled")
        else:
            self._keep(job)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call)

    # -- what clients ask ---------------------------------------------------------------------------------------

    def create(self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> BatchJob:
        """A new batch over an uploaded file. Raises ApiError if there is none."""
        tenant = TENANT.get()
        found = self._files.get(input_file_id, tenant, "input_file_id")
        if found.purpose == OUTPUT:
            raise ApiError(400, f"{input_file_id} was written by a batch; upload rows with purpose batch",
                           param="input_file_id")  # fmt: skip
        job = BatchJob(new_id("batch_"), endpoint, input_file_id, time.time(), tenant, metadata)
        try:
            self._save(job)
        except OSError as error:
            raise ApiError(500, f"the batch cannot be kept: {error.strerror or error}", code="no_room") from error
        self._jobs[job.id] = job
        self._on_loop(self._wake.set)
        return job

    def get(self, batch_id: str) -> BatchJob:
        """One batch of the request's tenant. Raises ApiError 404."""
        try:
            job = self._look(batch_id) if _ID.fullmatch(batch_id) else None
        except FAULTS as error:  # whose text may have what others wrote there
            log.warning("a batch cannot be told", extra={"batch": batch_id, "why": repr(error)})
            raise ApiError(500, f"{batch_id} cannot be read: the server's log says why", code="damaged") from error
        if job is None or job.tenant != TENANT.get():
            raise ApiError(404, f"there is no batch {batch_id[:100]!r} here", param="batch_id", code="batch_not_found")
        return job

    def all(self) -> list[BatchJob]:
        """The batches of the request's tenant, the last one first."""
        self._refresh()
        found = [job for job in self._jobs.values() if job.tenant == TENANT.get()]
        return sorted(found, key=_age, reverse=True)

    def cancel(self, batch_id: str) -> BatchJob:
        """Begin no further row of a batch. Raises ApiError if it is over."""
        job = self.get(batch_id)
        if job.status not in OPEN:
            raise ApiError(400, f"{job.id} is {job.status}: only a batch that is not over can be cancelled",
                           param="batch_id", code="batch_is_over")  # fmt: skip
        (self._folder / f"{job.id}.cancel").touch()
        return self.get(batch_id)

    def uses(self, file_id: str) -> BatchJob | None:
        """A batch that is not over and reads or writes a file."""
        self._refresh()
        of = (job for job in self._jobs.values() if job.status in OPEN)
        return next((job for job in of if file_id in (job.input_file_id, job.output_id, job.errors_id)), None)

    # -- answering ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer batches until `close`, once no other process does: the oldest first, those that had to wait last."""
        self._loop = asyncio.get_running_loop()
        try:
            while not self._closing:
                self._wake.clear()
                try:
                    job = await self.thread.do(self._next)
                    goes_on = job is None or await self._try(*job)
                except FAULTS as error:
                    log.warning("batches wait", extra={"folder": str(self._folder), "why": repr(error)})
                    job, goes_on = None, False
                if not goes_on:
                    await self.thread.do(self._pass_on)
                    await self._wait(TRY_AGAIN_S)
                elif job is None:
                    await self._wait(LOOK_S if self._owner.is_shared else None)
        finally:
            self.thread.submit(self._let_go)

    def _next(self) -> tuple[BatchJob, Stops] | None:
        """What is to be answered here, from now on."""
        if not self._own():
            return None
        self._refresh()
        left = [job for job in self._jobs.values() if job.status in OPEN]
        job = min(left, key=lambda job: (self._waited_s.get(job.id, 0.0), _age(job)), default=None)
        if job is None:
            return None
        self._running = _Run(job.id, Stops(asyncio.Event(), asyncio.Event()))
        return job, self._running.stops

    async def _wait(self, longest_s: float | None) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), longest_s)

    async def _watch(self) -> None:
        """See which ends other processes ask for."""
        while self._owner.is_shared:
            await asyncio.sleep(LOOK_S)
            with suppress(*FAULTS):
                await self.thread.do(self._refresh)

    async def _try(self, job: BatchJob, stops: Stops) -> bool:
        """Answer what is left of a batch; False if it must wait for a disk with room, or an engine that works."""
        if self._closing:
            self.close()
        TENANT.set(job.tenant)  # of the rows
        watching = asyncio.create_task(self._watch())
        try:
            try:
                await self._answer(job, stops)
            except DataError as error:
                await self.thread.do(self._end, job, "failed", str(error))
            return True
        except (UnavailableError, ResourceError, OSError) as error:
            log.warning("a batch waits", extra={"batch": job.id, "why": str(error)})
            self._waited_s[job.id] = time.monotonic()
            return False
        except Exception:
            log.exception("a batch failed", extra={"batch": job.id})
            with suppress(OSError, UnavailableError):
                await self.thread.do(self._fail, job, "the server failed while working on this batch; its log says why")
            return True
        finally:
            watching.cancel()
            self._running = None

    def close(self) -> None:
        """End the rows that run: the next start goes on with their batch."""
        self._closing = True
        self._wake.set()
        if self._running is not None:
            self._running.stops.now.set()
            self._running.stops.soon.set()

    async def _answer(self, job: BatchJob, stops: Stops) -> None:
        """Answer what is left of a batch, and close it unless it is to go on after the next start."""
        output = BatchOutput(*(AnswerFile(self._files.path(file_id)) for file_id in (job.output_id, job.errors_id)))
        rows = await self._reader.do(self._read, job, output, stops)
        if self._closing:
            return
        left, write = rows.rows(), self._writing(job, output)
        try:
            if await self.thread.do(self._begin, job, rows, output):
                for first in range(0, len(rows.bad), BAD_AT_ONCE):
                    if not stops.soon.is_set():
                        told = [bad.answer() for bad in rows.bad[first : first + BAD_AT_ONCE]]
                        await self.thread.do(write, False, *told)
                answer = partial(answer_row, self._server)
                await answer_all(answer, left, self._num_at_once, stops, self._drain_s, write, self.thread.do)
            await self.thread.do(self._finish, job, output)
        finally:
            for close in (left.close, output.close):
                self.thread.submit(close)  # not awaited: the folder may be why this ends

    def _begin(self, job: BatchJob, rows: BatchInput, output: BatchOutput) -> bool:
        """Show how much there is to do; False if its end has been asked for."""
        job.completed, job.failed = len(output.answers.ids), len(output.errors.ids)
        job.total = job.completed + job.failed + len(rows.bad) + len(rows.places)
        if job.status == "validating":
            job.enter("in_progress")
        self._keep(job)
        return job.status != "cancelling"

    def _writing(self, job: BatchJob, output: BatchOutput) -> Callable[..., None]:
        """What writes answers, of rows that succeeded or of rows that failed, and now and then the state."""
        saved_s = time.monotonic()

        def write(succeeded: bool, *told: dict[str, Any]) -> None:
            nonlocal saved_s
            file = output.file(succeeded)
            is_due = file.num_new == 0 or time.monotonic() - saved_s > SAVE_S
            if is_due:
                file.open()  # before the look: who becomes the owner after it has a copy that this adds nothing to
                self._check_owner()
            for answer in told:
                file.write(answer)
                job.completed, job.failed = job.completed + succeeded, job.failed + (not succeeded)
            if is_due:
                self._keep(job)
                saved_s = time.monotonic()

        return write

    def _finish(self, job: BatchJob, output: BatchOutput) -> None:
        """What becomes of a batch of which no further row is answered now."""
        output.close()
        if job.status == "cancelling":
            self._end(job, "cancelled")
        elif not self._closing:
            self._end(job, "completed")

    def _read(self, job: BatchJob, output: BatchOutput, stops: Stops) -> BatchInput:
        # One who had lost the lock may write for SAVE_S: not to what is read here.
        output.resume(self._check_owner if self._owner.is_shared else None)
        path, is_over = self._files.path(job.input_file_id), stops.soon.is_set
        return BatchInput.scan(path, self._max_row_bytes, Shard(), output.ids, job.endpoint, MAX_ROWS, is_over)

    def _end(self, job: BatchJob, status: str, why_failed: str | None = None) -> None:
        """Show what was written, and close the batch."""
        self._check_owner()
        job.why_failed = why_failed
        for file_id, name in ((job.output_id, "output"), (job.errors_id, "errors")):
            path = self._files.path(file_id)
            if path.exists() and path.stat().st_size == 0:  # opened for a row that was answered later
                path.unlink()
            if path.exists():
                self._files.adopt(file_id, f"{job.id}_{name}.jsonl", OUTPUT, job.tenant)
                job.written = [*{*job.written, file_id}]
        job.enter(status)
        self._keep(job)
        (self._folder / f"{job.id}.cancel").unlink(missing_ok=True)

    def _fail(self, job: BatchJob, why: str) -> None:
        job.why_failed = why
        job.enter("failed")
        self._keep(job)

    def _check_owner(self) -> None:
        if not self._owner.is_still():
            raise UnavailableError("another process answers batches now: this one had lost the lock")

    def _keep(self, job: BatchJob) -> None:
        """Write the state of the batch that is answered. Raises UnavailableError if another process answers it now."""
        self._check_owner()
        self._save(job)

    def _save(self, job: BatchJob) -> None:
        write_json(self._folder / f"{job.id}.json", asdict(job))


def _age(job: BatchJob) -> tuple[float, str]:
    return job.created_s, job.id
