"""forerun, llama.cpp, ik_llama.cpp and OpenVINO on one shape and storage, in turns: a dated result and a table.

    python lab/peers.py --shape qwen2.5-0.5b --weights Q4_0,Q8_0,BF16 --threads 2

Needs `pip install llama-cpp-python openvino-genai nncf`, and `--ik-llama LIBRARY` (README.md says how to build it);
engines that are not there are left out and named. Writes benchmarks/results/DATE-peers-SHAPE-WEIGHTS.json and .md.

What is compared: one pass over M tokens after a context, with logits for all M, which is what verification costs.
Random weights are written once into a GGUF file with one block type for all matrices. llama.cpp reads it, ik_llama.cpp
repacks it while loading, OpenVINO GenAI converts it (it gets a file in F16 where the others have BF16), forerun loads
it. So weights and threads are the same. Each engine keeps its own defaults for the KV cache and for activations; the
result names them, and how near its logits are to forerun's (the cosine of the angle between both). `openvino-ir` is
OpenVINO's own best path: other random weights in the same graph, rounded by NNCF to int4 in groups of 128 or to int8,
whichever is nearest.

Every engine is a process of its own on the same cores, and only one works at a time: the barriers of two would spin
against each other. They take turns pass by pass; medians. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from forerun.bench.bandwidth import reader
from forerun.bench.machine import describe_machine
from forerun.bench.shapes import Shape, part_of, read_shape
from forerun.kernels.select import select_kernels
from peer_engines import STORED, file_type
from peer_files import model_file, stored_types

HERE = Path(__file__).resolve().parent
MODULES = {"forerun": "forerun", "llama.cpp": "llama_cpp", "openvino": "openvino_genai", "openvino-ir": "nncf"}
IK_LLAMA = "ik_llama.cpp"  # a library, no module
CHECKED_TOKENS = 16
PAUSE_S = 0.02  # between engines, for the threads of the last one to fall asleep
Times = dict[tuple[str, str, int], list[float]]  # engine, context or "prefill", tokens


def main() -> None:
    """Measure every storage, keep, print."""
    given = options()
    shape, cores = read_shape(given.shape), sorted(os.sched_getaffinity(0))[: given.threads]
    shape = part_of(shape, given.layers, given.vocabulary)
    os.sched_setaffinity(0, cores)  # inherited by every engine
    engines = {name: installed(name, given.ik_llama) for name in given.engines.split(",")}
    missing = [name for name, there in engines.items() if not there]
    present = [name for name, there in engines.items() if there]
    runs = [measure(shape, weights, present, given) for weights in given.weights.split(",")]
    result = {
        "command": " ".join(["python lab/peers.py", *sys.argv[1:]]),
        "shape": given.shape,
        "threads": len(cores),
        "repeats": given.repeats,
        "not_installed": missing,
        "runs": runs,
        "machine": describe_machine(select_kernels("auto", given.threads)),
    }
    keep(result, given.out)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="forerun beside other engines, one pass over M tokens.")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="the first ones only, of models that do not fit")
    parser.add_argument("--vocabulary", type=int, help="so many tokens only, so that a few layers do not drown in it")
    parser.add_argument("--weights", default="Q4_0,Q8_0,BF16", help="block types of GGUF")
    parser.add_argument("--engines", default=",".join((*MODULES, IK_LLAMA)))
    parser.add_argument("--ik-llama", type=Path, help="the library built from lab/ik_llama.cpp")
    parser.add_argument("--tokens", default="1,2,3,4,6,8,12,16,24,32")
    parser.add_argument("--context", default="128")
    parser.add_argument("--prefill", default="512")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--files", type=Path, help="a folder that keeps the models of this shape for another run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", default=HERE.parent / "benchmarks" / "results", type=Path, help="a folder")
    return parser.parse_args()


def installed(name: str, ik_llama: Path | None) -> bool:
    """Whether an engine is there."""
    if name == IK_LLAMA:
        return ik_llama is not None and ik_llama.exists()
    return importlib.util.find_spec(MODULES[name]) is not None


def measure(shape: Shape, weights: str, engines: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """One storage: write the files, start the engines, let them take turns."""
    with tempfile.TemporaryDirectory() as temporary:
        workers, skipped = {}, {}
        for name in engines:
            if why_not := unread(name, shape, weights):
                skipped[name] = why_not
                continue
            file = model_file(shape, file_type(name, weights), given.files or Path(temporary))
            workers[name] = Worker(name, {"file": str(file), **settings(shape, weights, given)})
        try:
            times, speeds = take_turns(workers, given)
            near = agreement({name: worker for name, worker in workers.items() if name != "openvino-ir"})
            compared = {
                name: {"version": worker.version, "compared": worker.compared, "cosine": near.get(name)}
                for name, worker in workers.items()
            }
        finally:
            for worker in workers.values():
                worker.stop()
    rows = rows_of(times)
    return {
        "weights": weights,
        "rows": rows,
        "engines": compared,
        "skipped": skipped,
        "read_gb_per_s": round(median(speeds) / 1e9, 2),
    }


def unread(name: str, shape: Shape, weights: str) -> str | None:
    """Why an engine cannot have a storage; None if it can."""
    types = stored_types(shape, file_type(name, weights)) - STORED[name].keys() if name in STORED else ()
    return f"it cannot have {', '.join(sorted(types))}" if types else None


def settings(shape: Shape, weights: str, given: argparse.Namespace) -> dict[str, Any]:
    """What an engine is started with besides its file."""
    numbers = [int(number) for number in given.tokens.split(",")]
    longest = max(max(map(int, given.context.split(","))) + max(numbers), *map(int, given.prefill.split(",")))
    return {
        "type": weights,
        "threads": given.threads,
        "max_rows": longest,
        "vocab_size": shape.config.vocab_size,
        "ik_llama": str(given.ik_llama and given.ik_llama.resolve()),
    }


class Worker:
    """An engine in a process of its own."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(given["threads"])}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_engines.py"), name, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        about = json.loads(self._answer())
        self.version, self.compared = about["version"], about["compared"]

    def seconds(self, first: str, tokens: int) -> float:
        """Time a pass: `first` is a context or "prefill"."""
        assert self._process.stdin is not None
        print(first, tokens, file=self._process.stdin, flush=True)
        return float(self._answer())

    def logits(self, tokens: int) -> list[float]:
        """The last row of logits after `tokens` tokens."""
        assert self._process.stdin is not None
        print("logits", tokens, file=self._process.stdin, flush=True)
        row: list[float] = json.loads(self._answer())
        return row

    def stop(self) -> None:
        """End of its input ends it."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[2]} ended: see its message above")  # type: ignore[index]
        return line


def take_turns(workers: dict[str, Worker], given: argparse.Namespace) -> tuple[Times, list[float]]:
    """Every pass of every engine `repeats` times; the first turn does not count."""
    cases = [(context, int(number)) for context in given.context.split(",") for number in given.tokens.split(",")]
    cases += [("prefill", int(number)) for number in given.prefill.split(",")]
    times: Times = {(name, *case): [] for name in workers for case in cases}
    speeds = []
    with reader(select_kernels("auto", given.threads), given.threads) as read_speed:
        for turn in range(given.repeats + 1):
            speed = read_speed()
            for case in cases:
                for name, worker in workers.items():
                    time.sleep(PAUSE_S)
                    seconds = worker.seconds(*case)
                    if turn:
                        times[name, *case].append(seconds)
            speeds += [speed] if turn else []
            print(f"turn {turn} of {given.repeats}", file=sys.stderr)
    return times, speeds


def agreement(workers: dict[str, Worker]) -> dict[str, float]:
    """The cosine of the angle between an engine's logits and those of the first."""
    rows = {name: torch.tensor(worker.logits(CHECKED_TOKENS)) for name, worker in workers.items()}
    first = next(iter(rows.values()))
    return {name: round(float(torch.cosine_similarity(row, first, dim=0)), 6) for name, row in rows.items()}


