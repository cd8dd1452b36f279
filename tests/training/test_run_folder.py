"""A run starts anew without taking along what no training wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.errors import CheckpointError, DataError, TrainingError, VocabularyError
from forerun.training.checkpoint import LAST, STABLE
from forerun.training.console import Console
from forerun.training.lm import train_lm
from forerun.training.recipe import DistillConfig, Recipe
from forerun.training.run_folder import clear, open_run

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
        clear(tmp_path / "run")
        assert not list((tmp_path / "run").iterdir())


def test_what_no_training_wrote_is_kept_and_so_is_the_run(recipe: Recipe, tmp_path: Path) -> None:
    make_run(tmp_path / "home")
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(TrainingError, match=r"also holds thesis\.tex, which no training wrote; use another --out"):
        train_lm(recipe, tmp_path / "home", True, Console())
    assert all((tmp_path / "home" / name).is_file() for name in (*LEFT, "thesis.tex"))


def test_a_run_is_kept_until_new_data_is_read(recipe: Recipe, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    elsewhere = replace(recipe, data=replace(recipe.data, dir=str(tmp_path / "typo")))
    with pytest.raises(DataError, match="no file .*typo"):
        train_lm(elsewhere, tmp_path / "run", True, Console())
    rich = replace(recipe, model=replace(recipe.model, vocab_size=60000))
    with pytest.raises(TrainingError, match="asks for 60000"):
        train_lm(rich, tmp_path / "run", True, Console())
    lost = replace(recipe, start_from=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="gone is no model exported by"):
        train_lm(lost, tmp_path / "run", True, Console())
    assert train_lm(recipe, tmp_path / "first", False, Console())
    first = tmp_path / "first" / "export"
    wider = replace(recipe, start_from=str(first), model=replace(recipe.model, ffn_size=64))
    with pytest.raises(TrainingError, match="another shape"):
        train_lm(wider, tmp_path / "run", True, Console())
    fewer = replace(recipe, model=replace(recipe.model, vocab_size=299), distill=DistillConfig(str(first), 512, 0.5))
    with pytest.raises(VocabularyError, match="the teacher has 300 tokens"):
        train_lm(fewer, tmp_path / "run", True, Console())
    (first / "tokenizer.json").unlink()
    with pytest.raises(TrainingError, match=r"export, whose tokenizer the recipe takes, has no tokenizer\.json"):
        train_lm(replace(recipe, start_from=str(first)), tmp_path / "run", True, Console())
    assert all((tmp_path / "run" / name).is_file() for name in LEFT)
    assert train_lm(recipe, tmp_path / "run", True, Console())
    assert (tmp_path / "run" / LAST).read_bytes() != b"x"


def test_a_run_that_is_to_be_read_is_not_deleted(recipe: Recipe, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    own = replace(recipe, start_from=str(tmp_path / "run" / "export"))
    with pytest.raises(TrainingError, match=r"--fresh deletes .*run, but .*export in it is to be read; use another"):
        train_lm(own, tmp_path / "run", True, Console())
    assert all((tmp_path / "run" / name).is_file() for name in LEFT)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for fresh in (False, True):
        with pytest.raises(TrainingError, match=r"file/run cannot be a run folder: Not a directory"):
            open_run(tmp_path / "file" / "run", fresh)


def test_a_real_run_holds_nothing_else(recipe: Recipe, tmp_path: Path) -> None:
    train_lm(recipe, tmp_path / "run", False, Console())
    open_run(tmp_path / "run", fresh=True)
    clear(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
