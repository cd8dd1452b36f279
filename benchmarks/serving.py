"""What serving many users brings, each part switched off in turn: a dated result and a table.

    python benchmarks/serving.py --model mini [--four-bit FOLDER] [--drafter ngram] [--num-requests 64] [--repeats 1]
        [--only batching prefix chats parts adapters] [--prefix-drafters none,mtp=FOLDER] [--turns 4] [--rank 16]

`--model` is anything `forerun serve` takes: the embedded model, one that `lab/widen.py` made, random weights of
some shape (`lab/serving_peers.py` compares batching with other engines). Five measurements, each through
`forerun bench serve --json` against a `forerun serve` of its own:

* batching: the same requests one at a time and 16 at a time;
* prefix: the time to the first token behind a prefix that is new, and behind one that another request had, and how many
  tokens of prompts came from the cache, with each of several drafters;
* chats: conversations of several turns behind one system message, with the prefix cache and without;
* parts: a shared-prefix chat workload with continuous batching, prefix cache, 4-bit weights and speculation together,
  with each of them switched off, and with none;
* adapters: many requests at a time without an adapter, all with the same one, and with eight by turns. These are random
  ones, of every matrix of attention and feed-forward layers.

Random weights say what things cost, not what drafts are accepted: give speculation a trained model. Writes
benchmarks/results/DATE-NAME.json and prints Markdown. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

RESULTS = Path(__file__).with_name("results")
FORERUN = (sys.executable, "-m", "forerun.cli")
SWITCHES = {  # part -> what switches it off; 4-bit weights are another model
    "prefix cache": ["--no-prefix-caching"],
    "batching": ["--max-num-seqs", "1"],
    "speculation": ["--drafter", "none"],
}
FRESH = ["--no-keep-learned"]  # a policy that knows nothing of earlier runs
FOUR_BIT = "4-bit weights"
Report = dict[str, Any]


def main() -> None:
    """Measure, keep, print."""
    given = options()
    measured = {name: MEASUREMENTS[name][0](given) for name in given.only}
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    result = {"command": shlex.join(["python", "benchmarks/serving.py", *sys.argv[1:]]), **settings, **measured}
    result["machine"] = machine()
    keep(result, given, markdown(result))


def keep(result: Report, given: argparse.Namespace, table: str) -> None:
    """Write what was measured to OUT/DATE-NAME.json and print its table."""
    given.out.mkdir(exist_ok=True)
    path = given.out / f"{result['machine']['date']}-{given.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(table)
    print(f"\nkept in {path}", file=sys.stderr)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What serving many users brings, each part switched off in turn.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--four-bit", help="the same model in 4 bits; written as Q4_0 (GGUF) unless given")
    parser.add_argument("--drafter", default="ngram", help="NAME or NAME=MODEL")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prefix-len", type=int, default=1024)
    parser.add_argument("--num-prefixes", type=int, default=8, help="of the measurement of cold and warm prefixes")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--prefix-drafters", help="NAME or NAME=MODEL, with commas; --drafter unless given")
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=MEASUREMENTS, help="measurements")
    parser.add_argument("--repeats", type=int, default=1, help="of everything, in turns; medians")
    parser.add_argument("--name", default="serving")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    return parser.parse_args()


# -- processes --------------------------------------------------------------------------------------------------


@contextmanager
def server(model: str, arguments: Sequence[str] = (), command: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """A server on a free port -> its address and process; what it logs is read and dropped.

    `command`: instead of `forerun serve`. Raises RuntimeError if it ends before it listens.
    """
    start = [*(command or (*FORERUN, "serve")), model, "--port", "0", *arguments]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        yield _address(process.stderr, lines), process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _address(log: Any, lines: list[str]) -> str:
    for line in log:
        lines.append(line)
        if found := re.search(r"listening.*http://127\.0\.0\.1:(\d+)", line):
            Thread(target=lambda: [None for _ in log], daemon=True).start()  # or the pipe would fill up
            return f"http://127.0.0.1:{found[1]}"
    raise RuntimeError("the server did not start:\n" + "".join(lines[-20:]))


def load(url: str, **given: Any) -> Report:
    """One `forerun bench serve --json`. Raises RuntimeError if a request failed: figures of such a run mean little."""
    named = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    arguments = ["bench", "serve", url, "--json", "--ignore-eos", *named]
    done = subprocess.run([*FORERUN, *arguments], stdout=subprocess.PIPE, check=True)
    report: Report = json.loads(done.stdout)
    if report["errors"]:
        raise RuntimeError(f"requests failed: {report['errors']}")
    return report


def write_four_bit(model: str, folder: Path) -> str:
    """The model's matrices in blocks of 32 with 4 bits each -> a file."""
    from forerun.models.gguf_export import export_gguf
    from forerun.weights.resolve import resolve_model

    file = folder / "four-bit.gguf"
    export_gguf(resolve_model(model), file, "Q4_0", Path(model).name, lambda done, total: None)
    return str(file)


