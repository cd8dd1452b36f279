"""The loop: resuming is exact, stopping saves, the stable state outlives the decay, distillation imitates."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from forerun.cli.app import app as forerun
from forerun.cli.train import app
from forerun.errors import CheckpointError, ResourceError, TrainingError
from forerun.training.checkpoint import find_checkpoint, read_checkpoint, write_atomically
from forerun.training.console import Console
from forerun.training.distill import continue_text, draw_ids
from forerun.training.export import export_model, load_model
from forerun.training.heldout import EVAL_BATCH, Heldout, acceptance_rate
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


def test_a_stop_in_the_last_step_has_finished(recipe: Recipe, tmp_path: Path) -> None:
    assert train_lm(recipe, tmp_path / "run", False, StopAt(recipe.schedule.steps))
    assert read_checkpoint(tmp_path / "run" / "last.pt")["step"] == recipe.schedule.steps


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 4}, "seed was 3, is 4. Use the recipe as it was, another --out, or --fresh"),
        ({"start_from": "there"}, "start_from was '', is 'there'"),
        ({"prompt_weight": 0.5, "seed": 5}, "seed was 3, is 5; prompt_weight was 1.0, is 0.5"),
        ({"mix": {"african_storybook_en": 2.0}}, "'mbpp_train_601_974': 1.0}, is {'african_storybook_en': 2.0}"),
    ],
)
def test_a_run_does_not_go_on_with_another_recipe(
    recipe: Recipe, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    write_atomically(tmp_path / "last.pt", {"step": 2, "recipe": asdict(recipe)})
    with pytest.raises(TrainingError) as error:
        find_checkpoint(tmp_path, replace(recipe, **changed))
    assert str(error.value).startswith(f"{tmp_path} holds another training: ") and said in str(error.value)


def test_parts_of_a_section_are_named_and_how_a_run_is_watched_may_change(recipe: Recipe, tmp_path: Path) -> None:
    older = asdict(recipe)
    del older["prompt_weight"], older["data"]["bench_dir"]
    write_atomically(tmp_path / "last.pt", {"step": 2, "recipe": older})
    for section, name, was in (("data", "dir", recipe.data.dir), ("optimizer", "clip_norm", 1.0)):
        part = replace(getattr(recipe, section), **{name: type(was)(9)})
        with pytest.raises(TrainingError, match=rf"holds another training: {section}\.{name} was {was!r}, is '?9"):
            find_checkpoint(tmp_path, replace(recipe, **{section: part}))
    longer_way = replace(recipe.data, dir=f"{recipe.data.dir}/../{Path(recipe.data.dir).name}/")
    assert find_checkpoint(tmp_path, replace(recipe, data=longer_way)) is not None, "the same folder"
    schedule, run = replace(recipe.schedule, steps=12), replace(recipe.run, checkpoint_every=5)
    state = find_checkpoint(tmp_path, replace(recipe, name="other", schedule=schedule, run=run, prompt_weight=0.5))
    assert state is not None and state["step"] == 2, "what older checkpoints do not have does not count"


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0\nmore")

    write_atomically(tmp_path / "last.pt", {"step": 1})
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(ResourceError, match=r"cannot write .*last\.pt: .* vs 0; make room, then start again to go on"):
        write_atomically(tmp_path / "last.pt", {"step": 2})
    assert read_checkpoint(tmp_path / "last.pt") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


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


def test_acceptance_counts_every_window_alike(recipe: Recipe) -> None:
    torch.manual_seed(0)
    draft, target = Net(recipe.model), Net(recipe.model)
    for weight in (*draft.parameters(), *target.parameters()):
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    windows = torch.randint(0, 300, (EVAL_BATCH + 1, 7))
    with torch.no_grad():
        both = torch.minimum(draft(windows[:, :-1]).softmax(-1), target(windows[:, :-1]).softmax(-1)).sum(-1)
    wanted, batches = both.mean(), (both[:EVAL_BATCH].mean() + both[EVAL_BATCH:].mean()) / 2
    assert abs(wanted - batches) > 1e-3, "the batch of one window must differ"
    found = acceptance_rate(draft, target, Heldout({"stories": windows}, torch.ones(300)))
    assert found["stories"] == pytest.approx(float(wanted), abs=1e-6)


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


def test_only_a_language_models_run_can_be_exported_and_resumed(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    write_atomically(tmp_path / "head" / "last.pt", {"step": 2, "identity": {}})
    for run, said in (("typo", "there is no checkpoint"), ("head", "is of a head's training, not of")):
        result = CliRunner().invoke(forerun, ["train", "export", str(tmp_path / run), str(tmp_path / "out")])
        shown = " ".join(result.stderr.split())
        assert result.exit_code == 2 and shown.startswith("error: ") and said in shown
        assert str(tmp_path / run / "last.pt") in shown and "--fresh" not in shown
    assert not (tmp_path / "out").exists()
    with pytest.raises(TrainingError, match=r"last\.pt is of a head's training, not of .*; give another folder"):
        find_checkpoint(tmp_path / "head", recipe)


def test_an_export_is_replaced_whole_and_a_damaged_one_is_named(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_lm(recipe, tmp_path / "run", False, Console())
    exported = tmp_path / "run" / "export" / "model.safetensors"
    whole, write = exported.read_bytes(), Path.write_bytes

    def fail(path: Path, data: bytes) -> None:
        write(path, data[:99])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space"):
        export_model(make_net(replace(recipe, seed=9)), tmp_path / "run" / "data", exported.parent)
    monkeypatch.undo()
    assert exported.read_bytes() == whole and not exported.with_name("model.tmp").exists()
    exported.write_bytes(whole[:99])
    with pytest.raises(CheckpointError, match="export is no model exported by"):
        load_model(exported.parent)
