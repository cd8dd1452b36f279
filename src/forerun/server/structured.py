"""Structured output: which tokens may follow, for JSON schemas, regular expressions and grammars.

Knows: grammars, their compilation with a time limit, and masks as a pure function of the text so far. Does not know:
models, sampling, speculation; those ask a mask for a prefix, and drafts are only more prefixes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from threading import Lock
from typing import Any, NamedTuple

from forerun.core import GrammarMask, TokenBits
from forerun.server.errors import ApiError, unsupported
from forerun.server.json_schema import schema_text
from forerun.server.schema import SamplingBody
from forerun.weights.tokenizer import Tokenizer

START_S = 180.0  # for the compiling process to load its libraries
CLOSE_S = 1.0  # for whoever compiles to notice that the process is gone
GRACE_S = 30.0  # beyond the time limit, which the process itself watches over
MAX_TEXT = 64 << 10  # characters of a schema, regex or grammar
MAX_COMPILED = 32  # grammars kept
MAX_PENDING = 16  # different grammars that may wait for the compiler; each may take its whole time limit
MAX_MASKS = 256  # prefixes of one request whose masks are kept
MAX_CURSORS = 8  # places in texts of one request (its samples, its drafts) that are kept
ANY_OBJECT = '{"type": "object"}'


class GrammarSpec(NamedTuple):
    """What an output must match."""

    kind: str  # "json" (a schema), "regex" or "grammar" (GBNF)
    text: str


# -- from a request ---------------------------------------------------------------------------------------------


def grammar_spec(body: SamplingBody) -> GrammarSpec | None:
    """The structure a request asks for; raises ApiError if it is malformed or asked for twice."""
    found = {name: spec for name, spec in _asked(body) if spec is not None}
    if len(found) > 1:
        raise ApiError(400, f"{' and '.join(found)} were given: give one of them", param=next(iter(found)))
    return next(iter(found.values()), None)


def _asked(body: SamplingBody) -> list[tuple[str, GrammarSpec | None]]:
    outputs, form = body.structured_outputs, body.response_format
    return [
        ("response_format", _from_format(body) if form is not None else None),
        ("guided_json", json_spec("guided_json", body.guided_json)),
        ("guided_regex", _regex_spec(body.guided_regex)),
        ("guided_choice", _choice_spec("guided_choice", body.guided_choice)),
        ("guided_grammar", _grammar_spec(body.guided_grammar)),
        ("structured_outputs.json", json_spec("structured_outputs", outputs.json_) if outputs else None),
        ("structured_outputs.regex", _regex_spec(outputs.regex) if outputs else None),
        ("structured_outputs.choice", _choice_spec("structured_outputs", outputs.choice) if outputs else None),
        ("structured_outputs.grammar", _grammar_spec(outputs.grammar) if outputs else None),
        ("structured_outputs.json_object", _object_spec() if outputs and outputs.json_object else None),
    ]


def _from_format(body: SamplingBody) -> GrammarSpec | None:
    form = body.response_format
    assert form is not None
    if form.type == "text":
        return None
    if form.type == "json_object":
        return _object_spec()
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(400, "response_format json_schema needs json_schema.schema", param="response_format")
    return json_spec("response_format", form.json_schema.schema_)


def _object_spec() -> GrammarSpec:
    return GrammarSpec("json", ANY_OBJECT)


def json_spec(param: str, schema: Any) -> GrammarSpec | None:
    """The grammar of a JSON schema (an object, or its text); raises ApiError naming `param`."""
    if schema is None:
        return None
    try:
        return GrammarSpec("json", schema_text(json.loads(schema) if isinstance(schema, str) else schema))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{param}: this JSON schema cannot be used: {error}", param=param) from error


def _regex_spec(text: str | None) -> GrammarSpec | None:
    return None if text is None else GrammarSpec("regex", text)


def _grammar_spec(text: str | None) -> GrammarSpec | None:
    return None if text is None else GrammarSpec("grammar", text)


def _choice_spec(param: str, choices: Sequence[str] | None) -> GrammarSpec | None:
    if choices is None:
        return None
    if not choices:
        raise ApiError(400, f"{param}: the list of choices is empty: give at least one", param=param)
    return GrammarSpec("grammar", "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices))


# -- compiling --------------------------------------------------------------------------------------------------


class GrammarCompiler:
    """Compiles grammars for one vocabulary in another process, and keeps the last ones. Safe from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout_s: float) -> None:
        """`vocab_size`: rows of the model's logits, at least the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._quick = Lock()  # for a look at what follows; the other one is held while a grammar is compiled
        self._pending: Counter[GrammarSpec] = Counter()  # those that wait for the compiler, or are in it
        self._compiled: OrderedDict[GrammarSpec, Any] = OrderedDict()
        self._refused: OrderedDict[GrammarSpec, str] = OrderedDict()
        self._worker: _Worker | None = None
        self._closed = False  # while somebody else holds the lock
        self._info: Any = None

    def start(self) -> None:
        """Load the libraries and start the process ahead of the first request; raises ApiError if that cannot be."""
        with self._lock:
            self._ready_worker()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._closed = True
        worker = self._worker
        if worker is not None:
            worker.kill()  # before the lock: whoever holds it may be waiting for this process
        if self._lock.acquire(timeout=CLOSE_S):  # or loading libraries, which ends by itself
            self._drop_worker()
            self._closed = False
            self._lock.release()

    def mask(self, spec: GrammarSpec) -> PrefixMask:
        """A mask for one request; raises ApiError if the grammar is invalid, slow or large, 429 if many wait."""
        if len(spec.text) > MAX_TEXT:
            raise ApiError(400, f"the {spec.kind} has {len(spec.text)} characters; the most is {MAX_TEXT}")
        compiled = self._known(spec)  # a known grammar must not wait for a hostile one
        if compiled is None:
            with self._turn(spec), self._lock:
                compiled = self._known(spec) or self._compile(spec)
        return PrefixMask(compiled[0], self._vocab_size, self._tokenizer.eos_token_ids)

    def _known(self, spec: GrammarSpec) -> tuple[Any] | None:
        with self._quick:
            if spec in self._compiled:
                self._compiled.move_to_end(spec)
                return (self._compiled[spec],)
        return None

    @contextmanager
    def _turn(self, spec: GrammarSpec) -> Iterator[None]:
        """Count among those that wait, so that they cannot take every thread there is."""
        with self._quick:
            if spec not in self._pending and len(self._pending) >= MAX_PENDING:
                raise ApiError(
                    429,
                    f"{len(self._pending)} other schemas or grammars wait for the compiler: try again later",
                    code="queue_full",
                    headers={"Retry-After": str(ceil(self._timeout_s))},
                )
            self._pending[spec] += 1
        try:
            yield
        finally:
            with self._quick:
                self._pending[spec] -= 1
                self._pending += Counter()  # without those that are zero

    def _compile(self, spec: GrammarSpec) -> tuple[Any]:
        import xgrammar

        if spec not in self._refused:
            status, text = self._ask(spec)
            if status == "ok":
                compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
                with self._quick:
                    _keep(self._compiled, spec, compiled)
                return (compiled,)
            _keep(self._refused, spec, text)
        raise ApiError(400, f"this {_NAMES[spec.kind]} cannot be used: {self._refused[spec]}", code="invalid_grammar")

    def _ask(self, spec: GrammarSpec) -> tuple[str, str]:
        worker = self._ready_worker()
        answer = worker.ask(spec, self._timeout_s)
        if answer is not None:
            return answer
        self._drop_worker()
        return "refused", "the compiler did not survive it; make it simpler"

    def _ready_worker(self) -> _Worker:
        if self._worker is None or not self._worker.alive:
            vocabulary = self._vocabulary()
            self._drop_worker()
            if self._closed:
                raise ApiError(503, "the server is shutting down")
            self._worker = _Worker()
            if not self._worker.greet(vocabulary, self._tokenizer.eos_token_ids):
                self._drop_worker()
                raise ApiError(503, "the grammar compiler did not start", headers={"Retry-After": "10"})
        return self._worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _vocabulary(self) -> list[bytes]:
        """The bytes of every row of the logits."""
        try:
            from forerun.server.grammar_worker import vocabulary_info
        except ImportError as error:
            raise unsupported(
                "response_format", f"structured output needs the package xgrammar, which is missing here ({error})"
            ) from error
        if not self._tokenizer.has_token_bytes or not self._tokenizer.eos_token_ids:
            raise unsupported(
                "response_format", "structured output needs a tokenizer with byte tokens and an end token"
            )
        vocabulary = [self._tokenizer.token_bytes(token) for token in range(self._vocab_size)]
        if self._info is None:
            self._info = vocabulary_info(vocabulary, self._tokenizer.eos_token_ids)
        return vocabulary


_NAMES = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def _keep(kept: OrderedDict[GrammarSpec, Any], spec: GrammarSpec, value: Any) -> None:
    kept[spec] = value
    while len(kept) > MAX_COMPILED:
        kept.popitem(last=False)


class _Worker:
    """The compiling process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "forerun.server.grammar_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            process_group=0,  # Ctrl-C in a terminal is the server's to handle, which needs the compiler until it ends
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()

    def greet(self, vocabulary: Sequence[bytes], stop_token_ids: Sequence[int]) -> bool:
        """Send the vocabulary; whether the process is ready for grammars."""
        names = [name.decode("latin-1") for name in vocabulary]
        return self._exchange({"vocabulary": names, "stop_token_ids": list(stop_token_ids)}, START_S) is not None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, spec: GrammarSpec, timeout_s: float) -> tuple[str, str] | None:
        """The worker's answer, None if it died."""
        asked = {"kind": spec.kind, "text": spec.text, "timeout_s": timeout_s}
        answer = self._exchange(asked, timeout_s + GRACE_S)
        return None if answer is None else (answer["status"], answer["text"])

    def _exchange(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        from forerun.server.grammar_worker import read_message, write_message

        try:
            write_message(self._to, message)
            return read_message(self._from, timeout_s)
        except OSError:
            return None

    def kill(self) -> None:
        """End the process; whoever waits for its answer gets none."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process and its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


# -- masks ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cursor:
    """A matcher and the tokens it has read."""

    matcher: Any
    tokens: list[int]

    def move(self, tokens: Sequence[int]) -> bool:
        """Go to the state after `tokens`, by way of what both have in common; False if the grammar forbids them."""
        common = _common_prefix(self.tokens, tokens)
        if common < len(self.tokens):
            self.matcher.rollback(len(self.tokens) - common)
            del self.tokens[common:]
        for token in tokens[common:]:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token):
                return False
            self.tokens.append(token)
        return True


class PrefixMask:
    """The GrammarMask of one request. What it says depends on the prefix alone; everything kept only saves time."""

    def __init__(self, compiled: Any, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        self._compiled = compiled
        self._num_words = (vocab_size + 31) // 32
        self._stop = _bits_of(stop_token_ids, self._num_words)
        self._cursors: list[_Cursor] = []  # the last used at the end
        self._known: OrderedDict[tuple[int, ...], TokenBits | None] = OrderedDict()

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBits | None:
        """Tokens that may follow; after a prefix that the grammar forbids, and no choice leads to, all."""
        prefix = tuple(output_token_ids)
        if prefix not in self._known:
            self._known[prefix] = self._compute(prefix)
            if len(self._known) > MAX_MASKS:
                self._known.popitem(last=False)
        return self._known[prefix]

    def _compute(self, prefix: tuple[int, ...]) -> TokenBits | None:
        cursor = self._nearest(prefix)
        if not cursor.move(prefix):
            return None
        if cursor.matcher.is_terminated():
            return self._stop
        return self._fill(cursor.matcher)

    def _fill(self, matcher: Any) -> TokenBits | None:
        import numpy as np

        words = np.full(self._num_words, -1, np.int32)
        return TokenBits(words.tobytes()) if matcher.fill_next_token_bitmask(words) else None

    def _nearest(self, prefix: tuple[int, ...]) -> _Cursor:
        """The cursor with the shortest way to `prefix`; a new one where that beats going back and forth."""
        import xgrammar

        best = max(self._cursors, key=lambda c: _common_prefix(c.tokens, prefix), default=None)
        shared = _common_prefix(best.tokens, prefix) if best else 0
        if best is None or (shared < min(len(best.tokens), len(prefix)) // 2 and len(self._cursors) < MAX_CURSORS):
            best = _Cursor(xgrammar.GrammarMatcher(self._compiled), [])
        else:
            self._cursors.remove(best)
        self._cursors.append(best)
        return best


class AfterToken:
    """A mask that begins after the first occurrence of a token (the end of a model's reasoning)."""

    def __init__(self, inner: GrammarMask, token_id: int) -> None:
        self._inner = inner
        self._token_id = token_id

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int] | TokenBits | None:
        """All tokens before that one; then what the inner mask says of the tokens since."""
        tokens = list(output_token_ids)
        if self._token_id not in tokens:
            return None
        return self._inner.allowed(tokens[tokens.index(self._token_id) + 1 :])


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Length of the common prefix, by halving: slices compare at the speed of C."""
    low, high = 0, min(len(ours), len(theirs))
    a, b = tuple(ours[:high]), tuple(theirs[:high])
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _bits_of(token_ids: Sequence[int], num_words: int) -> TokenBits:
    packed = bytearray(4 * num_words)
    for token in token_ids:
        packed[token // 8] |= 1 << token % 8
    return TokenBits(bytes(packed))
