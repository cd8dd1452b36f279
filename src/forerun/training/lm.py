"""`forerun train lm`: combines the parts from recipe to exported model.

Knows the run folder: `data/`, checkpoints, `metrics.json`, `loss.png`, `export/`. Does not know: how the parts do their
work.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from forerun.errors import ConfigError, TrainingError
from forerun.training.chat import END_OF_TEXT
from forerun.training.checkpoint import LAST, read_last
from forerun.training.console import Console
from forerun.training.data import Tokens, load_tokens
from forerun.training.distill import OWN_TEXT, sample_own_text
from forerun.training.export import check_same_vocabulary, export_model, load_model
from forerun.training.heldout import Heldout, acceptance_rate
from forerun.training.losses import Loss, PromptWeights, distillation_loss, next_token_loss
from forerun.training.net import Net, NetConfig
from forerun.training.plots import NO_PICTURE, draw_history
from forerun.training.prepare import Prepared, Report, prepare
from forerun.training.recipe import DistillConfig, Recipe
from forerun.training.run_folder import announced, open_run
from forerun.training.tokenizer import token_lens_bytes
from forerun.training.train import Trainer


def train_lm(recipe: Recipe, folder: Path, fresh: bool, console: Console) -> bool:
    """Trains the model of `recipe` in `folder` and exports it to `folder/export`; returns False if stopped early.

    Resumes from the last checkpoint in `folder` unless `fresh`. A stopped run is exported as it is.
    """
    check_device(recipe)
    named = (recipe.data.dir, recipe.data.generated_dir, recipe.data.bench_dir, recipe.tokenizer_from)
    open_run(folder, fresh, [Path(name) for name in (*named, recipe.start_from) if name])
    check_networks(recipe)
    prepared = prepare(recipe, folder, console.say, fresh)
    trainer = make_trainer(recipe, prepared, folder, console)
    console.say(announced(trainer.resume(), recipe.schedule.steps, recipe.schedule.tokens_per_step))
    with console.watching(recipe.schedule.steps, trainer.step):
        finished = trainer.run(console)
    write_results(trainer, prepared, folder, console.say)
    return finished


def check_device(recipe: Recipe) -> None:
    """Raises TrainingError if the device of `recipe` is missing."""
    if recipe.run.device == "cuda" and not torch.cuda.is_available():
        raise TrainingError(f"run.device is 'cuda', but torch {torch.__version__} sees no GPU: set run.device to 'cpu'")


def make_trainer(recipe: Recipe, prepared: Prepared, folder: Path, console: Console) -> Trainer:
    """Builds network, loss and data of a run."""
    net = make_net(recipe)
    train = {name: load_tokens(prepared.folder, name, "train") for name in recipe.mix}
    heldout = make_heldout(recipe, prepared)
    loss, weights = make_loss(recipe, net, train, prepared, console)
    end_of_text = prepared.tokenizer.token_to_id(END_OF_TEXT)
    return Trainer(recipe, net, loss, train, weights, heldout, folder, end_of_text)


def make_net(recipe: Recipe) -> Net:
    """Makes the network, random or with the weights of `start_from`; raises TrainingError if its shape differs."""
    torch.manual_seed(recipe.seed)
    if not recipe.start_from:
        return Net(recipe.model).to(recipe.run.device)
    net = load_model(Path(recipe.start_from))
    if net.config != recipe.model:
        raise TrainingError(f"{recipe.start_from} has another shape than [model]: {net.config}; make them equal")
    return net.to(recipe.run.device)


def load_teacher(recipe: Recipe, distill: DistillConfig) -> Net:
    """Reads the network to imitate; raises VocabularyError and ConfigError if it cannot read what the student does."""
    teacher = load_model(Path(distill.teacher)).to(recipe.run.device)
    check_same_vocabulary(teacher, recipe.model.vocab_size)
    own_text = distill.prompt_tokens + distill.continuation_tokens
    longest = max(recipe.schedule.seq_len, recipe.schedule.decay_seq_len, own_text)
    if longest > teacher.config.max_positions:
        raise ConfigError(
            f"the teacher has {teacher.config.max_positions} positions, windows or its own text have {longest}: lower "
            "schedule.seq_len, schedule.decay_seq_len or distill.continuation_tokens"
        )
    return teacher


def check_networks(recipe: Recipe) -> None:
    """Raises what making the networks does, before an earlier run is deleted."""
    make_net(recipe)
    if recipe.distill is not None:
        load_teacher(recipe, recipe.distill)


def make_heldout(recipe: Recipe, prepared: Prepared) -> Heldout:
    """Picks the held-out windows of a run."""
    tokens = {name: load_tokens(prepared.folder, name, "heldout") for name in recipe.mix}
    lens_bytes = token_lens_bytes(prepared.tokenizer)
    return Heldout.build(tokens, lens_bytes, recipe.schedule.seq_len, recipe.run.heldout_windows)


def make_loss(
    recipe: Recipe, net: Net, train: dict[str, Tokens], prepared: Prepared, console: Console
) -> tuple[Loss, dict[str, float]]:
    """Chooses the loss and the mix; when distilling, adds the teacher's own text to `train`."""
    if recipe.distill is None:
        counts_all = recipe.prompt_weight == 1.0
        weigh = None if counts_all else PromptWeights.of(prepared.tokenizer, recipe.prompt_weight)
        return next_token_loss(net, recipe.run, weigh), recipe.mix
    teacher = load_teacher(recipe, recipe.distill)
    train[OWN_TEXT] = sample_own_text(recipe, teacher, train, prepared.folder, console.say)
    share = recipe.distill.sample_share
    weights = {**recipe.mix, OWN_TEXT: sum(recipe.mix.values()) * share / (1 - share)}
    return distillation_loss(net, teacher, recipe.run), weights


def write_results(trainer: Trainer, prepared: Prepared, folder: Path, report: Report) -> None:
    """Writes the exported model, the metrics and, with matplotlib, the picture."""
    recipe = trainer.recipe
    export_model(trainer.net, prepared.folder, folder / "export")
    metrics = {
        "step": trainer.step,
        "history": [asdict(line) for line in trainer.history],
        "sources": {name: asdict(count) for name, count in prepared.counts.items()},
    }
    if recipe.distill is not None:
        teacher = load_model(Path(recipe.distill.teacher)).to(recipe.run.device)
        metrics["acceptance_rate"] = acceptance_rate(trainer.net, teacher, trainer.heldout)
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    if not draw_history(trainer.history, folder / "loss.png"):
        report(NO_PICTURE)


def export_run(run_dir: Path, folder: Path) -> int:
    """Exports the last checkpoint of a run, even of one in progress, into `folder`; returns its step.

    Raises TrainingError for a folder without a checkpoint, or with that of a head.
    """
    path = run_dir / LAST
    if not path.is_file():
        raise TrainingError(f"there is no checkpoint {path}: give the folder of a run that has saved one")
    state = read_last(run_dir)
    net = Net(NetConfig(**state["recipe"]["model"]))
    net.load_state_dict(state["model"])
    export_model(net, run_dir / "data", folder)
    return int(state["step"])
