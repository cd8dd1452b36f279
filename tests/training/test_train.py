"""The loop: resuming is exact, stopping saves, the stable state outlives the decay, distillation imitates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forerun.cli.train import app
from forerun.errors import TrainingError
from forerun.training.checkpoint import read_checkpoint
from forerun.training.console import Console
from forerun.training.distill import continue_text, draw_ids
from forerun.training.export import load_model
from forerun.training.lm import make_net, train_lm
from forerun.training.net import Net
from forerun.training.recipe import DistillConfig, Recipe
from forerun.training.train import StepReport


class StopAt(Console):
    """Asks for a stop at a given step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_report(self, report: StepReport) -> None:
        """Stops once the step is reached."""
        self.stopping = report.step >= self.step


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of the last checkpoint."""
    weights: dict[str, torch.Tensor] = read_checkpoint(folder / "last.pt")["model"]
    return weights


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Compares weights bit for bit."""
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)


def test_interrupted_equals_uninterrupted(recipe: Recipe, tmp_path: Path) -> None:
    assert train_lm(recipe, tmp_path / "whole", False, Console())
    for stop in (4, 6):  # in the stable phase and in the decay
        assert not train_lm(recipe, tmp_path / "parts", False, StopAt(stop))
        assert read_checkpoint(tmp_path / "parts" / "last.pt")["step"] == stop
    assert train_lm(recipe, tmp_path / "parts", False, Console())
    assert_equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))


def test_more_steps_go_on_from_before_the_decay(recipe: Recipe, tmp_path: Path) -> None:
    longer = replace(recipe, schedule=replace(recipe.schedule, steps=12))
    assert train_lm(recipe, tmp_path / "run", False, Console())
    assert train_lm(longer, tmp_path / "run", False, Console())
    assert train_lm(longer, tmp_path / "whole", False, Console())
    assert_equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "run"))


def test_fresh_starts_anew_and_shapes_are_checked(recipe: Recipe, tmp_path: Path) -> None:
    train_lm(recipe, tmp_path / "run", False, Console())
    wider = replace(recipe, model=replace(recipe.model, ffn_size=64))
    with pytest.raises(TrainingError, match="--fresh"):
        train_lm(wider, tmp_path / "run", False, Console())
    assert train_lm(wider, tmp_path / "run", True, Console())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_before_work_starts(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="sees no GPU"):
        train_lm(replace(recipe, run=replace(recipe.run, device="cuda")), tmp_path / "run", False, Console())
    assert not (tmp_path / "run").exists()


def test_damaged_checkpoint_is_named(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"nothing")
    with pytest.raises(TrainingError, match=r"last\.pt cannot be read"):
        train_lm(recipe, tmp_path / "run", False, Console())


def test_results_are_written(recipe: Recipe, tmp_path: Path) -> None:
    train_lm(recipe, tmp_path / "run", False, Console())
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert set(metrics["history"][-1]["heldout"]) == {"stories", "code"}
    assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_start_from_takes_weights_and_tokenizer(recipe: Recipe, tmp_path: Path) -> None:
    train_lm(recipe, tmp_path / "first", False, Console())
    more = replace(recipe, start_from=str(tmp_path / "first" / "export"), seed=4)
    assert (
        make_net(more)
        .state_dict()["model.norm.weight"]
        .equal(load_model(tmp_path / "first" / "export").state_dict()["model.norm.weight"])
    )
    train_lm(more, tmp_path / "second", False, Console())
    losses = [json.loads((tmp_path / name / "metrics.json").read_text())["history"] for name in ("first", "second")]
    assert losses[1][-1]["loss"] < losses[0][-1]["loss"]
    wider = replace(more, model=replace(recipe.model, ffn_size=64))
    with pytest.raises(TrainingError, match="another shape"):
        make_net(wider)


def distilling(recipe: Recipe, teacher: Path) -> Recipe:
    """Turns the tiny recipe into one that imitates `teacher`."""
    options = DistillConfig(str(teacher), 512, 0.5, sample_batch=8, prompt_tokens=8, continuation_tokens=24)
    return replace(recipe, model=replace(recipe.model, num_layers=1), distill=options)


def test_distillation_runs_and_keeps_the_vocabulary(recipe: Recipe, tmp_path: Path) -> None:
    train_lm(recipe, tmp_path / "target", False, Console())
    student = distilling(recipe, tmp_path / "target" / "export")
    assert train_lm(student, tmp_path / "draft", False, Console())
    files = [tmp_path / name / "export" / "tokenizer.json" for name in ("target", "draft")]
    assert files[0].read_bytes() == files[1].read_bytes()
    metrics = json.loads((tmp_path / "draft" / "metrics.json").read_text())
    assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]
    assert 0 < metrics["acceptance_rate"]["stories"] <= 1
    assert len(load_model(tmp_path / "draft" / "export").model.layers) == 1
    assert student.distill is not None
    other = replace(student, distill=replace(student.distill, greedy_share=0.75))
    with pytest.raises(TrainingError, match="'greedy_share': 0.25.*, now it is .*'greedy_share': 0.75.* --fresh"):
        train_lm(other, tmp_path / "draft", False, Console())


def test_greedy_rows_follow_the_argmax(recipe: Recipe) -> None:
    torch.manual_seed(0)
    net = Net(recipe.model)
    prompts = torch.randint(0, 300, (4, 5))
    greedy = torch.tensor([True, True, False, False])
    text = continue_text(net, prompts, 6, greedy, torch.Generator().manual_seed(0))
    assert text.shape == (4, 11)
    assert text[:, :5].equal(prompts)
    with torch.no_grad():
        assert net(text[:2, :-1]).argmax(-1)[:, 4:].equal(text[:2, 5:])


def test_drawn_ids_follow_the_distribution() -> None:
    wanted = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3, 0.0])
    drawn = draw_ids(wanted.expand(20_000, 6), torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.flatten().bincount(minlength=6) / 20_000, wanted, rtol=0, atol=0.015)


def test_command_trains_and_reports(recipe_path: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lm", str(recipe_path), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "step 8" in result.output
    assert "held-out bits per byte: stories" in result.output
    assert "finished:" in result.output
    exported = (tmp_path / "run" / "export" / "model.safetensors").read_bytes()
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "copy")])
    assert result.output.startswith("step 8 written")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == exported
