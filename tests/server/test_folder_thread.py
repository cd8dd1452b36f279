"""Calls on a thread of their own: in order, given up in time, bounded, and in nobody's way."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.server import folder_thread
from forerun.server.errors import ApiError
from forerun.server.folder_thread import FolderThread


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> tuple[FolderThread, Event]:
    """A thread that waits for the event."""
    monkeypatch.setattr(folder_thread, "ANSWER_S", 0.05)
    thread, begun, goes_on = FolderThread("test"), Event(), Event()
    thread.submit(lambda: (begun.set(), goes_on.wait(60)))
    assert begun.wait(60)
    return thread, goes_on


def test_calls_keep_their_order_and_those_given_up_are_not_made(hanging: tuple[FolderThread, Event]) -> None:
    thread, goes_on = hanging
    made = list[str]()

    async def use() -> None:
        before = thread.submit(made.append, "first")
        with pytest.raises(ApiError, match="has not answered for 0.05 s") as raised:
            await thread.answer(lambda: made.append("given up"))
        assert (raised.value.status_code, raised.value.code) == (503, "folder_hangs")
        waiting = asyncio.create_task(thread.do(made.append, "cancelled"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        after = asyncio.create_task(thread.do(made.append, "second"))
        await asyncio.sleep(0.01)
        assert not before.done() and made == []
        goes_on.set()
        await after
        assert made == ["first", "second"]

    asyncio.run(use())


def test_clients_calls_are_bounded_while_it_hangs(
    hanging: tuple[FolderThread, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, goes_on = hanging
    monkeypatch.setattr(folder_thread, "MOST_WAITING", 3)
    monkeypatch.setattr(folder_thread, "ANSWER_S", 60.0)

    async def use() -> None:
        waiting = [asyncio.create_task(thread.answer(lambda: "done")) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="3 others wait"):
            await thread.answer(lambda: "not done")
        goes_on.set()
        assert await asyncio.gather(*waiting) == ["done"] * 3
        assert await thread.answer(lambda: "again") == "again"

    asyncio.run(use())


def test_what_is_given_up_leaves_nothing_behind(hanging: tuple[FolderThread, Event]) -> None:
    thread, goes_on = hanging

    async def use() -> None:
        for _ in range(20):
            with pytest.raises(ApiError):
                await thread.answer(bool)
        assert len(thread._waiting) == 0
        goes_on.set()

    asyncio.run(use())


def test_steps_that_are_given_up_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_thread, "ANSWER_S", 0.5)
    thread, goes_on, closed = FolderThread("test"), Event(), list[bool]()

    def steps() -> Generator[str | None, None, None]:
        try:
            yield None
            goes_on.wait(60)
            yield None
            raise AssertionError("a step after it was given up")
        finally:
            closed.append(goes_on.is_set())

    async def use() -> None:
        with pytest.raises(ApiError):
            await thread.answer_by_steps(steps())
        assert closed == []
        goes_on.set()
        await thread.do(bool)
        assert closed == [True]

    asyncio.run(use())


def test_what_has_begun_goes_on_however_many_wait_and_is_not_to_be_sent_again(
    hanging: tuple[FolderThread, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, goes_on = hanging
    monkeypatch.setattr(folder_thread, "MOST_WAITING", 0)

    def steps() -> Generator[str | None, None, None]:
        yield None
        yield "done"

    async def use() -> None:
        with pytest.raises(ApiError, match="0 others wait") as raised:
            await thread.answer(lambda: "done")
        assert "X-Should-Retry" not in (raised.value.headers or {}), "nothing of it was done"
        unbegun = steps()
        with pytest.raises(ApiError, match="0 others wait"):
            await thread.answer_by_steps(unbegun)
        assert not thread._waiting and list(unbegun) == [], "closed at once"
        goes_on.set()
        begun = steps()
        next(begun)
        assert await thread.answer_by_steps(begun) == "done"
        again = Event()
        with pytest.raises(ApiError, match="has not answered") as raised:
            await thread.answer(lambda: again.wait(60), True)
        assert (raised.value.headers or {})["X-Should-Retry"] == "false"
        again.set()

    asyncio.run(use())


def test_a_thread_that_could_not_begin_begins_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = FolderThread("test")

    def fails(*given: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(folder_thread, "Thread", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            thread.submit(print)
    assert thread.submit(lambda: "done").result(10) == "done"


def test_a_busy_folder_is_not_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has begun waits while others get their answers, and a call's time begins with the call."""
    monkeypatch.setattr(folder_thread, "ANSWER_S", 0.8)
    thread = FolderThread("test")

    async def use() -> None:
        for _ in range(2):
            thread.submit(time.sleep, 0.2)
        begun_late = asyncio.create_task(thread.answer(lambda: time.sleep(0.5)))
        goes_on = asyncio.create_task(thread.answer(lambda: time.sleep(0.5), True))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="has not answered"):
            await thread.answer(lambda: "never begun")
        await begun_late
        await goes_on

    asyncio.run(use())


