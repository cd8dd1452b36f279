"""Compiles grammars in other processes, and keeps the usable ones.

Knows: the processes, their time limits, who may wait. Does not know: grammars, models; see grammar_worker for the other
side.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import ceil
from threading import BoundedSemaphore, Lock
from time import perf_counter
from typing import TypeVar

from forerun.errors import DeadlineError
from forerun.server.errors import ApiError, unsupported
from forerun.server.grammar_masks import PrefixMask
from forerun.server.grammar_messages import hand_over, receive, send
from forerun.server.structured import GrammarSpec
from forerun.weights.tokenizer import Tokenizer

START_S = 180.0  # for the compiling process to load its libraries
GRACE_S = 10.0  # beyond the time limit, which the process enforces itself
MAX_TEXT = 64 << 10  # characters of a schema, regex or grammar
MAX_COMPILED = 32  # grammars kept, each in its own process
MAX_AT_ONCE = 2  # grammars compiled at a time
MAX_PENDING = 16  # different grammars that may wait for the compiler; each may take its whole time limit
MAX_WAITING = 96  # requests that may wait for them; each takes a thread
_NAMES = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


class KeptGrammar:
    """A grammar, in the process that compiled it."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def __del__(self) -> None:
        self._control.close()  # the process then ends; the processes it forked for requests keep running

    def open(self) -> socket.socket | None:
        """A socket to a new process that computes the masks of one request; None if the grammar is gone."""
        ours, theirs = socket.socketpair()
        try:
            hand_over(self._control, b"\0", [theirs.fileno()])
        except OSError:
            ours.close()
            return None
        finally:
            theirs.close()
        return ours


