"""A thread for the files of a folder that may not answer, so that nothing else has to wait for them.

Knows: calls, their order, how long somebody waits for one. Does not know: files.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from inspect import GEN_CREATED, getgeneratorstate
from threading import Condition, Thread
from typing import Any, Final, TypeVar

from forerun.server.errors import ApiError

ANSWER_S: Final = 10.0  # for the folder, when a client waits
MOST_WAITING: Final = 256  # calls, beyond which no client's call is taken
LINGER_S: Final = 1.0  # until a thread without calls ends
T = TypeVar("T")


class FolderThread:
    """Makes calls one after the other. What it waits for holds up neither the event loop nor the end of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._is_running = False  # the thread: it begins with a call

    def submit(self, work: Callable[..., T], *given: Any) -> Future[T]:
        """Have a call made, in the context of this one, whoever waits for it."""
        future = Future[T]()
        with self._changed:
            self._waiting.append((future, partial(copy_context().run, work, *given)))
            self._changed.notify()
            if not self._is_running:
                Thread(target=self._run, name=self._name, daemon=True).start()
                self._is_running = True
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting and not self._changed.wait_for(lambda: self._waiting, LINGER_S):
                    self._is_running = False
                    return
                future, work = self._waiting.popleft()
                future.set_running_or_notify_cancel()  # True: what is cancelled is taken out before
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del future, work  # nothing is kept until the next call

    async def do(self, work: Callable[..., T], *given: Any) -> T:
        """What a call gives, however long it takes. One that is cancelled before it began is not made."""
        return await self._wait(self.submit(work, *given), None)

    async def answer(self, work: Callable[[], T], goes_on: bool = False) -> T:
        """What a call gives for a client, who waits `ANSWER_S` for it. Raises ApiError 503 then; see `do`.

        One that goes on with what has begun is taken however many wait.
        """
        if not goes_on and len(self._waiting) >= MOST_WAITING:
            raise _no_answer(f"{MOST_WAITING} others wait for it")
        return await self._wait(self.submit(work), ANSWER_S)

    async def answer_by_steps(self, steps: Generator[T | None, None, None]) -> T:
        """The first thing that these steps give, with others' calls in between; each may take `ANSWER_S`.

        They are closed once they are given up.
        """
        try:
            found: T | None = None
            while found is None:
                found = await self.answer(partial(next, steps), getgeneratorstate(steps) != GEN_CREATED)
            return found
        except BaseException:
            if getgeneratorstate(steps) == GEN_CREATED:
                steps.close()  # there is nothing to close
            else:
                self.submit(steps.close)
            raise

    async def _wait(self, future: Future[T], longest_s: float | None) -> T:
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiting}, timeout=longest_s)  # no `timeout`: a call may end with a TimeoutError, too
            if not waiting.done():
                raise _no_answer(f"it has not answered for {longest_s:g} s", future.running())
            found: T = waiting.result()
            return found
        finally:
            if not waiting.done():
                self._take_out(future)
                waiting.cancel()

    def _take_out(self, future: Future[Any]) -> None:
        """Make the call no more, unless it has begun."""
        with self._changed:
            self._waiting = deque(each for each in self._waiting if each[0] is not future)


def _no_answer(why: str, has_begun: bool = False) -> ApiError:
    headers = {"Retry-After": f"{ANSWER_S:.0f}"}
    if has_begun:  # OpenAI's clients try again by themselves unless told not to, and a batch would be there twice
        headers["X-Should-Retry"] = "false"
    return ApiError(
        503, f"the server's folder of files and batches hangs ({why}): try again later, and look first whether this "
             "request was done all the same", code="folder_hangs", headers=headers,
    )  # fmt: skip
