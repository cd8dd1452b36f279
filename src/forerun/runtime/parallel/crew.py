"""The other ranks as rank 0 knows them: what they are told and answer, who is lost, and how all of them end.

Knows: connections, which answers are awaited, check sums that must be equal. Does not know: passes, models, how ranks
start (`start`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Timer
from typing import Final
from weakref import WeakKeyDictionary, finalize
from zlib import crc32

import torch

from forerun.errors import CheckpointError, ConfigError, ForerunError, RankLost
from forerun.kernels.ranks import ALONE
from forerun.models.adapted import LoraAdapter
from forerun.runtime.parallel.exchange import Exchange, checksum_of
from forerun.runtime.parallel.links import ENDED, Link, LinkClosed, Watch
from forerun.runtime.parallel.messages import Kind, RankMessage
from forerun.weights.identity import digest_of, stamps_of

CHECKED_EVERY = 64  # passes
OPEN_LIMIT_S = 120.0  # for a follower to make room for an engine, or to read an adapter
FLUSH_LIMIT_S: Final = 30.0  # for other ranks to write the blocks of KV that they were given
_GRACE_S, _NAME_S = 5.0, 2.0  # for a blocked pass to end by itself, and for the watch to say who is lost
_SIGKILL = 9  # which Windows does not name
_REAP_S = 1.0  # for the status of a process whose connection has ended: less than the watch has to say it
_RECEIVED = -1  # the logits as the leader got them, beside what ranks made
EXIT_LOST = 1


class Crew:
    """The followers of this process, and what it must know of them."""

    def __init__(
        self, exchange: Exchange, links: Mapping[int, Link], hosts: Mapping[int, str],
        workers: Sequence[subprocess.Popen[bytes]], limit_s: float,
    ) -> None:  # fmt: skip
        """links and hosts by rank. workers: the followers that this process has started. limit_s: of silence."""
        self.exchange = exchange
        exchange.check = self.check
        self.shards = ALONE  # the ranks of this stage, when they have connected
        self.failure: RankLost | None = None
        self.on_failure: list[Callable[[RankLost], None]] = []
        self.num_here = list(hosts.values()).count(hosts[0])  # ranks on this machine
        self.num_passes = 0
        self._links, self._hosts, self._workers = dict(links), dict(hosts), list(workers)
        self._watch = Watch(links, limit_s, self._arrived, self._lost)
        self._changed = Condition()
        self._answers: dict[int, Sequence[str]] = {}  # of those that have done what they were told last
        self._num_opened = 0  # engines and adapters
        self._adapters: WeakKeyDictionary[LoraAdapter, int] = (
            WeakKeyDictionary()
        )  # by which numbers followers know them
        self._gone = list[RankMessage]()  # what followers may forget: told before the next message
        self._chain = 0  # check sum of all messages
        self._digests: dict[int, dict[int, int]] = {}  # by pass, by rank
        self._is_passing = self._ended = False
        self._awaited: dict[int, tuple[list[Sequence[int]], Future[list[Sequence[int]]]]] = {}  # answers, by question
        self._num_asked = 0

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While ranks load; watches over the followers from here on."""
        self._watch.start()
        with self.passing():
            yield
        self._chain = 0

    def compare_weights(self, stamp: str) -> None:
        """Wait until all followers have looked at their files. Raises ConfigError for a rank with other weights."""
        answers = self.await_ready()
        other = next((rank for rank, theirs in sorted(answers.items()) if theirs != [stamp]), None)
        if other is not None:
            raise ConfigError(
                f"{self.name_of(other)} has other weights than rank 0 on {self._hosts[0]}: copy the same files to all"
            )

    def await_ready(self, limit_s: float | None = None) -> dict[int, Sequence[str]]:
        """Wait until every follower has done what it was told last -> what each says of it. Raises RankLost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._answers.keys() >= self._links.keys(), limit_s)
            answers, self._answers = self._answers, {}
        late = sorted(self._links.keys() - answers.keys())
        if late and self.failure is None:
            self.fail(f"{self.name_of(late[0])} was not ready within {limit_s:g} s")
        self.check()
        return answers

    def check(self) -> None:
        """Raise RankLost if a rank was lost, or all have ended."""
        if self.failure is not None:
            raise self.failure
        if self._ended:
            raise RankLost("the ranks of this model were closed: make another LLM")

    @property
    def is_open(self) -> bool:
        """Whether followers can be told anything."""
        return self.failure is None and not self._ended

    def name_of(self, rank: int) -> str:
        """How errors call a rank."""
        return f"rank {rank} on {self._hosts.get(rank, 'an unknown host')}"

    # -- telling ------------------------------------------------------------------------------------------------

    def tell(self, message: RankMessage) -> None:
        """Send to all followers. Raises RankLost."""
        self.check()
        while self._gone:
            self._send(self._gone.pop())
        self._send(message)

    def _send(self, message: RankMessage) -> None:
        body = message.encode()
        for rank, link in self._links.items():
            try:
                link.send(message.kind, body)
            except LinkClosed as error:
                self._lost(rank, str(error))
                self.check()
        self._chain = crc32(body, self._chain)

    def open_engine(self, numbers: Sequence[int]) -> int:
        """Have all followers make room for an engine -> its number. Raises RankLost."""
        self._num_opened += 1
        engine = self._num_opened
        self.tell(RankMessage(Kind.OPEN, [engine, *numbers]))
        self.await_ready(OPEN_LIMIT_S)
        return engine

    def close_engine(self, engine: int) -> None:
        """The followers' pools will be freed; callable from any thread at any time."""
        self._gone.append(RankMessage(Kind.CLOSE, [engine]))

    def ask(self, message_of: Callable[[int], RankMessage]) -> tuple[int, Future[list[Sequence[int]]]]:
        """Tell all followers the message of a number -> the number, and what each of them will have answered.

        The latter fails with RankLost if a rank is lost, or all end. What is to be done then runs on another thread.
        """
        self._num_asked += 1
        number, answers = self._num_asked, Future[list[Sequence[int]]]()
        self._awaited[number] = [], answers
        try:
            self.tell(message_of(number))
        except RankLost as error:
            self._answer_nobody(error)
        return number, answers

    def _answer_nobody(self, error: RankLost) -> None:
        while self._awaited:
            with suppress(KeyError):  # another thread was faster
                self._awaited.popitem()[1][1].set_exception(error)

    def open_adapter(self, adapter: LoraAdapter) -> None:
        """Have all followers read what this one was read from, until nobody here has it any more.

        Raises CheckpointError if one of them cannot, and RankLost.
        """
        self._num_opened += 1
        number, path = self._num_opened, Path(adapter.path).absolute()
        self.tell(RankMessage(Kind.ADAPTER, [number], [str(path), digest_of_adapter(adapter)]))
        finalize(adapter, self._gone.append, RankMessage(Kind.FORGET, [number]))
        for rank, why in sorted(self.await_ready(OPEN_LIMIT_S).items()):
            if why:
                raise CheckpointError(f"{self.name_of(rank)} cannot load the adapter: {why[0]}")
        self._adapters[adapter] = number

    def numbers_of(self, adapters: Sequence[object | None]) -> tuple[int, ...]:
        """By which followers know them, 0 for None."""
        return tuple(self._adapters[each] if isinstance(each, LoraAdapter) else 0 for each in adapters)

    def pass_number(self) -> tuple[int, bool]:
        """Of the next pass, and whether what it gives is checked."""
        self.num_passes += 1
        return self.num_passes, self.num_passes % CHECKED_EVERY == 1

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass: if it does not end as it should, the ranks do not agree any more, and all end."""
        self._is_passing = True
        try:
            yield
        except Exception as error:
            if isinstance(error, ForerunError) and not isinstance(error, RankLost):
                self.fail(str(error))
                raise
            raise self._named(error) from error
        except BaseException:
            self.fail("interrupted in the middle of a pass")
            raise
        finally:
            self._is_passing = False

    def _named(self, error: Exception) -> RankLost:
        """What to raise in place of an exchange's error: the watch may be about to say who is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, _NAME_S)
        self.fail(str(error))
        return self.failure or RankLost(str(error))

    # -- hearing (on the watch's thread) ------------------------------------------------------------------------

    def _arrived(self, rank: int, message: RankMessage) -> None:
        if message.kind == Kind.LOST:
            self.fail(f"{self.name_of(rank)}: {message.texts[0]}")
        elif message.kind == Kind.DIGEST:
            self.digested(rank, *message.numbers)
        elif message.kind == Kind.READY:
            with self._changed:
                self._answers[rank] = message.texts
                self._changed.notify_all()
        elif message.kind == Kind.ANSWER:
            self._answered(message.numbers[0], message.numbers[1:])

    def _answered(self, number: int, answer: Sequence[int]) -> None:
        awaited = self._awaited.get(number)
        if awaited is None:
            return
        awaited[0].append(answer)
        is_whole = len(awaited[0]) == self.exchange.layout.num_ranks - 1
        if is_whole and self._awaited.pop(number, None) is not None:
            awaited[1].set_result(awaited[0])

    def _lost(self, rank: int, why: str) -> None:
        how = how_ended(self._workers[rank - 1]) if self._workers and why.startswith(ENDED) else ""
        self.fail(f"{self.name_of(rank)} is lost: {how or why}")

    def digested(self, rank: int, number: int, digest: int) -> None:
        """A rank's check sum of what its stage made in a pass and of all that it was told before."""
        layout = self.exchange.layout
        with self._changed:
            found = self._digests.setdefault(number, {})
            found[rank] = digest
            if len(found) < layout.num_ranks + (layout.num_stages > 1):
                return
            del self._digests[number]
        first = {layout.stage_of(each): each for each in sorted(found, reverse=True) if each != _RECEIVED}
        stages = {each: layout.stage_of(each) if each != _RECEIVED else layout.num_stages - 1 for each in found}
        for each, stage in stages.items():
            if found[each] != found[first[stage]]:
                self.fail(
                    f"{self.name_of(first[stage])} and {self.name_of(max(each, 0))} have different numbers for pass "
                    f"{number}, where all must be equal: look for different releases or processors, or bad memory"
                )
                return

    def expects(self, number: int, received: torch.Tensor | None) -> None:
        """The leader's own check sums of a pass: of what its stage made, and of the logits it was sent."""
        made = self.exchange.digest
        assert made is not None
        self.exchange.digest = None
        self.digested(self.exchange.rank, number, made)
        if received is not None:
            self.digested(_RECEIVED, number, checksum_of(received, self._chain))

    def begin_check(self) -> None:
        """What this stage makes next is taken into a check sum."""
        self.exchange.digest = self._chain

    # -- ending -------------------------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """Something is wrong with a rank: end all of them. Only the first call counts."""
        with self._changed:
            if self.failure is not None or self._ended:
                return
            self.failure = RankLost(f"{text}; all ranks have ended: look at its own messages, then start again")
            self._changed.notify_all()
        self._watch.stop()
        for link in self._links.values():
            with suppress(LinkClosed):
                link.send_if_room(RankMessage(Kind.LOST, (), [text]))
        for worker in self._workers:
            worker.kill()  # one that was stopped, too
        timer = Timer(_GRACE_S, self._leave)
        timer.daemon = True
        timer.start()
        self.shards.close()
        self._answer_nobody(self.failure)
        for told in list(self.on_failure):
            told(self.failure)
        self.exchange.abort()  # last, since NCCL may take long

    def _leave(self) -> None:
        """A pass that waits for a rank on another machine may not end by itself."""
        if self._is_passing:
            with suppress(OSError, ValueError):  # nobody may read any more
                print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST)

    def close(self) -> None:
        """End all followers; nothing is left of them when this returns. More calls do nothing.

        Those that store blocks have `FLUSH_LIMIT_S` to write what they were given.
        """
        with self._changed:
            if self._ended:
                return
            self._ended = True
        self._watch.stop()
        for link in self._links.values():
            with suppress(LinkClosed):
                link.send_if_room(RankMessage(Kind.END))
        until = time.monotonic() + _GRACE_S + (FLUSH_LIMIT_S if self._num_asked else 0.0)
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, until - time.monotonic()))
            worker.kill()
            worker.wait()
        for link in self._links.values():
            link.close()
        self._answer_nobody(RankLost("the ranks of this model were closed"))
        self.shards.close()
        self.exchange.close()


def how_ended(process: subprocess.Popen[bytes]) -> str:
    """Which signal has ended it, "" if none did."""
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(_REAP_S)
        if status < 0:
            return f"killed by signal {-status}{' (out of memory?)' if status == -_SIGKILL else ''}"
    return ""


def digest_of_adapter(adapter: LoraAdapter) -> str:
    """A hash of its files. Raises CheckpointError if they cannot be read, or have changed since the adapter was."""
    path = Path(adapter.path)
    try:
        digest, stamps = digest_of(path), stamps_of(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path} to compare it on all ranks: {error}") from error
    if stamps != adapter.stamps:
        raise CheckpointError(f"the adapter in {path} changed while it was read: load it again")
    return digest
