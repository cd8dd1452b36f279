"""Whose a folder of batches is: one server or deployment, and of its processes one at a time."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
from collections.abc import Callable
from errno import EIO, ENOLCK, ENOSYS, ESTALE
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.errors import ConfigError
from forerun.server import batch_jobs
from forerun.server.batch_job import BatchJob
from forerun.server.batch_jobs import BatchJobs
from forerun.server.batch_owner import BatchOwner
from forerun.server.batches import BatchServer
from forerun.server.errors import ApiError
from forerun.server.stored_files import FileStore
from tests.server.test_batches import CHAT, answering, chat_row

ROW_S = 0.01  # for an answer


def jobs(folder: Path, deployment: str | None) -> BatchJobs:
    app, sent = answering(200)

    async def slow_app(*given: Any) -> None:
        await asyncio.sleep(ROW_S)
        await app(*given)

    files = FileStore(folder / "files", 1 << 20)
    made = BatchJobs(folder / "batches", files, BatchServer(slow_app, lambda: True), lambda: 4, 1000, 1.0, deployment)
    made.sent = sent  # type: ignore[attr-defined]
    return made


async def started(by: BatchJobs, num_rows: int, num_bad: int = 0) -> BatchJob:
    given = "".join(json.dumps(chat_row(f"c{i}", "Hello")) + "\n" for i in range(num_rows)).encode() + b"x\n" * num_bad
    kept = await by.thread.answer_by_steps(by._files.add(io.BytesIO(given), len(given), "in.jsonl", "batch", ""))
    return await by.thread.do(by.create, CHAT, kept.id, None)


async def over(by: BatchJobs, batch_id: str, status: str = "completed") -> BatchJob:
    async with asyncio.timeout(20):
        while (job := await by.thread.do(by.get, batch_id)).status != status:
            await asyncio.sleep(ROW_S / 4)
    return job


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(ROW_S / 4)


def test_one_process_of_a_deployment_is_the_owner(tmp_path: Path) -> None:
    one, other = (BatchOwner(tmp_path, "chat") for _ in range(2))
    assert one.take() and one.is_still() and not other.take() and not other.is_still()
    one.let_go()
    assert not one.is_still() and other.take() and other.is_still() and not one.take()


def test_an_owner_whose_lock_another_one_got_knows_it(tmp_path: Path) -> None:
    """As where the server of a network file system takes it back from a process that it cannot reach."""
    one, other = (BatchOwner(tmp_path, "chat") for _ in range(2))
    assert one.take()
    (tmp_path / "in-use.lock").unlink()
    assert other.take() and other.is_still() and not one.is_still()


def test_a_lock_that_could_not_be_given_back_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system no longer knows it; the next `take` asks for a new one."""
    one, other = (BatchOwner(tmp_path, "chat") for _ in range(2))
    assert one.take()
    unlocking = fcntl.flock

    def flock(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(EIO, "Input/output error")
        unlocking(file, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        one.let_go()
        assert not one.holds and not other.take()
        with pytest.raises(OSError, match="Input/output"):
            one.take()
        assert not one.holds and not one.is_still()
    assert one.take() and one.is_still() and not other.take()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        one.let_go()
    (tmp_path / "in-use.lock").unlink()  # the system gives it to another one
    assert other.take() and not one.take() and other.is_still()


@pytest.mark.parametrize("num_left", [120, 24])
def test_no_row_is_answered_twice_when_the_lock_goes_to_another_one(
    num_left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that had it looks for its name every SAVE_S only; with few rows left the batch is over before."""
    monkeypatch.setattr(batch_jobs, "LOOK_S", 0.01)

    async def lose() -> None:
        one, other = (jobs(tmp_path, "chat") for _ in range(2))
        made, num_rows = await started(one, 40 + num_left), 40 + num_left
        running = [asyncio.create_task(one.run())]
        await until(lambda: one._owner.holds)  # or the other one may be first, and the batch is never `one`'s
        running.append(asyncio.create_task(other.run()))
        await until(lambda: one._jobs[made.id].completed >= 40)
        (tmp_path / "in-use.lock").unlink()
        said = await over(other, made.id)
        await until(lambda: one._running is None)
        lines = other._files.path(said.output_id).read_bytes().splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"c{i}" for i in range(num_rows))
        assert (said.completed, said.failed, said.total) == (num_rows, 0, num_rows)
        assert len(one.sent) + len(other.sent) > num_rows + 8  # type: ignore[attr-defined] # both were at work
        for each in (one, other):
            each.close()
        await asyncio.gather(*running)
        assert not list((tmp_path / "files").glob("*.new"))

    asyncio.run(lose())


def test_no_row_is_written_twice_when_the_lock_is_lost_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for one's name and the writing."""
    looked, goes_on, looks = Event(), Event(), count()

    async def lose() -> None:
        one, other = (jobs(tmp_path, "chat") for _ in range(2))
        made, check = await started(one, 12), one._check_owner

        def then_lose() -> None:
            check()
            if next(looks) == 1:  # the first one is for the state
                looked.set()
                assert goes_on.wait(30)

        monkeypatch.setattr(one, "_check_owner", then_lose)
        running = [asyncio.create_task(one.run())]
        assert await asyncio.to_thread(looked.wait, 30)
        (tmp_path / "in-use.lock").unlink()
        running.append(asyncio.create_task(other.run()))
        await until(lambda: bool(other.sent))  # type: ignore[attr-defined] # it has read what was there
        goes_on.set()
        said = await over(other, made.id)
        await until(lambda: one._running is None)
        lines = other._files.path(said.output_id).read_bytes().splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"c{i}" for i in range(12))
        assert one.sent  # type: ignore[attr-defined]
        for each in (one, other):
            each.close()
        await asyncio.gather(*running)

    asyncio.run(lose())


def test_a_cancel_is_not_lost_when_the_folder_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_jobs, "LOOK_S", 0.05)

    async def cancel() -> None:
        owner = jobs(tmp_path, "chat")
        made = await started(owner, 400)
        running = asyncio.create_task(owner.run())
        await until(lambda: owner._jobs[made.id].completed > 0)
        is_still, failures = owner._owner.is_still, [OSError(ESTALE, "Stale file handle")]

        def fails_once() -> bool:
            if failures:
                raise failures.pop()
            return is_still()

        monkeypatch.setattr(owner._owner, "is_still", fails_once)
        with pytest.raises(ApiError, match="cannot be read"):
            await owner.thread.do(owner.cancel, made.id)
        assert 0 < (await over(owner, made.id, "cancelled")).completed < 400
        owner.close()
        await running

    asyncio.run(cancel())


def test_a_lock_that_is_lost_at_any_time_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here between two looks of one cancel: the next look is the other owner's, or one's own with a lock again."""
    monkeypatch.setattr(batch_jobs, "LOOK_S", 0.01)
    monkeypatch.setattr(batch_jobs, "TRY_AGAIN_S", 0.01)

    async def lose() -> None:
        owner = jobs(tmp_path, "chat")
        cancelled = await started(owner, 4)
        (tmp_path / "batches" / f"{cancelled.id}.cancel").touch()
        is_still, answers = owner._owner.is_still, [True, False]
        monkeypatch.setattr(owner._owner, "is_still", lambda: answers.pop(0) if answers else is_still())
        running = asyncio.create_task(owner.run())
        kept = tmp_path / "batches" / f"{cancelled.id}.json"
        await until(lambda: '"cancelled"' in kept.read_text() or running.done())
        assert not running.done() and not answers
        await over(owner, (await started(owner, 4)).id)
        owner.close()
        await running

    asyncio.run(lose())
    assert "another process answers" in str([vars(record).get("why") for record in caplog.records])


def test_a_batch_whose_files_fail_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_jobs, "TRY_AGAIN_S", 0.05)

    async def answer() -> None:
        owner = jobs(tmp_path, None)
        failing, *others = [await started(owner, 2) for _ in range(3)]
        output = owner._files.path(failing.output_id)
        output.mkdir()  # no file: an OSError
        running = asyncio.create_task(owner.run())
        for each in others:
            await over(owner, each.id)
        assert (await owner.thread.do(owner.get, failing.id)).status == "validating"
        output.rmdir()
        await over(owner, failing.id)
        owner.close()
        await running

    asyncio.run(answer())


def test_a_mark_that_is_no_text_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "used-by").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="delete .*used-by"):
        jobs(tmp_path, "chat")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (None, "application a"),
        ("application a", None),
        ("application a", "application b"),
    ],
)
def test_a_folder_has_one_user(first: str | None, second: str | None, tmp_path: Path) -> None:
    """Also while the other one is there, which may hold the lock or not."""
    kept = jobs(tmp_path, first)
    with pytest.raises(ConfigError, match=r"the folder of batches .* is that of forerun .* delete .*used-by"):
        jobs(tmp_path, second)
    (tmp_path / "used-by").write_text("")  # by a process that was killed
    kept._owner.let_go()
    jobs(tmp_path, second)._owner.let_go()


def failing(number: int) -> Callable[..., None]:
    def lock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return lock


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [ENOLCK, ENOSYS])
def test_a_folder_that_cannot_be_locked_is_refused_at_the_start(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of a deployment would not know of the others."""
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(ConfigError, match="cannot keep batches in .*choose another folder"):
        jobs(tmp_path, "application a")
