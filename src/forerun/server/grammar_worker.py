"""Compiles grammars and computes masks in processes of their own, so that a hostile grammar can be stopped.

Run as `python -m forerun.server.grammar_worker`, with a socket as standard input. Knows: xgrammar's compiler. Does not
know: requests. Every grammar is compiled in a fork of this process, which the kernel ends when it takes too long or
grows too large; the fork then keeps the grammar, and for each request that uses it forks a process for its masks.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import process_time
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xgrammar

from forerun.server.grammar_matcher import Matcher, serve
from forerun.server.grammar_messages import receive, receive_handed, send
from forerun.server.json_pattern import with_patterns
from forerun.server.json_schema import schema_text
from forerun.server.json_strings import both_grammar, longest_strings
from forerun.server.json_values import multiple_grammar, unique_grammar

MEMORY_BYTES = 2 << 30  # beyond what the process has when it starts
NICENESS = 5  # the engine, which every request waits for, has priority
NUM_WALKS, WALK_TOKENS = 2, 48  # random texts tried against a grammar
MAX_WALK_S = 4.0  # CPU time of all of them: some tens of milliseconds per token


def vocabulary_info(vocabulary: Sequence[bytes], stop_token_ids: Sequence[int]) -> xgrammar.TokenizerInfo:
    """xgrammar's view of a vocabulary: the bytes of each token id, b"" for tokens without text."""
    return xgrammar.TokenizerInfo(
        list(vocabulary), vocab_type=xgrammar.VocabType.RAW, vocab_size=len(vocabulary),
        stop_token_ids=list(stop_token_ids), add_prefix_space=False,
    )  # fmt: skip


class GrammarVocabulary(NamedTuple):
    """The vocabulary that all grammars are compiled for, and its compiler."""

    compiler: xgrammar.GrammarCompiler
    tokens: list[bytes]
    stop_token_ids: list[int]


def main() -> None:
    """Read a vocabulary, then grammars, each with a socket to the asking process, until the input ends."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)  # standard output is the server's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended forks do not become zombies
    hello = receive(channel)
    if hello is None:
        return
    tokens = [name.encode("latin-1") for name in hello.value["vocabulary"]]
    info = vocabulary_info(tokens, hello.value["stop_token_ids"])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    vocabulary = GrammarVocabulary(compiler, tokens, hello.value["stop_token_ids"])
    os.nice(NICENESS)
    gc.freeze()  # forks then share these objects' memory instead of copying it
    send(channel, {"status": "ready"})
    while (asked := receive(channel)) is not None:
        if asked.handed is not None:
            if os.fork() == 0:
                channel.close()
                _end_after(_hold, asked.handed, vocabulary, asked.value)
            asked.handed.close()


def _end_after(work: Callable[..., None], *arguments: Any) -> NoReturn:
    """Run `work` in a fork, then end the fork, so that it does not continue the parent's work."""
    try:
        work(*arguments)
    except (OSError, MemoryError):  # the asking process is gone, or notices that the socket is closed
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _hold(channel: socket.socket, vocabulary: GrammarVocabulary, asked: dict[str, Any]) -> None:
    """Compile a grammar, report the result, and keep it for requests: each sends a socket to get its masks on."""
    signal.setitimer(signal.ITIMER_REAL, asked["timeout_s"])  # SIGALRM ends a process that has no handler for it
    _limit_memory()
    compiled, refused = _compile_or_refuse(vocabulary, asked["kind"], asked["text"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    send(channel, {"refused": refused})
    if compiled is None:
        return
    longest = longest_strings(json.loads(asked["text"])) if asked["kind"] == "json" else None
    gc.freeze()
    while (handed := receive_handed(channel, 1)[1]) is not None:
        if os.fork() == 0:
            channel.close()
            _end_after(serve, handed, Matcher(compiled, vocabulary.tokens, vocabulary.stop_token_ids, longest))
        handed.close()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:  # Linux
        most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _compile_or_refuse(
    vocabulary: GrammarVocabulary, kind: str, text: str
) -> tuple[xgrammar.CompiledGrammar | None, str | None]:
    """The grammar, or the reason why it was refused. Raises MemoryError."""
    try:
        with _captured_stderr() as warnings:
            compiled = compile_grammar(vocabulary.compiler, kind, text)
        refused = _message(warnings[0]) if warnings else _walk(compiled, len(vocabulary.tokens))
    except MemoryError:
        raise
    except Exception as error:  # the library raises RuntimeError for anything it refuses
        refused = _message(str(error))
    return (compiled, None) if refused is None else (None, refused)


def compile_grammar(compiler: xgrammar.GrammarCompiler, kind: str, text: str) -> xgrammar.CompiledGrammar:
    """Compile; JSON is written on one line, as by json.dumps, so models cannot loop in blanks. Raises many things."""
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        return compiler.compile_grammar(text)
    schema = schema_text(json.loads(text))
    grammar = xgrammar.Grammar.from_json_schema(schema, strict_mode=False, any_whitespace=False)
    return compiler.compile_grammar(with_patterns(str(grammar), _CONVERT))


_CONVERT: dict[str, Callable[[str], str]] = {
    "": lambda regex: str(xgrammar.Grammar.from_regex(regex)),
    "both": both_grammar,
    "unique": unique_grammar,
    "multiple": multiple_grammar,
}


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Lines written to standard error inside, by native code too: the library warns there about what it ignores."""
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
    _, found, behind = first.partition(".cc:")
    return (behind.partition(": ")[2].strip() if found else first) or first


def _walk(compiled: xgrammar.CompiledGrammar, vocab_size: int) -> str | None:
    """Write a few random texts -> why this grammar is too slow to use or matches nothing, else None."""
    rng, started = random.Random(0), process_time()
    for _ in range(NUM_WALKS):
        matcher = xgrammar.GrammarMatcher(compiled)
        ends = set(matcher.stop_token_ids)  # asking for it takes as long as a mask
        for step in range(WALK_TOKENS):
            choices = _choices(matcher, vocab_size)
            if step == 0 and not choices:
                return "no text matches it"
            texts = [token for token in choices if token not in ends]
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


if __name__ == "__main__":
    main()
