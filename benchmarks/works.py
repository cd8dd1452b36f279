"""The policy beside fixed numbers of drafts on three kinds of work: decoding speed, measured in turns.

    python benchmarks/works.py --prompts question.jsonl [--model mini] [--drafter draft=mini-draft ...] [--quick]

Kinds of work: `spec`, answers of 96 tokens one by one; `short`, answers of 20 to 40 tokens to prompts of 300, one by
one; `batch`, 16 requests at once. Each with every drafter given and every temperature. For each such case the model
decodes plainly, with fixed numbers of drafts and with a policy that knows nothing yet; engines take turns prompt by
prompt, and the order rotates. An engine's seconds are those from first to last token, of a prompt the median over
repeats, added up over prompts. The best of several noisy figures is flattered by the noise.

Prints a line a case, then geometric mean and worst of the policy's speed over the best of plain decoding and the fixed
numbers, and writes benchmarks/results/DATE-NAME.json. It runs from a checkout of an older commit, too. On 2 quiet
cores mini takes about 10 minutes; a 1B model in 4 bits with `--quick` about 20. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.bench.prompts import read_prompts
from forerun.progress import progress_bar

RESULTS = Path(__file__).with_name("results")
WORKS, TEMPERATURES, FIXED = ("spec", "short", "batch"), (0.0, 0.7, 1.0), (2, 4, 6)
OF_MINI = ("draft=mini-draft", "eagle=mini-eagle", "suffix", "portfolio=suffix+draft=mini-draft")
PLAIN, POLICY = "plain", "policy"
BATCH, SPEC_LEN, SHORT_PROMPT, SHORT_LENS, BATCH_PROMPT = 16, 96, 300, (20, 40), 64
PRIVATE: dict[str, Any] = {"across_requests": False, "prefix_caching": False}


class Task(NamedTuple):
    """Prompts that go into the engine together, and how long their answers are."""

    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int
    seed: int


def main() -> None:
    """Measure, print, keep."""
    given = options()
    plain = LLM(given.model, max_num_seqs=BATCH, prefix_caching=False)
    tasks = tasks_of(plain, given)
    rows, drafters = [], given.drafter or OF_MINI
    cases = list(product(given.work or WORKS, given.temperature or TEMPERATURES))
    print("work   drafter     T  best fixed      policy")
    with progress_bar("cases", len(drafters) * len(cases), shown=sys.stderr.isatty()) as advance:
        for drafter in drafters:
            fixed = {str(num): fixed_at(plain, drafter, num) for num in FIXED}
            for work, temperature in cases:
                engines = {PLAIN: plain, **fixed, POLICY: new_policy(plain, drafter)}
                rows.append(measure(work, drafter, temperature, engines, tasks[work], given.repeats))
                print(line(rows[-1]), flush=True)
                advance(1)
    print(summary(rows))
    keep(rows, plain, given)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The policy beside fixed numbers of drafts.")
    parser.add_argument("--model", default="mini", help="a name or a checkpoint's folder")
    parser.add_argument("--prompts", type=Path, help="as Spec-Bench's question.jsonl; those shipped unless given")
    parser.add_argument("--drafter", action="append", help="NAME, NAME=MODEL, portfolio=...; four of mini unless given")
    parser.add_argument("--work", action="append", choices=WORKS, help="all unless given")
    parser.add_argument("--temperature", action="append", type=float, help="0, 0.7 and 1 unless given")
    parser.add_argument("--num-prompts", type=int, default=6, help="of spec and short each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two prompts, once; answers of batches half as long")
    parser.add_argument("--name", default="works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    given = parser.parse_args()
    if given.quick:
        given.num_prompts, given.repeats = 2, 1
    return given


def tasks_of(llm: LLM, given: argparse.Namespace) -> dict[str, list[Task]]:
    """The prompts of every kind of work, the same for all engines; batches are one task."""
    cases = read_prompts(given.prompts)
    every = [tuple(llm.render_chat([{"role": "user", "content": case.turns[0]}])) for case in cases]
    short, lengths = [prompt[-SHORT_PROMPT:] for prompt in every if len(prompt) >= SHORT_PROMPT], random.Random(0)
    spec = spread([prompt for prompt in every if len(prompt) < 3 * SHORT_PROMPT], given.num_prompts)
    batch = tuple(prompt[-BATCH_PROMPT:] for prompt in spread(every, BATCH))
    return {
        "spec": [Task((prompt,), SPEC_LEN, seed) for seed, prompt in enumerate(spec)],
        "short": [
            Task((prompt,), lengths.randint(*SHORT_LENS), seed)
            for seed, prompt in enumerate(spread(short or every, 2 * given.num_prompts))
        ],
        "batch": [Task(batch, SPEC_LEN // (2 if given.quick else 1), 0)],
    }


def spread(prompts: Sequence[tuple[int, ...]], limit: int) -> list[tuple[int, ...]]:
    """At most so many, evenly over the file; fewer are repeated."""
    num = len(prompts)
    return [prompts[index * max(num // limit, 1) % num] for index in range(limit)]


def fixed_at(plain: LLM, drafter: str, num_drafts: int) -> LLM:
    """An engine that always drafts so many."""
    return plain.with_drafter(drafter, adaptive=False, max_draft_tokens=num_drafts, **PRIVATE)


def new_policy(plain: LLM, drafter: str) -> LLM:
    """An engine whose policy starts with nothing that another one learned."""
    os.environ["FORERUN_CACHE"] = tempfile.mkdtemp()
    return plain.with_drafter(drafter, **PRIVATE)


def measure(
    work: str, drafter: str, temperature: float, engines: dict[str, LLM], tasks: Sequence[Task], repeats: int
) -> dict[str, Any]:
    """One case: every engine writes every task in turns, after a few tokens that do not count -> speeds over plain."""
    names, seconds = list(engines), dict[tuple[str, int], list[float]]()
    for llm in engines.values():
        decode(llm, tasks[0]._replace(num_tokens=8), temperature)
    for turn in range(repeats * len(tasks)):
        index, shift = turn % len(tasks), turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds.setdefault((name, index), []).append(decode(engines[name], tasks[index], temperature))
    took = {name: sum(median(seconds[name, index]) for index in range(len(tasks))) for name in names}
    speeds = {name: round(took[PLAIN] / took[name], 4) for name in names}
    best = max((name for name in names if name != POLICY), key=speeds.__getitem__)
    return {"work": work, "drafter": drafter, "temperature": temperature, "speeds": speeds, "best": best,
            "over_best": round(speeds[POLICY] / speeds[best], 4)}  # fmt: skip


def decode(llm: LLM, task: Task, temperature: float) -> float:
    """Seconds from the first token to the last, of the slowest request."""
    params = SamplingParams(max_tokens=task.num_tokens, temperature=temperature, seed=task.seed, ignore_eos=True)
    return max(output.outputs[0].stats.decode_s for output in llm.generate(list(task.prompts), params))


def line(row: dict[str, Any]) -> str:
    """A case in words."""
    speeds, best = row["speeds"], row["best"]
    return (f"{row['work']:6} {row['drafter'].partition('=')[0]:9} {row['temperature']:3.1f}  {best:>5}: "
            f"{speeds[best]:.2f}x   {speeds[POLICY]:.2f}x ({row['over_best']:.3f})   all: {speeds}")  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What the cases come to."""
    ratios, of_plain = [row["over_best"] for row in rows], [row["speeds"][POLICY] for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return (f"policy over the best of plain and {', '.join(map(str, FIXED))} drafts: geometric mean {mean:.3f}, "
            f"at least {min(ratios):.3f}; at least {min(of_plain):.3f} of plain")  # fmt: skip


def keep(rows: Sequence[dict[str, Any]], plain: LLM, given: argparse.Namespace) -> None:
    """Write what was measured, and on what."""
    machine = describe_machine(plain.kernels)
    given.out.mkdir(exist_ok=True)
    path = given.out / f"{machine['date']}-{given.name}.json"
    command = shlex.join(["python", "benchmarks/works.py", *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "cases": rows, "machine": machine}, indent=1) + "\n", "utf-8")
    print(f"\nkept in {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
