"""Drafters at the cost of a larger model: a trained model widened to its shape, drafters in turns on real prompts.

    python benchmarks/widened.py WORK --prompts question.jsonl [--weights int4,bf16] [--temperatures 0,0.7]
        [--model mini] [--shape llama-3.2-1b] [--limit 24] [--max-tokens 96] [--repeats 1] [--drafters draft,mtp,...]
        [--head dflash=FOLDER ...] [--draft FOLDER] [--foreign FOLDER] [--vocabulary 2048] [--prepare]

WORK gets what is measured, once: the widened model in bfloat16 and in 4 bits, its widened heads (MODEL-mtp, -eagle,
-dflash, or the folders that are given; one that does not exist is left out, by name), and a list of the tokens that
MODEL says most often in answers to prompts of the file that are not measured. `--prepare` stops there. Then every
storage and temperature: tokens a pass, speed-up of whole requests and of decoding alone, over plain decoding of the
same weights in the same run. Drafters take turns prompt by prompt; prompts are asked their first turn. Writes
benchmarks/results/DATE-widened-*.json, a file a storage and temperature, as soon as it is measured. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.conversation import fitting_cases, run_cases
from forerun.bench.drafters import Entrant, build, run
from forerun.bench.machine import describe_machine, machine_line
from forerun.bench.prompts import PromptCase, read_prompts, spread
from forerun.bench.report import NOISE, decode_gain, gain
from forerun.bench.report import spread as interval
from forerun.errors import ConfigError
from forerun.weights.identity import hash_of_file
from forerun.weights.resolve import EMBEDDED

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("results")
HEADS = ("mtp", "eagle", "dflash")
WEIGHTS = ("int4", "bf16")  # storages, and their folders in WORK
COUNTED = 160  # prompts whose answers are counted for the list of tokens
COUNTED_TOKENS = 96
SEED = 0


def main() -> None:
    """Prepare, measure, keep, print."""
    given = options()
    heads = prepare(given)
    if given.prepare:
        return
    cases = first_turns(read_prompts(given.prompts))
    for weights in given.weights.split(","):
        for result in measured(given, weights, heads, spread(cases, given.limit)):
            name = f"{result['machine']['date']}-widened-{weights}-T{result['temperature']:g}.json"
            given.out.mkdir(exist_ok=True)
            (given.out / name).write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            print(markdown(result), flush=True)


def options() -> argparse.Namespace:
    """The command line. Raises ConfigError for a storage that there is not."""
    parser = argparse.ArgumentParser(description="Drafters at the cost of a larger model.")
    parser.add_argument("work", type=Path, help="folder of the widened models")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--layers", type=int, help="the shape's unless given")
    parser.add_argument("--weights", default="int4,bf16")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--drafters", help="of those in the table, separated by commas; all there are unless given")
    parser.add_argument("--portfolio", default="suffix+draft", help="its members")
    parser.add_argument("--head-weights", default="int8", help="of the heads: stored, int8 or int4")
    parser.add_argument("--head", action="append", default=[], metavar="NAME=FOLDER", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--draft", help="a draft model; the one embedded with the model unless given")
    parser.add_argument("--foreign", help="a draft model with another tokenizer (lab/foreign.py)")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens that trimmed drafters may propose")
    parser.add_argument("--prepare", action="store_true", help="write the models and measure nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    given = parser.parse_args()
    for weights in given.weights.split(","):
        if weights not in WEIGHTS:
            raise ConfigError(f"--weights must be of {', '.join(WEIGHTS)}; got {weights!r}")
    return given


# -- what is measured ---------------------------------------------------------------------------------------------


def prepare(given: argparse.Namespace) -> dict[str, Path]:
    """Write what is missing in WORK -> the widened heads by name. Raises ConfigError for heads that do not exist."""
    work: Path = given.work
    sources = head_sources(given.model, given.head)
    made = {"model": given.model, "shape": given.shape, "layers": given.layers, "heads": sources}
    check_made(work, {**made, "prompts": hash_of_file(given.prompts), "limit": given.limit})
    plain, small = work / "bf16", work / "int4"
    layers = ("--layers", str(given.layers)) if given.layers else ()
    widen(plain, given.model, "--shape", given.shape, *layers)
    if "int4" in given.weights.split(",") and not small.exists():
        rounding = ("--method", "rtn", "--bits", "4", "--group-size", "128")
        call(sys.executable, "-m", "forerun.cli", "quantize", str(plain), str(small), *rounding)
    for name, source in sources.items():
        widen(work / name, source, "--for", str(plain))
    tokens = work / f"tokens-{given.vocabulary}.json"
    if not tokens.exists():
        write_tokens(given, tokens)
    return {name: work / name for name in sources}


def check_made(work: Path, wanted: Mapping[str, Any]) -> None:
    """Note what the folder is made of, prompts included: tokens are counted in answers to those that are not measured.

    Raises ConfigError if it was made of something else.
    """
    work.mkdir(parents=True, exist_ok=True)
    note = work / "made.json"
    if not note.exists():
        note.write_text(json.dumps(wanted, indent=1) + "\n", "utf-8")
    found = json.loads(note.read_text("utf-8"))
    if differing := [name for name, value in wanted.items() if found.get(name) != value]:
        raise ConfigError(f"{work} was made with other {', '.join(differing)} ({note}): give another folder")


def head_sources(model: str, asked: Sequence[str]) -> dict[str, str]:
    """Each head's name and what it is widened from: what was asked for, else what is embedded with the model."""
    sources = {name: f"{model}-{name}" for name in HEADS if f"{model}-{name}" in EMBEDDED}
    for text in asked:
        name, _, folder = text.partition("=")
        if name not in HEADS or not folder:
            raise ConfigError(f"--head must be NAME=FOLDER with a name of {', '.join(HEADS)}; got {text!r}")
        sources[name] = folder
    for name in HEADS:
        if name not in sources:
            print(f"left out: there is no {name} head for {model}; give --head {name}=FOLDER", file=sys.stderr)
    return {name: sources[name] for name in HEADS if name in sources}