def rows_of(times: Times) -> list[dict[str, Any]]:
    """A row an engine and pass; medians, and ratios to one token of the same engine."""
    typical = {case: median(seconds) for case, seconds in times.items()}
    rows = []
    for (engine, first, tokens), seconds in typical.items():
        row: dict[str, Any] = {"engine": engine, "tokens": tokens, "ms": round(seconds * 1e3, 3)}
        if first == "prefill":
            row |= {"prefill": True, "tokens_per_s": round(tokens / seconds, 1)}
        else:
            one = typical.get((engine, first, 1))
            row |= {"context": int(first), "ratio": round(seconds / one, 3) if one else None}
        rows.append(row)
    return rows


def keep(result: dict[str, Any], folder: Path) -> None:
    """JSON and Markdown, named by the instruction set too: machines differ from day to day, and within one."""
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(result["shape"]).stem if result["shape"].endswith(".json") else result["shape"]
    machine = result["machine"]
    parts = [machine["date"], "peers", name, *(run["weights"] for run in result["runs"]), machine["kernels"].split()[0]]
    path = folder / f"{'-'.join(parts)}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    text = markdown(result)
    path.with_suffix(".md").write_text(text + "\n", "utf-8")
    print(text)
    print(f"\nkept in {path} and .md", file=sys.stderr)


def markdown(result: dict[str, Any]) -> str:
    """A table a storage and context: a row an engine, a column a number of tokens."""
    parts = []
    for run in result["runs"]:
        for context in sorted({row["context"] for row in run["rows"] if "context" in row}):
            parts.append(table(result["shape"], run, context))
        notes = [
            f"{name} {about['version']}: {about['compared']}, cosine {about['cosine'] or 'none: other weights'}"
            for name, about in run["engines"].items()
        ]
        notes += [f"{name} was left out: {reason}" for name, reason in run["skipped"].items()]
        parts.append("\n".join(f"* {note}" for note in [*notes, f"memory read at {run['read_gb_per_s']} GB/s"]))
    machine = result["machine"]
    place = f"{machine['cpu']}, {result['threads']} threads, kernels {machine['kernels']}, commit {machine['commit']}"
    missing = [f"Not installed: {', '.join(result['not_installed'])}."] if result["not_installed"] else []
    return "\n\n".join([*parts, *missing, f"{place}, {machine['date']}:", f"```\n{result['command']}\n```"])


def table(shape: str, run: dict[str, Any], context: int) -> str:
    """Milliseconds of a pass, its ratio at 8 tokens, tokens a second of prompts."""
    rows = [row for row in run["rows"] if row.get("context") == context]
    prompts = sorted({row["tokens"] for row in run["rows"] if row.get("prefill")})
    numbers = sorted({row["tokens"] for row in rows})
    heads = [f"{shape} {run['weights']}, context {context}", *map(str, numbers), "t8/t1"]
    lines = [[*heads, *(f"prefill {number}, tokens/s" for number in prompts)]]
    lines.append(["---"] * len(lines[0]))
    for engine in run["engines"]:
        own = {row["tokens"]: row for row in rows if row["engine"] == engine}
        eight = own.get(8, {}).get("ratio")
        cells = [f"{own[number]['ms']:.1f}" for number in numbers]
        cells.append(f"{eight:.2f}" if eight else "-")
        rates = [row for row in run["rows"] if row["engine"] == engine and row.get("prefill")]
        cells += [f"{row['tokens_per_s']:.0f}" for row in sorted(rates, key=lambda row: row["tokens"])]
        lines.append([engine, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
