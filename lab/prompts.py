"""Chat prompts of many kinds made of the training text of `mini`, for a target to answer (`forerun train answers`).

    python lab/prompts.py --out runs/prompts.jsonl [--count 12000] [--data ../shared/data/train] [--bench FOLDER]

Knows: options and the file. Does not know: kinds and wordings (`asking`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import command
from asking.asker import load_material, make_prompts
from forerun.training.data import benchmark_grams


def prompts(
    out: Annotated[Path, typer.Option(help="The .jsonl file to write, a conversation a line.")],
    count: Annotated[int, typer.Option(help="How many different prompts.")] = 12_000,
    data: Annotated[Path, typer.Option(help="Folder of the training text.")] = Path("../shared/data/train"),
    bench: Annotated[
        Path | None, typer.Option(help="Folder of benchmarks: no prompt that shares 13 words with them is made.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed makes the same prompts.")] = 1,
) -> None:
    """Make chat prompts of many kinds out of training text, for a target to answer."""
    found = make_prompts(load_material(data), benchmark_grams(bench), count, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"category": asked.kind, "turns": asked.turns}, ensure_ascii=False) for asked in found]
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    typer.echo(f"{len(found)} prompts written to {out}")


if __name__ == "__main__":
    command.run(prompts)
