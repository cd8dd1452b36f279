"""A thread for the files of a folder that may not answer, so that nothing else has to wait for them.

Knows: calls, their order, how long somebody waits for one. Does not know: files.
"""

from __future__ import annotations

import asyncio
import logging
import time
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
log = logging.getLogger("forerun.server")
T = TypeVar("T")


class FolderThread:
    """Makes calls one after the other. What it waits for holds up neither the event loop nor the end of the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = Condition()
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._is_running = False  # the thread: it begins with a call
        self._began_s = 0.0  # the call that is made now, or the last one

    def submit(self, work: Callable[..., T], *given: Any) -> Future[T]:
        """Have a call made, in the context of this one, for which nobody need wait: its error is logged."""
        call = partial(work, *given)
        future = self._enter(call)
        future.add_done_callback(partial(_log_error, call))
        return future

    def _enter(self, call: Callable[[], T]) -> Future[T]:
        future = Future[T]()
        with self._changed:
            self._waiting.append((future, partial(copy_context().run, call)))
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
                self._began_s = time.monotonic()
                future.set_running_or_notify_cancel()  # True: what is cancelled is taken out before
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            del future, work  # nothing is kept until the next call

    async def do(self, work: Callable[..., T], *given: Any) -> T:
        """What a call gives, however long it takes. One that is cancelled before it began is not made."""
        return await self._wait(partial(work, *given), lambda has_begun: None)

    async def answer(self, work: Callable[[], T], goes_on: bool = False) -> T:
        """What a call gives for a client, who waits `ANSWER_S` until it begins, and then so long until it ends.

        Raises ApiError 503 then; see `do`. One that goes on with what has begun is taken however many wait, and waits
        for its turn unless a call before it takes so long: a folder that is merely busy does not hang.
        """
        if not goes_on and len(self._waiting) >= MOST_WAITING:
            raise _no_answer(f"{MOST_WAITING} others wait for it")
        entered_s = time.monotonic()

        def left_s(has_begun: bool) -> float:
            since_s = max(entered_s, self._began_s) if has_begun or goes_on else entered_s
            return since_s + ANSWER_S - time.monotonic()

        return await self._wait(work, left_s)

    async def answer_by_steps(self, steps: Generator[T | None, None, None]) -> T:
        """The first thing that these steps give, with others' calls in between: each step is a call as in `answer`.

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

    async def _wait(self, call: Callable[[], T], left_s: Callable[[bool], float | None]) -> T:
        """What a call gives. `left_s`: how long to wait from now on, if it has begun, or has not; None: for ever."""
        future = self._enter(call)
        waiting = asyncio.wrap_future(future)
        try:
            while not waiting.done():
                has_begun = future.running() or future.done()
                longest_s = left_s(has_begun)
                if longest_s is not None and longest_s <= 0 and (has_begun or self._take_out(future)):
                    raise _no_answer(f"it has not answered for {ANSWER_S:g} s", has_begun)
                await asyncio.wait({waiting}, timeout=longest_s)  # no `timeout`: a call may end with a TimeoutError
        except BaseException:
            self._take_out(future)
            waiting.cancel()
            future.add_done_callback(partial(_log_error, call))  # of a call that has begun
            raise
        return waiting.result()

    def _take_out(self, future: Future[Any]) -> bool:
        """Make the call no more; False if it has begun, or was taken out before."""
        with self._changed:
            left = deque(each for each in self._waiting if each[0] is not future)
            was_there, self._waiting = len(left) < len(self._waiting), left
        return was_there


def _log_error(call: Callable[..., Any], future: Future[Any]) -> None:
    """Log why a call failed that nobody waits for. What a client did wrong is not worth it."""
    error = None if future.cancelled() else future.exception()
    if error is None or (isinstance(error, ApiError) and error.status_code < 500):
        return
    parts = (call.func, *call.args) if isinstance(call, partial) else (call,)
    what = " ".join(name for name in (getattr(part, "__qualname__", None) for part in parts) if name)
    log.warning(
        "a call in the folder of batches failed, and nobody waited for it", extra={"what": what}, exc_info=error
    )


def _no_answer(why: str, has_begun: bool = False) -> ApiError:
    headers = {"Retry-After": f"{ANSWER_S:.0f}"}
    if has_begun:  # OpenAI's clients try again by themselves unless told not to, and a batch would be there twice
        headers["X-Should-Retry"] = "false"
    return ApiError(
        503, f"the server's folder of files and batches hangs ({why}): try again later, and look first whether this "
             "request was done all the same", code="folder_hangs", headers=headers,
    )  # fmt: skip