def widen(out: Path, *arguments: str) -> None:
    """Write a widened model or head, unless it is there."""
    if not out.exists():
        source, *rest = arguments
        call(sys.executable, str(ROOT / "lab" / "widen.py"), source, str(out), *rest)


def call(*command: str) -> None:
    """Run a command that must succeed."""
    print(shlex.join(command), file=sys.stderr, flush=True)
    subprocess.run(command, stdout=sys.stderr, check=True)


def write_tokens(given: argparse.Namespace, path: Path) -> None:
    """List the tokens that the model, before it was widened, says most often where nothing is measured."""
    import torch

    from forerun.training.heads.token_list import write_list

    cases = first_turns(read_prompts(given.prompts))
    chosen = spread(cases, given.limit)
    others = spread([case for case in cases if case not in chosen], COUNTED)
    llm = LLM(given.model, keep_learned=False)
    params = [SamplingParams(max_tokens=COUNTED_TOKENS, temperature=0.7, seed=n) for n in range(len(others))]
    answers = run_cases(llm, others, params)
    ids = torch.tensor([token for [answer] in filter(None, answers) for token in answer.token_ids], dtype=torch.int64)
    covered = write_list(path, torch.bincount(ids, minlength=llm.vocab_size), given.vocabulary)
    print(f"{path}: {given.vocabulary} tokens, {covered:.2%} of {len(ids)} that were said", file=sys.stderr)


def first_turns(cases: Sequence[PromptCase]) -> list[PromptCase]:
    """The cases without what is asked after the first answer."""
    return [replace(case, turns=case.turns[:1]) for case in cases]