def machine() -> dict[str, Any]:
    """What everything was measured on."""
    from forerun.bench.machine import describe_machine
    from forerun.kernels.select import select_kernels

    return describe_machine(select_kernels("auto"))


# -- measurements -----------------------------------------------------------------------------------------------


def batching(given: argparse.Namespace) -> Report:
    """The same requests one at a time and many at a time, on one server without drafts and prefix cache."""
    asked = {"input_len": given.input_len, "max_tokens": given.max_tokens, "num_requests": given.num_requests}
    plain = ["--drafter", "none", "--no-prefix-caching", "--max-num-seqs", str(given.concurrency)]
    runs: dict[int, list[Report]] = {1: [], given.concurrency: []}
    with server(given.model, plain) as (url, _):
        for _ in range(given.repeats):
            for concurrency, reports in runs.items():
                reports.append(load(url, concurrency=concurrency, **asked))
    rows = {str(concurrency): row(reports) for concurrency, reports in runs.items()}
    alone, together = rows["1"], rows[str(given.concurrency)]
    return {
        "rows": rows,
        "times": round(together["tokens_per_s"] / alone["tokens_per_s"], 3),
        "tpot_p99_over_p50": round(together["tpot_p99_ms"] / together["tpot_p50_ms"], 3),
        "same_text": alone["text"] == together["text"],
    }


def prefix(given: argparse.Namespace) -> Report:
    """Prompts behind long prefixes, with each drafter."""
    return {name: one_prefix(given, name) for name in (given.prefix_drafters or given.drafter).split(",")}


def one_prefix(given: argparse.Namespace, drafter: str) -> Report:
    """Time to the first token: each prefix is asked behind once while it is new, then with another question."""
    asked = {"max_tokens": 8, "concurrency": 1, "num_requests": given.num_prefixes, "num_prefixes": given.num_prefixes}
    runs: dict[str, list[Report]] = {"cold": [], "warm": []}
    with server(given.model, ["--drafter", drafter, *FRESH]) as (url, _), tempfile.TemporaryDirectory() as folder:
        for seed in range(given.repeats):
            for name, reports in runs.items():
                prompts = questions(Path(folder, f"{name}.jsonl"), given.num_prefixes, given.input_len)
                reports.append(load(url, prompts=prompts, prefix_len=given.prefix_len, seed=seed, **asked))
    new, known = (median(report["ttft_s"]["p50"] for report in reports) for reports in runs.values())
    return {
        "prompt_tokens": runs["cold"][0]["prompt_tokens"] / given.num_prefixes,
        "cached_tokens_warm": runs["warm"][0]["cached_prompt_tokens"] / given.num_prefixes,
        "cold_ttft_s": new,
        "warm_ttft_s": known,
        "share": round(known / new, 4),
        "cached_share_cold": share_cached(runs["cold"]),
        "cached_share_warm": share_cached(runs["warm"]),
    }


def chats(given: argparse.Namespace) -> Report:
    """Conversations in which every turn sends all earlier ones again, answers included, on servers without drafts."""
    asked = {"max_tokens": given.max_tokens, "concurrency": given.concurrency, "num_requests": given.num_requests}
    rows = {}
    for name, off in {"with the prefix cache": [], "without": SWITCHES["prefix cache"]}.items():
        usual = ["--drafter", "none", "--max-num-seqs", str(given.concurrency), *off]
        with server(given.model, usual) as (url, _), tempfile.TemporaryDirectory() as folder:
            prompts = questions(Path(folder, "chats.jsonl"), given.num_requests, given.input_len, given.turns)
            rows[name] = row([load(url, prompts=prompts, prefix_len=given.prefix_len, num_prefixes=1, **asked)])
    kept, computed = rows.values()
    return {"rows": rows, "share": round(kept["ttft_p50_ms"] / computed["ttft_p50_ms"], 4)}