@dataclass(slots=True)
class _Turn:
    """Requests that wait for the same grammar."""

    lock: Lock = field(default_factory=Lock)
    num_waiting: int = 0
    is_too_much: bool = False  # the first had the whole time limit and failed, so the others need not try


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the last ones. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout_s: float) -> None:
        """`vocab_size`: rows of the model's logits, at least the tokenizer's."""
        self._closed = False
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._quick = Lock()  # guards the tables below, held briefly
        self._pending: dict[GrammarSpec, _Turn] = {}
        self._compiled: OrderedDict[GrammarSpec, KeptGrammar] = OrderedDict()
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()  # reasons other than time or memory
        self._slots = BoundedSemaphore(MAX_AT_ONCE)
        self._starting = Lock()
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Start the process ahead of the first request; raises ApiError if that fails."""
        self._ready_worker()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        self._closed = True
        if self._worker is not None:
            self._worker.kill()  # pending compilations are cancelled

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a grammar to be compiled."""
        return sum(turn.num_waiting for turn in list(self._pending.values()))

    def mask(self, spec: GrammarSpec, deadline_s: float | None = None) -> PrefixMask:
        """A mask for one request; raises ApiError if the grammar is invalid, slow or large, 429 if many wait.

        `deadline_s`: when the request is over, on the clock of `perf_counter`; DeadlineError if that comes first.
        """
        if len(spec.text) > MAX_TEXT:
            name = _NAMES[spec.kind]
            raise ApiError(400, f"the {name} has {len(spec.text)} characters; the most is {MAX_TEXT}", param=spec.param)
        channel = self._open(spec)  # a known grammar must not wait for a hostile one
        if channel is None:
            with self._turn(spec) as turn, turn.lock:
                channel = self._open(spec) or self._compile(spec, turn, deadline_s).open()
        if channel is None:
            raise ApiError(503, "the process that held this grammar has ended; try again", headers={"Retry-After": "1"})
        mask = PrefixMask(channel, self._vocab_size, self._tokenizer.encode_behind, spec)
        mask.ready(())  # so that it is computed during prefill
        return mask

    def _open(self, spec: GrammarSpec) -> socket.socket | None:
        with self._quick:
            held = self._compiled.get(spec)
            channel = held.open() if held else None
            if channel is None:
                self._compiled.pop(spec, None)
            else:
                self._compiled.move_to_end(spec)
        return channel

    @contextmanager
    def _turn(self, spec: GrammarSpec) -> Iterator[_Turn]:
        """Count the waiting requests, so that they cannot take all threads."""
        with self._quick:
            num_waiting = self.num_waiting
            is_new = spec not in self._pending
            if num_waiting >= MAX_WAITING or (is_new and len(self._pending) >= MAX_PENDING):
                raise ApiError(
                    429,
                    f"{num_waiting} requests wait for {len(self._pending)} schemas or grammars to be compiled: "
                    "try again later",
                    code="queue_full",
                    headers={"Retry-After": str(ceil(self._timeout_s))},
                )
            turn = self._pending.setdefault(spec, _Turn())
            turn.num_waiting += 1
        try:
            yield turn
        finally:
            with self._quick:
                turn.num_waiting -= 1
                if turn.num_waiting == 0:
                    del self._pending[spec]

    def _compile(self, spec: GrammarSpec, turn: _Turn, deadline_s: float | None) -> KeptGrammar:
        refused = self._refused.get(spec)
        if refused is None:
            if turn.is_too_much:
                raise self._too_much(spec, deadline_s)
            with self._slots:
                limit_s = self._limit_s(deadline_s)
                held, refused = self._ask(spec, limit_s)
            if held is not None:
                with self._quick:
                    _keep(self._compiled, spec, held)
                return held
            if refused is None:
                turn.is_too_much = limit_s >= self._timeout_s
                raise self._too_much(spec, deadline_s)
            with self._quick:
                _keep(self._refused, spec, refused)
        text = f"{spec.param}: this {_NAMES[spec.kind]} cannot be used: {refused}"
        raise ApiError(400, text, param=spec.param, code="invalid_grammar")

    def _ask(self, spec: GrammarSpec, limit_s: float) -> tuple[KeptGrammar | None, str | None]:
        """A grammar, or the reason why it was refused; neither if it took too much time or memory."""
        worker = self._ready_worker()
        ours, theirs = socket.socketpair()
        held = KeptGrammar(ours)
        try:
            with theirs:  # with this end open we would not notice that the other process ended
                worker.compile(spec, limit_s, theirs)
        except OSError:  # the process has ended a moment ago
            return None, None
        answer = receive(ours, limit_s + GRACE_S)
        if answer is None:
            return None, None
        refused = answer.value["refused"]
        return (held, None) if refused is None else (None, refused)

    def _limit_s(self, deadline_s: float | None) -> float:
        """Seconds left to compile. Raises DeadlineError if there are none."""
        left_s = self._timeout_s if deadline_s is None else min(self._timeout_s, deadline_s - perf_counter())
        if left_s <= 0:
            raise DeadlineError(_NO_TIME)
        return left_s

    def _too_much(self, spec: GrammarSpec, deadline_s: float | None) -> Exception:
        if self._closed:
            return ApiError(503, "the server is shutting down")
        if deadline_s is not None and deadline_s <= perf_counter():
            return DeadlineError(_NO_TIME)
        text = (f"{spec.param}: compiling this {_NAMES[spec.kind]} takes more than {self._timeout_s:g} s or too much "
                "memory; make it simpler")  # fmt: skip
        return ApiError(400, text, param=spec.param, code="invalid_grammar")

    def _ready_worker(self) -> _Worker:
        with self._starting:
            if self._worker is None or not self._worker.alive:
                vocabulary = self._vocabulary()
                if self._closed:
                    raise ApiError(503, "the server is shutting down")
                if self._worker is not None:
                    self._worker.kill()  # it has ended; this closes its socket
                self._worker = _Worker()
                if not self._worker.greet(vocabulary, self._tokenizer.eos_token_ids):
                    self._worker.kill()
                    self._worker = None
                    reason = "the server is shutting down" if self._closed else "the grammar compiler did not start"
                    raise ApiError(503, reason, headers={"Retry-After": "10"})
            return self._worker

    def _vocabulary(self) -> list[bytes]:
        """The bytes of every row of the logits."""
        if find_spec("xgrammar") is None:
            raise unsupported("response_format", "structured output needs the package xgrammar, which is missing here")
        if not self._tokenizer.has_token_bytes or not self._tokenizer.eos_token_ids:
            raise unsupported(
                "response_format", "structured output needs a tokenizer with byte tokens and an end token"
            )
        return [self._tokenizer.token_bytes(token) for token in range(self._vocab_size)]


_NO_TIME = "the deadline passed before the grammar was compiled: give the request more time"


Value = TypeVar("Value")


def _keep(kept: OrderedDict[GrammarSpec, Value], spec: GrammarSpec, value: Value) -> None:
    kept[spec] = value
    while len(kept) > MAX_COMPILED:
        kept.popitem(last=False)


class _Worker:
    """The process that all others are forked from, and the process group of all of them."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "forerun.server.grammar_worker"],
                stdin=theirs.fileno(),
                process_group=0,  # an interrupt at the keyboard is the server's to handle, and this ends last
            )
        self._sending = Lock()

    def greet(self, vocabulary: Sequence[bytes], stop_token_ids: Sequence[int]) -> bool:
        """Send the vocabulary; returns whether the process is ready for grammars."""
        names = [name.decode("latin-1") for name in vocabulary]
        try:
            send(self._channel, {"vocabulary": names, "stop_token_ids": list(stop_token_ids)})
        except OSError:
            return False
        return receive(self._channel, START_S) is not None

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def compile(self, spec: GrammarSpec, limit_s: float, channel: socket.socket) -> None:
        """Ask for a grammar to be compiled; the answer comes on the other end of `channel`. Raises OSError."""
        with self._sending:
            self._channel.settimeout(None)
            send(self._channel, {"kind": spec.kind, "text": spec.text, "timeout_s": limit_s}, channel)

    def kill(self) -> None:
        """End the process and all that were forked from it."""
        if self.alive:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
