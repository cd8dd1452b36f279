"""What another busy program costs: throughput alone and beside processes that keep every core busy.

    python benchmarks/contention.py [--model mini] [--drafter draft] [--rounds 5]

A fair share is 1 / 2 where one busy process runs on every core. Spinning barriers lose far more than that when a
thread they wait for is not running. Alone and contended runs alternate; prints medians as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter, sleep
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine

PROMPT = "Once upon a time there was a little fox who lived near the river and"


SETTLE_S = 0.5  # after busy processes have ended


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Throughput beside other busy processes.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--drafter", default="draft")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    plain = LLM(given.model, max_num_seqs=1, prefix_caching=False)
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


@contextmanager
def busy_cores() -> Iterator[None]:
    """One process a core that never rests, while inside."""
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(core)], stdout=subprocess.PIPE)
        for core in sorted(os.sched_getaffinity(0))
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
