"""Chat prompts of many kinds made of the training text of `mini`, for a target to answer (`forerun train answers`).

    python lab/prompts.py --out runs/prompts.jsonl [--count 12000] [--data ../shared/data/train] [--bench FOLDER]
        [--world runs/world --world-count 5000]

Knows: options and the file. Does not know: kinds and wordings (`asking`, `world`).
"""

from __future__ import annotations

import json
import lzma
from itertools import islice
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
    world: Annotated[
        Path | None, typer.Option(help="Folder written by lab/world/make.py: questions of its conversations are added.")
    ] = None,
    world_count: Annotated[int, typer.Option(help="How many of its conversations.")] = 5_000,
    seed: Annotated[int, typer.Option(help="The same seed makes the same prompts.")] = 1,
) -> None:
    """Make chat prompts of many kinds out of training text, for a target to answer."""
    found = make_prompts(load_material(data), benchmark_grams(bench), count, seed)
    lines = [json.dumps({"category": asked.kind, "turns": asked.turns}, ensure_ascii=False) for asked in found]
    if world is not None:
        lines += world_prompts(world, world_count)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    typer.echo(f"{len(lines)} prompts written to {out}")


def world_prompts(folder: Path, count: int) -> list[str]:
    """The user's turns of the first `count` conversations of the small world, as lines of JSON."""
    with lzma.open(folder / "small_world.jsonl.xz", "rt", encoding="utf-8") as file:
        records = (json.loads(line) for line in file)
        chats = islice((record for record in records if "turns" in record), count)
        asked = [(chat["kind"], [text for role, text in chat["turns"] if role == "user"]) for chat in chats]
    return [json.dumps({"category": kind, "turns": turns}, ensure_ascii=False) for kind, turns in asked]


if __name__ == "__main__":
    command.run(prompts)