def test_what_goes_on_is_given_up_while_another_call_hangs(hanging: tuple[FolderThread, Event]) -> None:
    thread, goes_on = hanging

    async def use() -> None:
        with pytest.raises(ApiError, match="has not answered") as raised:
            await thread.answer(lambda: "done", True)
        assert "X-Should-Retry" not in (raised.value.headers or {})
        goes_on.set()

    asyncio.run(use())


def test_errors_that_nobody_waits_for_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of calls that were submitted, given up or cancelled; not what a client did wrong, nor what somebody hears."""
    monkeypatch.setattr(folder_thread, "ANSWER_S", 1.0)
    thread = FolderThread("test")

    def fails(begun: Event, goes_on: Event, error: Exception) -> None:
        begun.set()
        goes_on.wait(60)
        raise error

    async def unheard(error: Exception, is_client: bool) -> None:
        begun, goes_on = Event(), Event()
        call = partial(fails, begun, goes_on, error)
        waiting = asyncio.create_task(thread.answer(call) if is_client else thread.do(call))
        await asyncio.to_thread(begun.wait, 60)
        if not is_client:
            waiting.cancel()
        with pytest.raises((ApiError, asyncio.CancelledError)):
            await waiting
        goes_on.set()
        await thread.do(bool)

    async def use() -> None:
        thread.submit(Path("/nowhere/a").unlink)
        await unheard(ValueError("given up"), True)
        await unheard(ValueError("cancelled"), False)
        await unheard(ApiError(404, "there is none"), True)
        await unheard(ApiError(500, "no room"), True)
        with pytest.raises(ValueError, match="heard"):
            await thread.do(int, "heard")

    asyncio.run(use())
    said = [
        (vars(record)["what"].rpartition(".")[2], str(record.exc_info[1]))
        for record in caplog.records
        if record.exc_info
    ]
    assert said == [
        ("unlink", "[Errno 2] No such file or directory: '/nowhere/a'"),
        ("fails", "given up"),
        ("fails", "cancelled"),
        ("fails", "500: no room"),
    ]


def test_errors_of_calls_are_theirs() -> None:
    """A file system may time out by itself: that is no hang."""

    def fails() -> None:
        raise TimeoutError("Connection timed out")

    async def use() -> None:
        thread = FolderThread("test")
        with pytest.raises(TimeoutError, match="Connection timed out"):
            await thread.answer(fails)
        assert await thread.do(len, "abc") == 3  # it goes on

    asyncio.run(use())


def test_a_thread_without_calls_ends_and_another_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_thread, "LINGER_S", 0.01)
    thread = FolderThread("test")
    for number in range(3):
        assert thread.submit(int, number).result(20) == number
        until_s = time.monotonic() + 20
        while thread._is_running and time.monotonic() < until_s:
            time.sleep(0.005)
        assert not thread._is_running


CHILD = """
import asyncio, sys, time
from forerun.server.folder_thread import FolderThread

async def main():
    thread = FolderThread("test")
    thread.submit(time.sleep, 600)
    await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_it_does_not_hold_up_the_end_of_the_process() -> None:
    subprocess.run([sys.executable, "-c", CHILD], check=True, timeout=60)
