"""`lab/heldout.py`: models beside each other on the same held-out windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.errors import TrainingError
from forerun.training.export import export_model
from forerun.training.net import Net
from forerun.training.prepare import prepare
from forerun.training.recipe import load_recipe
from heldout import heldout


def test_models_are_measured_on_the_same_windows(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(recipe_path)
    runs = tmp_path / "runs"
    prepared = prepare(recipe, runs / recipe.name, lambda text: None)
    torch.manual_seed(0)
    for name in ("one", "other"):
        export_model(Net(recipe.model), prepared.folder, tmp_path / name)
    named = [f"first={tmp_path / 'one'}", f"again={tmp_path / 'one'}", f"other={tmp_path / 'other'}"]
    heldout(recipe_path, named, seq_len=8, windows=2, runs=runs)
    head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert head == "| domain | first | again | other |" and rows
    for row in rows:
        _, _, first, again, other, _ = (cell.strip() for cell in row.split("|"))
        assert first == again != other and float(first) > 0.0


@pytest.mark.parametrize("models", [["src"], ["=src"], ["one="], ["one=src", "one=other"]])
def test_models_without_a_name_of_their_own_are_refused(recipe_path: Path, tmp_path: Path, models: list[str]) -> None:
    with pytest.raises(TrainingError, match="NAME=FOLDER"):
        heldout(recipe_path, models, runs=tmp_path)