def questions(path: Path, count: int, num_words: int, num_turns: int = 1) -> Path:
    """A prompt file of texts that depend on its name."""
    from forerun.bench.serve_workload import some_words

    chats = ([some_words(num_words, path.name, i, n) for n in range(num_turns)] for i in range(count))
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in chats), "utf-8")
    return path


def share_cached(reports: Sequence[Report]) -> float:
    """Of all prompt tokens, how many came from the prefix cache."""
    return round(sum(r["cached_prompt_tokens"] for r in reports) / sum(r["prompt_tokens"] for r in reports), 4)


def parts(given: argparse.Namespace) -> Report:
    """The whole and its parts, with 4-bit weights that are written first unless given."""
    with tempfile.TemporaryDirectory() as folder:
        return all_parts(given, given.four_bit or write_four_bit(given.model, Path(folder)))


def all_parts(given: argparse.Namespace, four_bit: str) -> Report:
    """The whole, the whole without each part, and plain decoding one at a time, in turns."""
    asked = {"input_len": given.input_len, "prefix_len": given.prefix_len, "max_tokens": given.max_tokens,
             "num_requests": given.num_requests, "concurrency": given.concurrency}  # fmt: skip
    usual = ["--max-num-seqs", str(given.concurrency), "--drafter", given.drafter, *FRESH]
    variants = {"all": (four_bit, usual), f"without {FOUR_BIT}": (given.model, usual)}
    variants |= {f"without {part}": (four_bit, [*usual, *off]) for part, off in SWITCHES.items()}
    variants["plain"] = (given.model, [*usual, *(word for off in SWITCHES.values() for word in off)])
    runs: dict[str, list[Report]] = {name: [] for name in variants}
    for _ in range(given.repeats):
        for name, (model, arguments) in variants.items():
            with server(model, arguments) as (url, _):
                runs[name].append(load(url, **asked))
    rows = {name: row(reports) for name, reports in runs.items()}
    four_bit_texts = {rows[name]["text"] for name, (model, _) in variants.items() if model == four_bit}
    plain_texts = {rows[name]["text"] for name, (model, _) in variants.items() if model == given.model}
    own = {"times_plain": round(rows["all"]["tokens_per_s"] / rows["plain"]["tokens_per_s"], 3)}
    brings = {name.removeprefix("without "): round(rows["all"]["tokens_per_s"] / found["tokens_per_s"], 3)
              for name, found in rows.items() if name.startswith("without ")}  # fmt: skip
    return {"rows": rows, **own, "brings": brings, "same_text": len(four_bit_texts) == len(plain_texts) == 1}


def row(reports: Sequence[Report]) -> dict[str, Any]:
    """Medians over repeats."""

    def middle(*path: str) -> float:
        return median(float(reduce(getitem, path, report)) for report in reports)

    return {
        "tokens_per_s": round(middle("output_tokens_per_s"), 3),
        "requests_per_s": round(middle("requests_per_s"), 3),
        "ttft_p50_ms": round(middle("ttft_s", "p50") * 1e3, 3),
        "tpot_p50_ms": round(middle("tpot_s", "p50") * 1e3, 3),
        "tpot_p99_ms": round(middle("tpot_s", "p99") * 1e3, 3),
        "acceptance_length": round(middle("acceptance_length"), 3),
        "cached_share": share_cached(reports),
        "text": reports[0]["text_sha256"],
    }


def adapters(given: argparse.Namespace) -> Report:
    """The same load without adapters, with one and with several, in turns on one server without drafts."""
    asked = {"input_len": given.input_len, "max_tokens": given.max_tokens, "num_requests": given.num_requests}
    plain = ["--drafter", "none", "--no-prefix-caching", "--max-num-seqs", str(given.concurrency)]
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            f"a{seed}": write_adapter(given.model, Path(folder, f"a{seed}"), given.rank, seed) for seed in range(8)
        }
        variants = {"no adapter": "base", "one adapter": "a0", f"{len(paths)} adapters": ",".join(paths)}
        runs: dict[str, list[Report]] = {name: [] for name in variants}
        loaded = [f"--lora={name}={path}" for name, path in paths.items()]
        with server(given.model, [*plain, "--served-model-name", "base", *loaded]) as (url, _):
            for _ in range(given.repeats):
                for name, model in variants.items():
                    runs[name].append(load(url, concurrency=given.concurrency, model=model, **asked))
    rows = {name: row(reports) for name, reports in runs.items()}
    speed = rows["no adapter"]["tokens_per_s"]
    return {"rows": rows, "shares": {name: round(found["tokens_per_s"] / speed, 3) for name, found in rows.items()}}


