"""Compiles grammars in a process of its own, so that a hostile one can be stopped.

Run as `python -m forerun.server.grammar_worker`. Knows: xgrammar's compiler. Does not know: requests. Every grammar is
compiled in a fork of this process, which is ended when it takes too long or grows too large; what goes back is a
compiled grammar as text. Messages are JSON, each after its length in four bytes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import select
import signal
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, process_time
from typing import Any

import numpy as np
import xgrammar

from forerun.server.json_pattern import with_patterns

MEMORY_BYTES = 2 << 30  # beyond what the process has when it starts
NUM_WALKS, WALK_TOKENS = 2, 48  # random texts tried against a grammar
MAX_WALK_S = 4.0  # processor time of all of them: some tens of milliseconds a token
TOO_MUCH = "compiling it takes too long or too much memory; make it simpler"


def vocabulary_info(vocabulary: Sequence[bytes], stop_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """xgrammar's view of a vocabulary: the bytes of each token id, b"" for tokens without text."""
    return xgrammar.TokenizerInfo(
        list(vocabulary), vocab_type=xgrammar.VocabType.RAW, vocab_size=len(vocabulary),
        stop_token_ids=list(stop_token_ids), add_prefix_space=False,
    )  # fmt: skip


def main() -> None:
    """Read a vocabulary, then grammars, and answer each with its status and text, until the input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed must not come between
    hello = read_message(0)
    if hello is None:
        return
    vocabulary = [name.encode("latin-1") for name in hello["vocabulary"]]
    info = vocabulary_info(vocabulary, hello["stop_token_ids"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    gc.freeze()  # forks then share these objects' memory instead of copying it
    write_message(answers, {"status": "ready"})
    while (asked := read_message(0)) is not None:
        write_message(answers, _in_fork(compiler, len(vocabulary), asked))


def _in_fork(compiler: xgrammar.GrammarCompiler, vocab_size: int, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fork of this process, or that it took too much."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _limit_memory()
        write_message(theirs, _answer(compiler, vocab_size, asked["kind"], asked["text"]))
        os._exit(0)
    os.close(theirs)
    answer = read_message(ours, asked["timeout_s"])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours)
    return answer or {"status": "refused", "text": TOO_MUCH}


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(compiler: xgrammar.GrammarCompiler, vocab_size: int, kind: str, text: str) -> dict[str, Any]:
    try:
        with _captured_stderr() as warnings:
            compiled = _compile(compiler, kind, text)
        refused = _message(warnings[0]) if warnings else _walk(compiled, vocab_size)
        if refused is None:
            return {"status": "ok", "text": compiled.serialize_json()}
    except MemoryError:
        refused = TOO_MUCH
    except Exception as error:  # the library raises RuntimeError for whatever it does not like
        refused = _message(str(error))
    return {"status": "refused", "text": refused}


def _compile(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> xgrammar.CompiledGrammar:
    """JSON is written on one line, as json.dumps does: no model can lose itself in blanks."""
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        return compiler.compile_grammar(text)
    grammar = xgrammar.Grammar.from_json_schema(text, strict_mode=False, any_whitespace=False)
    written = with_patterns(str(grammar), lambda regex: str(xgrammar.Grammar.from_regex(regex)))
    return compiler.compile_grammar(written)


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Lines written to standard error inside, by native code too: the library warns there of what it ignores."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += [line for line in file.read().decode("utf-8", "replace").splitlines() if "Warning" in line]


def _message(text: str) -> str:
    """The library's message without its time stamp and source file."""
    first = text.strip().splitlines()[0] if text.strip() else "it is not valid"
    return first.split(".cc:", 1)[-1].partition(": ")[2].strip() or first


def _walk(compiled: xgrammar.CompiledGrammar, vocab_size: int) -> str | None:
    """Write a few random texts: why this grammar is too slow to use or matches nothing, else None."""
    rng, started = random.Random(0), process_time()
    for _ in range(NUM_WALKS):
        matcher = xgrammar.GrammarMatcher(compiled)
        for step in range(WALK_TOKENS):
            choices = _choices(matcher, vocab_size)
            if step == 0 and not choices:
                return "no text matches it"
            texts = [token for token in choices if token not in matcher.stop_token_ids]
            if not texts or not matcher.accept_token(rng.choice(texts)):
                break
            if process_time() - started > MAX_WALK_S:
                return "it is too slow to apply: it has too many ways to match the same text"
    return None


def _choices(matcher: xgrammar.GrammarMatcher, vocab_size: int) -> list[int]:
    words = np.zeros((vocab_size + 31) // 32, np.int32)
    matcher.fill_next_token_bitmask(words)
    ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")).tolist()
    return ids


# -- messages ----------------------------------------------------------------------------------------------------


def write_message(fd: int, value: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the other side is gone."""
    raw = json.dumps(value).encode()
    view = memoryview(struct.pack("<I", len(raw)) + raw)
    while view:
        view = view[os.write(fd, view) :]


def read_message(fd: int, timeout_s: float | None = None) -> dict[str, Any] | None:
    """The next message; None if the other side is gone or takes longer."""
    deadline = None if timeout_s is None else monotonic() + timeout_s
    header = _read(fd, 4, deadline)
    raw = header and _read(fd, struct.unpack("<I", header)[0], deadline)
    value: dict[str, Any] | None = json.loads(raw) if raw else None
    return value


def _read(fd: int, num_bytes: int, deadline: float | None) -> bytes | None:
    parts = []
    while num_bytes > 0:
        left_s = None if deadline is None else max(0.0, deadline - monotonic())
        if not select.select([fd], [], [], left_s)[0]:
            return None
        part = os.read(fd, min(num_bytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
