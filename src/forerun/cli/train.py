"""`forerun train`: training the embedded models.

Knows the options. The work is in `forerun.training`, imported only when a command runs, since it pulls in torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train language models by a recipe.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train language models by a recipe."""


@app.command("lm")
def lm(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/mini-target.toml.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/NAME unless given.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the training text; the recipe's unless given.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh/--resume", help="Delete the run folder first, or go on.")] = False,
) -> None:
    """Train a language model, or go on with it, and export it in Hugging Face layout."""
    from forerun.training.console import Console
    from forerun.training.lm import train_lm
    from forerun.training.recipe import load_recipe, with_data_dir

    chosen = with_data_dir(load_recipe(recipe), data)
    folder = out or Path("runs") / chosen.name
    finished = train_lm(chosen, folder, fresh, Console())
    typer.echo(f"{'finished' if finished else 'stopped; start again to go on'}: {folder / 'export'}")


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(help="The run folder of `forerun train lm`.")],
    folder: Annotated[Path, typer.Argument(help="Where the model is written.")],
) -> None:
    """Write the last checkpoint of a run, also one under way, in Hugging Face layout."""
    from forerun.training.lm import export_run

    typer.echo(f"step {export_run(run, folder)} written to {folder}")
