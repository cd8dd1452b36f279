"""A run starts anew without taking along what no training wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import TrainingError
from forerun.training.checkpoint import LAST, STABLE
from forerun.training.console import Console
from forerun.training.lm import train_lm
from forerun.training.recipe import Recipe
from forerun.training.run_folder import open_run

LEFT = (LAST, STABLE, "metrics.json", "loss.png", "data/answers.jsonl", "export/model.safetensors")


def make_run(folder: Path) -> None:
    """What a training leaves."""
    for name in LEFT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")


def test_a_fresh_run_begins_in_an_empty_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    open_run(tmp_path / "run", fresh=False)
    assert all((tmp_path / "run" / name).is_file() for name in LEFT)
    for _ in range(2):
        open_run(tmp_path / "run", fresh=True)
        assert not list((tmp_path / "run").iterdir())


def test_what_no_training_wrote_is_kept_and_so_is_the_run(recipe: Recipe, tmp_path: Path) -> None:
    make_run(tmp_path / "home")
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(TrainingError, match=r"also holds thesis\.tex, which no training wrote; use another --out"):
        train_lm(recipe, tmp_path / "home", True, Console())
    assert all((tmp_path / "home" / name).is_file() for name in (*LEFT, "thesis.tex"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for fresh in (False, True):
        with pytest.raises(TrainingError, match=r"file/run cannot be a run folder: Not a directory"):
            open_run(tmp_path / "file" / "run", fresh)


def test_a_real_run_holds_nothing_else(recipe: Recipe, tmp_path: Path) -> None:
    train_lm(recipe, tmp_path / "run", False, Console())
    open_run(tmp_path / "run", fresh=True)
    assert not list((tmp_path / "run").iterdir())
