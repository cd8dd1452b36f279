"""forerun's server beside llama-server and OpenVINO GenAI: one model file, the same prompts, one and many at a time.

    python lab/serving_peers.py --llama-server PATH [--shape qwen2.5-0.5b] [--weights Q8_0,Q4_0,BF16]
        [--concurrency 16] [--num-requests 32] [--input-len 64] [--max-tokens 128]

Random weights of a shape are written into a GGUF file that all engines read (`peer_files`; OpenVINO GenAI converts it
once, and gets F16 for BF16; `openvino-ir` is the same graph with weights in OpenVINO's own int4 or int8). Prompts are
token ids, no two alike; every answer has --max-tokens greedy tokens. forerun drafts nothing and has no prefix cache:
this measures continuous batching alone. llama-server gets as many slots as requests at a time and the whole context for
each. forerun and llama-server stream over HTTP; OpenVINO GenAI has no server of its own and is called in its process,
which spares it that.

Engines run one after the other, alone on the machine. Those that are missing are left out and named. Writes
benchmarks/results/DATE-NAME.json and prints Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from forerun.bench.serve_client import api_root, open_client
from forerun.bench.serve_load import LoadRun, OfferedLoad
from forerun.bench.serve_report import Objective, summary
from forerun.bench.serve_workload import Ask, RequestFields
from forerun.bench.shapes import read_shape
from peer_engines import IR_BITS, STORED, compressed, converted, file_type
from peer_files import model_file
from peers import unread

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from serving import RESULTS, keep, machine, server

START_S = 120.0  # for llama-server to load its file
TIMEOUT_S = 600.0  # for a request
WARM_UP, WARM_UP_TOKENS = "warm-up", 8  # a load that does not count
Report = dict[str, Any]


def main() -> None:
    """Answer as OpenVINO's process if asked to, else measure, keep, print."""
    if sys.argv[1:] == ["openvino"]:
        openvino_process(json.load(sys.stdin))
        return
    given = options()
    result: Report = {
        "command": shlex.join(["python", "lab/serving_peers.py", *sys.argv[1:]]),
        **settings(given),
    }
    result["runs"] = {weights: measure(given, weights) for weights in given.weights.split(",")}
    result["machine"] = machine()
    keep(result, given, markdown(result))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="forerun's server beside others, one and many requests at a time.")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--weights", default="Q8_0", help="block types of GGUF, with commas")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--llama-server", type=Path, help="the program")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--num-alone", type=int, default=4, help="requests of the measurement one at a time")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--files", type=Path, help="a folder that keeps the models of this shape for another run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="serving-peers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    return parser.parse_args()


def settings(given: argparse.Namespace) -> Report:
    """What was asked for, without paths."""
    return {name: value for name, value in vars(given).items() if not isinstance(value, Path)}


# -- what is asked ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation of one turn, in token ids."""

    ids: tuple[int, ...]
    turns: tuple[str, ...] = ("",)

    def ask(self, answers: Sequence[str], fields: Mapping[str, Any]) -> Ask:
        """The request."""
        return Ask("/completions", {"prompt": list(self.ids), **fields})


def prompts(count: int, length: int, vocab_size: int, seed: str) -> list[Prompt]:
    """Random ones; the last token of the vocabulary ends texts and is left out."""
    draw = random.Random(seed)
    return [Prompt(tuple(draw.randrange(vocab_size - 1) for _ in range(length))) for _ in range(count)]


def loads(given: argparse.Namespace) -> dict[str, tuple[list[Prompt], int]]:
    """What is sent, in order: name -> prompts, how many at a time."""
    vocab_size = read_shape(given.shape).config.vocab_size

    def some(count: int, seed: str) -> list[Prompt]:
        return prompts(count, given.input_len, vocab_size, seed)

    return {
        WARM_UP: (some(given.concurrency, WARM_UP), given.concurrency),
        "alone": (some(given.num_alone, "alone"), 1),
        "together": (some(given.num_requests, "together"), given.concurrency),
    }


# -- engines ----------------------------------------------------------------------------------------------------


