"""One process with all cores beside processes that share a model with a core each: time of a pass, and what travels.

    python benchmarks/degrees.py [--model FOLDER] [--setups 1x2,tp2x1,pp2x1,1x1] [--rows 1,8,512] [--repeats 5]
        [--machines 4] [--gbit 10] [--latency-us 30]

A setup is DEGREExTHREADS: 1, tp2, pp2 and so on processes of so many threads each. Each is a process that loads the
model once and then takes turns with the others. Up to 32 rows are steps of so many requests that decode plainly, the
difference of long and short answers; more are a prompt of that length with one token. Times are medians over repeats.
Bytes and messages are those that rank 0 sends to other ranks in a pass. Tokens are compared across setups.

By arithmetic: what `--machines` machines would take over a network of `--gbit` Gbit/s, each as fast as the one process:
its time divided by the machines, all bytes of a machine through one port, and `--latency-us` for each exchange.
Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any, NamedTuple

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine, machine_line
from forerun.kernels.ranks import Ranks
from forerun.runtime.parallel.exchange import Exchange

SHORT, LONG = 4, 36  # tokens of answers; passes of prompts and of the first step are in both
MOST_DECODED = 32
TEXT = "the old boat went out to sea and came back with the morning tide "


class Pass(NamedTuple):
    """A pass of a number of rows: seconds, what rank 0 sent, and tokens of all requests."""

    seconds: float
    sent_bytes: float
    messages: float
    tokens: list[list[int]]


def main() -> None:
    """Start every setup, take turns, print."""
    given = options()
    rows = [int(each) for each in given.rows.split(",")]
    children = {setup: start(setup, given.model) for setup in given.setups.split(",")}
    found: dict[tuple[str, int], list[Pass]] = {}
    try:
        for turn in range(given.repeats + 1):  # the first warms up
            for num in rows:
                for setup, child in children.items():
                    result = asked(child, num)
                    if turn > 0:
                        found.setdefault((setup, num), []).append(result)
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait(60)
    print(machine_line({**describe_machine(), "kernels": "cpu"}))
    for num in rows:
        if len({json.dumps(each.tokens) for setup in children for each in found[setup, num]}) > 1:
            sys.exit(f"tokens of {num} rows differ between setups")
        for setup in children:
            print(line(setup, num, found[setup, num]))
    arithmetic(given, rows, found, next(iter(children)))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Speed of a shared model, and what travels.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--setups", default="1x2,tp2x1,pp2x1,1x1")
    parser.add_argument("--rows", default="1,8,512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--gbit", type=float, default=10.0)
    parser.add_argument("--latency-us", type=float, default=30.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        serve(given.child, given.model)
        sys.exit()
    return given


def start(setup: str, model: str) -> Any:
    """A process that waits for numbers of rows on its standard input."""
    command = [sys.executable, __file__, "--model", model, "--child", setup]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    if child.stdout.readline() != "ready\n":
        sys.exit(f"{setup} did not start")
    return child


def asked(child: Any, num_rows: int) -> Pass:
    """One measurement of a setup."""
    child.stdin.write(f"{num_rows}\n")
    child.stdin.flush()
    return Pass(*json.loads(child.stdout.readline()))


def serve(setup: str, model: str) -> None:
    """What a child does."""
    degree, threads = setup.split("x")
    shared = {"tp": "tensor_parallel", "pp": "pipeline_parallel"}.get(degree[:2])
    degrees = {shared: int(degree[2:])} if shared else {}
    llm = LLM(
        model, max_num_seqs=MOST_DECODED, prefix_caching=False, keep_learned=False, max_model_len=1024,
        max_num_batched_tokens=1024, threads=int(threads), **degrees,
    )  # fmt: skip
    senders = [each for each in gc.get_objects() if issubclass(type(each), Ranks | Exchange)]
    print("ready", flush=True)
    for line_in in sys.stdin:
        print(json.dumps(measured(llm, senders, int(line_in))), flush=True)


def measured(llm: LLM, senders: list[Any], num_rows: int) -> Pass:
    """One pass of that many rows."""
    words = llm.tokenizer.encode(TEXT * 80)
    if num_rows > MOST_DECODED:
        return run(llm, senders, [words[:num_rows]], 1)
    prompts = [words[start : start + 16] for start in range(num_rows)]
    short, long = (run(llm, senders, prompts, num) for num in (SHORT, LONG))
    each = [(more - less) / (LONG - SHORT) for more, less in zip(long[:3], short[:3], strict=True)]
    return Pass(each[0], each[1], each[2], long.tokens)


def run(llm: LLM, senders: list[Any], prompts: list[list[int]], max_tokens: int) -> Pass:
    """All passes of some requests."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    before = [(each.sent_bytes, each.messages) for each in senders]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    sent = [(each.sent_bytes - a, each.messages - b) for each, (a, b) in zip(senders, before, strict=True)]
    tokens = [output.outputs[0].token_ids for output in outputs]
    return Pass(seconds, sum(num for num, _ in sent), sum(num for _, num in sent), tokens)


def line(setup: str, num_rows: int, passes: list[Pass]) -> str:
    """A setup's median and range."""
    seconds = sorted(each.seconds for each in passes)
    sent, messages = passes[0].sent_bytes, passes[0].messages
    least, usual, most = (1e3 * each for each in (seconds[0], median(seconds), seconds[-1]))
    times = f"{usual:.2f} ms ({least:.2f} to {most:.2f})"
    return f"{num_rows} rows, {setup}: {times}, {sent:,.0f} bytes in {messages:.0f} messages"


def arithmetic(given: argparse.Namespace, rows: list[int], found: dict[tuple[str, int], list[Pass]], one: str) -> None:
    """What several machines would take, from one process and what two shards exchange."""
    pairs = [setup for setup, num in found if setup.startswith("tp2") and num == rows[0]]
    for num in rows if pairs else ():
        alone = median(each.seconds for each in found[one, num])
        sent, exchanges = found[pairs[0], num][0].sent_bytes, found[pairs[0], num][0].messages
        # a part of 1/2 went to one rank; of n it is 1/n, to n - 1
        port = 8 * sent * 2 / given.machines * (given.machines - 1) / (given.gbit * 1e9)
        waits = exchanges * given.latency_us * 1e-6
        parts = (alone / given.machines, port, waits)
        computing, sending, waiting = (f"{1e3 * part:.2f}" for part in parts)
        print(
            f"{num} rows on {given.machines} machines: {computing} ms computing, {sending} sending, {waiting} waiting "
            f"= {1e3 * sum(parts):.2f} ms, {alone / sum(parts):.2f}x of one"
        )


if __name__ == "__main__":
    main()
