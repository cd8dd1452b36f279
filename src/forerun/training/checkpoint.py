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

from forerun.errors import TrainingError
from forerun.training.recipe import Recipe

LAST = "last.pt"
STABLE = "stable.pt"


def write_atomically(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` so that a crash leaves either the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint; raises TrainingError if it is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read; start again with --fresh") from error
    return state


def find_checkpoint(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Finds the state to resume from, or None.

    A run in its decay phase can only be resumed with that schedule. If the recipe has been given more steps
    since, training resumes from the last state before the decay.
    """
    if not (folder / LAST).is_file():
        return None
    state = read_checkpoint(folder / LAST)
    check_same_model(state, recipe)
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
