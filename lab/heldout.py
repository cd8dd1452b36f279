"""Bits per byte of models on held-out text, by domain: the same windows for all of them.

    python lab/heldout.py recipes/mini-world-cpu.toml mini=src/forerun/mini/target new=runs/mini-world-cpu/export

Knows: options and the table. Does not know: what was held out, how it is measured (`forerun.training`). The text is
that of a recipe, prepared in its run's folder as `forerun train lm` does it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import command
from forerun.errors import TrainingError
from forerun.training.export import load_model
from forerun.training.heldout import bits_per_byte
from forerun.training.lm import make_heldout
from forerun.training.prepare import prepare
from forerun.training.recipe import load_recipe


def heldout(
    recipe: Annotated[Path, typer.Argument(help="Whose mix and held-out text.")],
    models: Annotated[list[str], typer.Argument(help="NAME=FOLDER of each model, as `forerun train lm` exports it.")],
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Windows of a domain.")] = 12,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
) -> None:
    """Measure bits per byte of models on held-out text."""
    named = [text.partition("=") for text in models]
    if not all(name and folder for name, _, folder in named) or len({name for name, *_ in named}) < len(named):
        raise TrainingError(f"models are NAME=FOLDER, each with a name of its own, got {', '.join(models)}")
    told = load_recipe(recipe)
    told = replace(
        told,
        schedule=replace(told.schedule, seq_len=seq_len),
        run=replace(told.run, heldout_windows=windows),
    )
    prepared = prepare(told, runs / told.name, typer.echo)
    chosen = make_heldout(told, prepared)
    bits = {name: bits_per_byte(load_model(Path(folder)), chosen) for name, _, folder in named}
    typer.echo(f"| domain | {' | '.join(bits)} |\n|---|{'---|' * len(bits)}")
    for domain in chosen.windows:
        typer.echo(f"| {domain} | {' | '.join(f'{of[domain]:.3f}' for of in bits.values())} |")


if __name__ == "__main__":
    command.run(heldout)
