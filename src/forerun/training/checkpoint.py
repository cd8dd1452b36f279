"""Saving and restoring a run: everything the next step depends on, written atomically.

Knows files and when each of them may be continued. Knows nothing of what the state means.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from forerun.errors import ResourceError, TrainingError
from forerun.training.recipe import Recipe, changes

LAST = "last.pt"
STABLE = "stable.pt"
FREE = ("name", "run", "schedule", "model")  # parts of a recipe that a run may change, and the model, checked apart


def write_atomically(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` so that a crash leaves either the old file or the new one; raises ResourceError if that fails."""
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch raises the latter for a full disk
        temporary.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise ResourceError(f"cannot write {path}: {why}; make room, then start again to go on") from error


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; raises TrainingError if it is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read; start again with --fresh") from error
    return state


def read_last(folder: Path) -> dict[str, Any]:
    """Reads the last checkpoint of a language model's run; raises TrainingError if it is damaged, or of a head."""
    path = folder / LAST
    state = read_checkpoint(path)
    if "recipe" not in state:
        raise TrainingError(
            f"{path} is of a head's training, not of `forerun train lm`: its result is in {folder / 'export'}; give "
            "another folder"
        )
    return state


def find_checkpoint(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Finds the state to resume from, or None.

    A run in its decay phase can only be resumed with that schedule. If the recipe has been given more steps
    since, training resumes from the last state before the decay.
    """
    if not (folder / LAST).is_file():
        return None
    state = read_last(folder)
    check_same_model(state, recipe)
    check_same_recipe(state, recipe, folder)
    schedule = state["recipe"]["schedule"]
    decaying = state["step"] > schedule["steps"] - schedule["decay_steps"]
    if decaying and schedule != asdict(recipe.schedule):
        state = read_checkpoint(folder / STABLE)
    if state["step"] > recipe.schedule.steps:
        raise TrainingError(f"{folder} has {state['step']} steps, more than schedule.steps; start with --fresh")
    return state


def check_same_model(state: dict[str, Any], recipe: Recipe) -> None:
    """Refuses to continue a run of a model of another shape."""
    if state["recipe"]["model"] != asdict(recipe.model):
        raise TrainingError("the checkpoint has another [model] than the recipe; use another --out or --fresh")


def check_same_recipe(state: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    """Refuses to continue a run with another seed, start, data or optimizer than it began with."""
    now = {name: value for name, value in asdict(recipe).items() if name not in FREE}
    if changed := changes(state["recipe"], now):
        raise TrainingError(
            f"{folder} holds another training: {'; '.join(changed)}. Use the recipe as it was, another --out, or "
            "--fresh"
        )