def entrants(given: argparse.Namespace, heads: Mapping[str, Path]) -> list[Entrant]:
    """Every row of the table that can be measured; trimmed ones propose the listed tokens alone.

    Raises ConfigError for a name that is none.
    """
    trimmed = {"draft_vocabulary": str(given.work / f"tokens-{given.vocabulary}.json")}
    embedded = f"{given.model}-draft" if f"{given.model}-draft" in EMBEDDED else None
    small = f"draft={found}" if (found := given.draft or embedded) else None
    rows = list[Entrant]()
    if small is not None:
        rows += [Entrant("draft", small), Entrant("draft trimmed", small, trimmed)]
    for name, folder in heads.items():
        drafter = f"{name}={folder}"
        if name == "dflash":
            rows += [Entrant("dflash", drafter, {"tree_width": 1}), Entrant("dflash tree", drafter)]
        else:
            rows.append(Entrant(name, drafter))
        if name == "mtp":  # an EAGLE-3 head has a vocabulary of its own
            rows.append(Entrant("mtp trimmed", drafter, trimmed))
    own = {"draft": small, **{name: f"{name}={folder}" for name, folder in heads.items()}}
    members = "portfolio=" + "+".join(own.get(name) or name for name in given.portfolio.split("+"))
    rows += [Entrant("portfolio", members), Entrant("portfolio trimmed", members, trimmed)]
    if given.foreign:
        rows.append(Entrant("foreign draft", f"draft={given.foreign}"))
    return rows if given.drafters is None else chosen(rows, [name.strip() for name in given.drafters.split(",")])


def chosen(rows: Sequence[Entrant], names: Sequence[str]) -> list[Entrant]:
    """The rows of these names. Raises ConfigError for a name that is none."""
    known = {row.name: row for row in rows}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--drafters has {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names]


# -- measuring ----------------------------------------------------------------------------------------------------


def measured(
    given: argparse.Namespace, weights: str, heads: Mapping[str, Path], cases: Sequence[PromptCase]
) -> Iterator[dict[str, Any]]:
    """A result for each temperature, as it is measured."""
    wanted = entrants(given, heads)
    shared = {"across_requests": False, "keep_learned": False}
    plain = LLM(str(given.work / weights), max_num_seqs=1, prefix_caching=False, **shared)
    engines, _ = build(plain, wanted, {**shared, "head_weights": given.head_weights}, may_lack=False)
    fitting = fitting_cases(plain, cases)
    for temperature in (float(text) for text in given.temperatures.split(",")):
        params = SamplingParams(max_tokens=given.max_tokens, temperature=temperature, seed=SEED)
        [report] = run(engines, fitting, [params], given.repeats)
        yield {
            **report, "weights": weights, "model": given.model, "shape": given.shape, "layers": given.layers,
            "num_prompts": len(fitting), "max_tokens": given.max_tokens, "repeats": given.repeats,
            "drafters": {entrant.name: entrant.drafter for entrant in wanted}, "head_weights": given.head_weights,
            "command": shlex.join(["python", "benchmarks/widened.py", *sys.argv[1:]]),
            "machine": describe_machine(plain.kernels),
        }  # fmt: skip


def markdown(result: Mapping[str, Any]) -> str:
    """A row a drafter, what they were taken on, and what EAGLE's and DFlash's speeds are to each other."""
    size = result["shape"] + (f" with {result['layers']} layers" if result["layers"] else "")
    title = (f"{result['model']} widened to {size}, {result['weights']}, T = {result['temperature']:g}: "
             f"{result['num_prompts']} prompts, {result['max_tokens']} tokens")  # fmt: skip
    header = ("drafter", "tokens/s", "tokens a pass", "speed-up", "95% interval", "decoding alone", "identical")
    lines = [f"\n{title}\n", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row in result["rows"]:
        decoding = decode_gain(result["details"][row["drafter"]])
        lines.append(f"| {row['drafter']} | {row['tokens_per_s']:.1f} | {row['acceptance_length']:.2f} | {gain(row)} "
                     f"| {interval(row)} | {decoding} | {'yes' if row['identical'] else 'NO'} |")  # fmt: skip
    gains = {row["drafter"]: row["speedup"] for row in result["rows"]}
    lines.append("")
    lines += [f"{name} over eagle: {gains[name] / gains['eagle']:.2f}x" for name in ("dflash", "dflash tree")
              if name in gains and "eagle" in gains]  # fmt: skip
    return "\n".join(
        [*lines, NOISE, f"{machine_line(result['machine'])}, {result['machine']['date']}", result["command"]]
    )


if __name__ == "__main__":
    main()