def write_adapter(model: str, folder: Path, rank: int, seed: int) -> Path:
    """A random adapter for a model of Llama's shape, as PEFT saves them."""
    import torch
    from safetensors.torch import save_file

    from forerun.weights.resolve import resolve_model

    sizes = json.loads(Path(resolve_model(model), "config.json").read_text("utf-8"))
    hidden, ffn, num_q = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    size = sizes.get("head_dim") or hidden // num_q
    queries, keys = num_q * size, sizes.get("num_key_value_heads", num_q) * size
    shapes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
              "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
              "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}  # fmt: skip
    drawn, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, columns, generator=drawn).mul(0.01).bfloat16()
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=drawn).mul(0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


# -- Markdown ---------------------------------------------------------------------------------------------------

HEADER = "| | tokens/s | requests/s | TTFT p50, ms | TPOT p50, ms | TPOT p99, ms | tokens a pass | prompt cached |"


def markdown(result: Report) -> str:
    """A table a measurement, and what they were taken on."""
    from forerun.bench.machine import machine_line

    place, facts = machine_line(result["machine"]), result["machine"]
    told = [tell(result) for name, (_, tell) in MEASUREMENTS.items() if name in result]
    return "\n\n".join([*told, f"{place}, {facts['date']}: `{result['command']}`"])


def tell_batching(result: Report) -> str:
    """One and many at a time."""
    found = result["batching"]
    return lines(found["rows"]) + (
        f"\n\n{result['concurrency']} at a time: {found['times']:.2f}x the tokens per second of one at a time, TPOT "
        f"p99 {found['tpot_p99_over_p50']:.2f}x of p50, texts {same(found)}."
    )


def tell_prefix(result: Report) -> str:
    """A sentence a drafter."""
    return "\n".join(
        f"* {drafter}: prompts of {found['prompt_tokens']:.2f} tokens, first text after "
        f"{found['cold_ttft_s'] * 1e3:.1f} ms cold, {found['warm_ttft_s'] * 1e3:.1f} ms warm ({found['share']:.1%}), "
        f"{found['cached_tokens_warm']:.2f} of the tokens cached ({found['cached_share_warm']:.2%})"
        for drafter, found in result["prefix"].items()
    )


def tell_chats(result: Report) -> str:
    """What earlier turns cost."""
    found = result["chats"]
    return f"{lines(found['rows'])}\n\nFirst text with the cache after {found['share']:.1%} of the time without."


def tell_parts(result: Report) -> str:
    """What each part brings."""
    found = result["parts"]
    brings = ", ".join(f"{part} {times:.2f}x" for part, times in found["brings"].items())
    summary = f"All together {found['times_plain']:.2f}x of plain; each brings: {brings}. Texts {same(found)}."
    return f"{lines(found['rows'])}\n\n{summary}"


def tell_adapters(result: Report) -> str:
    """What adapters cost."""
    found = result["adapters"]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found["shares"].items())
    return f"{lines(found['rows'])}\n\nTokens per second, of those without adapters: {shares}."


MEASUREMENTS: dict[str, tuple[Callable[[argparse.Namespace], Report], Callable[[Report], str]]] = {
    "batching": (batching, tell_batching),
    "prefix": (prefix, tell_prefix),
    "chats": (chats, tell_chats),
    "parts": (parts, tell_parts),
    "adapters": (adapters, tell_adapters),
}


def same(measured: Report) -> str:
    """Whether speculation, batching and caching changed an answer; they must not."""
    return "the same for the same weights" if measured["same_text"] else "DIFFER"


def lines(rows: dict[str, dict[str, Any]]) -> str:
    """A table of rows by name."""
    names = ("tokens_per_s", "requests_per_s", "ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms", "acceptance_length")
    figures = {name: " | ".join(f"{found[key]:.2f}" for key in names) for name, found in rows.items()}
    body = [f"| {name} | {figures[name]} | {found['cached_share']:.0%} |" for name, found in rows.items()]
    return "\n".join([HEADER, "|---" * (len(names) + 2) + "|", *body])


if __name__ == "__main__":
    main()
