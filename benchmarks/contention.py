"""What another busy program costs: throughput alone and beside processes that keep every core busy.

    python benchmarks/contention.py [--model mini] [--drafter draft] [--rounds 5]
    python benchmarks/contention.py --busy-starts 20

A fair share is 1 / 2 where one busy process runs on every core. Spinning barriers lose far more than that when a
thread they wait for is not running. Alone and contended runs alternate; prints medians as JSON.

`--busy-starts N`: N new engines with the drafter `auto`, that know nothing, answer three requests twice beside two busy
processes a core, then four times alone. Printed is the speed of each of these four rounds over plain decoding, a line
an engine: costs that were measured in the busy time must not keep drafts away. Questions repeat, so most drafts are
right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine

PROMPT = "Once upon a time there was a little fox who lived near the river and"


SETTLE_S = 0.5  # after busy processes have ended
ASKED = (
    "Repeat this exactly: Clara and Tom flew a red kite behind the baker's house on Sunday.",
    "Give me the name, town and age as JSON: My name is Clara Miller. I live in Elmwood and I am 34 years old.",
    "What can you tell me about France?",
)
BUSY_ROUNDS, QUIET_ROUNDS = 2, 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Throughput beside other busy processes.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--drafter", default="draft")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy-starts", type=int, default=0, help="measure so many engines that start in a busy time")
    given = parser.parse_args()
    if given.busy_starts:
        busy_starts(given.model, given.busy_starts)
        return
    plain = LLM(given.model, max_num_seqs=1, prefix_caching=False, keep_learned=False)
    engines = {"none": plain, given.drafter: plain.with_drafter(given.drafter)}
    rows = {name: measure(llm, given.max_tokens, given.rounds) for name, llm in engines.items()}
    print(json.dumps({"rows": rows, "machine": describe_machine(plain.kernels)}, indent=2))


def measure(llm: LLM, max_tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per second alone and beside one busy process a core, and what is left of the former."""
    tokens_per_s(llm, max_tokens)  # warm-up
    alone, beside = [], []
    for _ in range(rounds):
        sleep(SETTLE_S)
        alone.append(tokens_per_s(llm, max_tokens))
        with busy_cores():
            beside.append(tokens_per_s(llm, max_tokens))
    return {"alone": median(alone), "beside_busy": median(beside), "kept": median(beside) / median(alone)}


def tokens_per_s(llm: LLM, max_tokens: int) -> float:
    """Speed of one greedy request."""
    start = perf_counter()
    llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0))
    return max_tokens / (perf_counter() - start)


def busy_starts(model: str, count: int) -> None:
    """Print a line an engine, then how many of them gained in their last round."""
    last: list[float] = []
    for number in range(count):
        with TemporaryDirectory() as folder, environment("FORERUN_CACHE", folder):  # what others learned is not read
            gains = busy_start(model)
        print(f"{number}: " + "  ".join(f"{gain:.2f}x" for gain in gains), flush=True)
        last.append(gains[-1])
    num_gains = sum(gain > 1.0 for gain in last)
    print(f"last rounds: median {median(last):.2f}x, least {min(last):.2f}x, {num_gains} of {count} above 1")


def busy_start(model: str) -> list[float]:
    """-> speed over plain decoding of each quiet round, the geometric mean of its requests."""
    with busy_cores(2):
        llm = LLM(model, drafter="auto", prefix_caching=False)
        for _ in range(BUSY_ROUNDS):
            for question in ASKED:
                chat_speed(llm, question)
    sleep(SETTLE_S)
    plain, gains = llm.with_drafter("none"), list[float]()
    for number in range(QUIET_ROUNDS):
        order = (plain, llm) if number % 2 else (llm, plain)
        speeds = {(one is llm, question): chat_speed(one, question) for question in ASKED for one in order}
        gains.append(geometric_mean([speeds[True, question] / speeds[False, question] for question in ASKED]))
    return gains


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """A variable has this value while inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def chat_speed(llm: LLM, question: str) -> float:
    """Tokens a second of one answer."""
    answer = llm.chat([[{"role": "user", "content": question}]], SamplingParams(max_tokens=120, temperature=0.0))[0]
    return answer.outputs[0].stats.tokens_per_s


@contextmanager
def busy_cores(each: int = 1) -> Iterator[None]:
    """So many processes a core that never rest, while inside."""
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(core)], stdout=subprocess.PIPE)
        for core in sorted(os.sched_getaffinity(0)) * each
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # it runs
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    main()