def measure(given: argparse.Namespace, weights: str) -> Report:
    """Every engine on one storage, one after the other."""
    found: Report = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.files or Path(temporary)
        for name in given.engines:
            why_not = missing(name, given, weights)
            print(f"{weights}: {name}{f' is left out: {why_not}' if why_not else ''}", file=sys.stderr)
            found[name] = {"left_out": why_not} if why_not else ENGINES[name](given, weights, folder)
    return found


def missing(name: str, given: argparse.Namespace, weights: str) -> str | None:
    """Why an engine cannot be measured; None if it can."""
    if name == "llama-server" and not given.llama_server:
        return "no --llama-server was given"
    if why_not := unread(name, read_shape(given.shape), weights):
        return why_not
    if name in STORED and not importlib.util.find_spec("openvino_genai"):
        return "openvino-genai is not installed"
    return "nncf is not installed" if name == "openvino-ir" and not importlib.util.find_spec("nncf") else None


def forerun(given: argparse.Namespace, weights: str, folder: Path) -> Report:
    """`forerun serve` without drafts and prefix cache."""
    arguments = ["--drafter", "none", "--no-prefix-caching", "--max-num-seqs", str(given.concurrency),
                 "--threads", str(given.threads), "--max-model-len", str(context(given))]  # fmt: skip
    file = model_file(read_shape(given.shape), weights, folder)
    with server(str(file), arguments) as (url, _):
        return asyncio.run(over_http(url, given))


def llama_server(given: argparse.Namespace, weights: str, folder: Path) -> Report:
    """llama-server with a slot a request."""
    file = model_file(read_shape(given.shape), weights, folder)
    command = [str(given.llama_server), "-m", str(file), "-np", str(given.concurrency),
               "-c", str(given.concurrency * context(given)), "-t", str(given.threads), "--no-webui"]  # fmt: skip
    with started(command) as url:
        return asyncio.run(over_http(url, given))


def openvino(given: argparse.Namespace, weights: str, folder: Path, name: str = "openvino") -> Report:
    """OpenVINO GenAI's continuous batching, in a process of its own."""
    file = model_file(read_shape(given.shape), file_type(name, weights), folder)
    asked = {name: ([p.ids for p in some], at_once, num_tokens(name, given))
             for name, (some, at_once) in loads(given).items()}  # fmt: skip
    bits = IR_BITS[weights] if name == "openvino-ir" else None
    told = {"file": str(file), "bits": bits, "threads": given.threads, "loads": asked}
    command = [sys.executable, __file__, "openvino"]
    done = subprocess.run(command, input=json.dumps(told), stdout=subprocess.PIPE, check=True, text=True)
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


ENGINES: dict[str, Callable[[argparse.Namespace, str, Path], Report]] = {
    "forerun": forerun, "llama-server": llama_server, "openvino": openvino,
    "openvino-ir": partial(openvino, name="openvino-ir"),
}  # fmt: skip


