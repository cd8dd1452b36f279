"""Speed of every drafter on a prompt file at temperatures 0 and 1: a dated result and tables for docs/benchmarks.md.

    python benchmarks/spec_bench.py --prompts question.jsonl [--model mini] [--limit 60] [--name spec-bench]

Runs `forerun bench speed --json --by-category` once a temperature, writes benchmarks/results/DATE-NAME.json (the
commands, their reports, the machine) and prints Markdown. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from forerun.bench.machine import machine_line
from forerun.bench.report import NOISE, decode_gain, gain, spread

RESULTS = Path(__file__).with_name("results")
TEMPERATURES = ("0", "1")


def main() -> None:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description="Speed of every drafter on a prompt file.")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--drafters", default="none,ngram,draft")
    parser.add_argument("--limit", default="60")
    parser.add_argument("--max-tokens", default="128")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--name", default="spec-bench")
    given = vars(parser.parse_args())
    name = given.pop("name")
    runs = [run(given, temperature) for temperature in TEMPERATURES]
    machine = runs[0]["report"]["machine"]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{machine['date']}-{name}.json"
    path.write_text(json.dumps(runs, indent=1) + "\n", "utf-8")
    print(markdown(runs))
    print(f"\nkept in {path}", file=sys.stderr)


def run(given: dict[str, str], temperature: str) -> dict[str, Any]:
    """One command and its report."""
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    arguments = ["bench", "speed", *options, "--temperature", temperature, "--by-category", "--json"]
    done = subprocess.run([sys.executable, "-m", "forerun.cli", *arguments], stdout=subprocess.PIPE, check=True)
    return {"command": shlex.join(["forerun", *arguments]), "report": json.loads(done.stdout)}


def markdown(runs: list[dict[str, Any]]) -> str:
    """A table of all prompts, one of categories, and what they were taken on."""
    machine = runs[0]["report"]["machine"]
    commands = "\n".join(run["command"] for run in runs)
    tables = [all_prompts(runs), *(categories(run["report"]) for run in runs)]
    return "\n\n".join([*tables, f"{NOISE}.", f"{machine_line(machine)}, {machine['date']}:", f"```\n{commands}\n```"])


def all_prompts(runs: list[dict[str, Any]]) -> str:
    """A row a temperature and drafter."""
    lines = [
        "| temperature | drafter | tokens/s | speed-up | 95% interval | decoding alone | tokens a pass | identical |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for report in (run["report"] for run in runs):
        for row in report["rows"]:
            decoding = decode_gain(report["details"][row["drafter"]])
            lines.append(
                f"| {report['temperature']:g} | `{row['drafter']}` | {row['tokens_per_s']:.0f} | {gain(row)} "
                f"| {spread(row)} | {decoding} | {row['acceptance_length']:.2f} "
                f"| {'yes' if row['identical'] else 'NO'} |"
            )
    return "\n".join(lines)


def categories(report: dict[str, Any]) -> str:
    """A row a category, a column a drafter: speed-up, and of decoding alone in brackets."""
    drafters = [row["drafter"] for row in report["rows"] if row["drafter"] != "none"]
    lines = [f"| T = {report['temperature']:g} | {' | '.join(f'`{name}`' for name in drafters)} |"]
    lines.append("|---" * (len(drafters) + 1) + "|")
    for category, rows in report["categories"].items():
        details = report["category_details"][category]
        cells = [f"{gain(row)} ({decode_gain(details[row['drafter']])})" for row in rows if row["drafter"] != "none"]
        lines.append(f"| {category} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