def context(given: argparse.Namespace) -> int:
    """Tokens a request may have, in whole blocks of any engine."""
    return -(-(given.input_len + given.max_tokens + 1) // 256) * 256


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """llama-server on a free port, ready -> its address. Raises RuntimeError if it ends or is not ready in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until /health says 200."""
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not become ready (exit status {process.poll()})")


# -- over HTTP --------------------------------------------------------------------------------------------------


async def over_http(url: str, given: argparse.Namespace) -> Report:
    """All loads on one server. Raises RuntimeError if a request failed or had another length."""
    found: Report = {}
    async with open_client(api_root(url), None, TIMEOUT_S, keep_alive=False) as client:
        model = await client.first_model()
        for name, (some, at_once) in loads(given).items():
            fields = RequestFields(model, num_tokens(name, given), 0.0, 0, extra={"ignore_eos": True})
            outcomes = await LoadRun(client, fields)(some, OfferedLoad(at_once, None, 0))  # type: ignore[arg-type]
            figures = summary(outcomes, Objective())
            written = {outcome.num_tokens for outcome in outcomes}
            if figures["errors"] or written != {fields.max_tokens}:
                raise RuntimeError(f"{url}: errors {figures['errors']}, tokens {sorted(written)}")
            found[name] = figures
    return {name: row(figures) for name, figures in found.items() if name != WARM_UP}


def num_tokens(name: str, given: argparse.Namespace) -> int:
    """Of every answer of a load."""
    return WARM_UP_TOKENS if name == WARM_UP else given.max_tokens


def row(figures: Report) -> Report:
    """What is kept of a load."""
    ttft, tpot = figures["ttft_s"], figures["tpot_s"]
    return {
        "tokens_per_s": round(figures["output_tokens_per_s"], 3),
        "duration_s": figures["duration_s"],
        "ttft_p50_ms": round(ttft["p50"] * 1e3, 3),
        "tpot_p50_ms": round(tpot["p50"] * 1e3, 3),
        "tpot_p99_ms": round(tpot["p99"] * 1e3, 3),
    }


# -- OpenVINO's process -----------------------------------------------------------------------------------------


def openvino_process(told: Report) -> None:
    """Load the file named there, generate all loads, print what they took."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config = genai.GenerationConfig()
    folder = converted(Path(told["file"]))
    folder = compressed(folder, told["bits"]) if told["bits"] else folder
    pipeline = continuous(folder, told["threads"], max(at_once for _, at_once, _ in told["loads"].values()))
    found: Report = {}
    for name, (some, at_once, max_tokens) in told["loads"].items():
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in some]
        turns = [inputs] if at_once > 1 else [[one] for one in inputs]  # the pipeline itself keeps to its most
        began = time.perf_counter()
        answers = [answer for turn in turns for answer in pipeline.generate(turn, [config] * len(turn))]
        seconds = time.perf_counter() - began
        written = [len(answer.m_generation_ids[0]) for answer in answers]
        assert set(written) == {max_tokens}, f"answers of {sorted(set(written))} tokens"
        found[name] = {"tokens_per_s": round(sum(written) / seconds, 3), "duration_s": round(seconds, 6)}
    del found[WARM_UP]
    print("\n" + json.dumps(found), flush=True)


def continuous(folder: Path, threads: int, at_once: int) -> Any:
    """A pipeline that works on `at_once` requests at a time."""
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs, scheduling.cache_size, scheduling.enable_prefix_caching = at_once, 1, False
    properties = {"INFERENCE_NUM_THREADS": threads}
    return genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", properties)


# -- Markdown ---------------------------------------------------------------------------------------------------

COLUMNS = ("engine", "alone, tokens/s", "together, tokens/s", "times", "TTFT p50, ms", "TPOT p50, ms", "TPOT p99, ms",
           "forerun is")  # fmt: skip


def markdown(result: Report) -> str:
    """A table a storage, and what it was taken on."""
    facts = result["machine"]
    place = f"{facts['cpu']}, {result['threads']} threads, kernels {facts['kernels']}, commit {facts['commit']}"
    told = (
        f"{result['shape']}, prompts of {result['input_len']} tokens, answers of {result['max_tokens']}, "
        f"{result['concurrency']} at a time."
    )
    tables = [f"{weights}\n\n{table(run)}" for weights, run in result["runs"].items()]
    return "\n\n".join([told, *tables, f"{place}, {facts['date']}: `{result['command']}`"])


def table(run: Report) -> str:
    """A row an engine."""
    own = run.get("forerun", {}).get("together")
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for name, found in run.items():
        if "left_out" in found:
            lines.append(f"| {name} | left out: {found['left_out']} | | | | | | |")
            continue
        alone, together = found["alone"], found["together"]
        cells = [f"{alone['tokens_per_s']:.1f}", f"{together['tokens_per_s']:.1f}"]
        cells.append(f"{together['tokens_per_s'] / alone['tokens_per_s']:.2f}")
        cells += [
            f"{together[key]:.1f}" if key in together else "-" for key in ("ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms")
        ]
        cells.append(f"{own['tokens_per_s'] / together['tokens_per_s']:.2f}x" if own else "-")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
