"""`forerun train medusa|eagle3|dflash|mtp|draft`: combines the parts from recipe to exported head.

Knows the run folder: `data/` (answers, held-out answers, captured states), `last.pt`, `metrics.json`, `loss.png`,
`export/`. Does not know: how the parts do their work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ConfigError, ResourceError, UnsupportedError
from forerun.kernels.select import select_kernels
from forerun.models.loader import load_model
from forerun.training.heads.build import make_head
from forerun.training.heads.capture import capture, rows_within
from forerun.training.heads.config import FREE, HeadJob, HeadRecipe
from forerun.training.heads.console import HeadConsole
from forerun.training.heads.engine_target import EngineTarget
from forerun.training.heads.export import export_head
from forerun.training.heads.feed import Feed, OnlineFeed, captured_layers
from forerun.training.heads.loss import HeadLoss, step_weights
from forerun.training.heads.plots import draw_head_history
from forerun.training.heads.rows import Rows
from forerun.training.heads.sequences import fingerprint, prepare
from forerun.training.heads.target import NetTarget, TrainingTarget, is_plain_llama, load_net_target, read_table
from forerun.training.heads.train import HeadTrainer
from forerun.training.plots import NO_PICTURE
from forerun.training.run_folder import announced, open_run
from forerun.weights.resolve import resolve_model

Report = Callable[[str], None]
DEVICES = ("cpu", "cuda")


def train_head(recipe: HeadRecipe, job: HeadJob, console: HeadConsole) -> bool:
    """Trains a head and exports it to `folder/export`; returns False if stopped early.

    Resumes from the checkpoint in the folder unless `fresh`. A stopped run is exported as it is.
    """
    start = [Path(recipe.start_from)] if recipe.start_from else []
    open_run(job.folder, job.fresh, [*job.data, *start])
    trainer = make_trainer(recipe, job, console)
    console.say(announced(trainer.resume(), recipe.schedule.steps, recipe.schedule.tokens_per_step))
    with console.watching(recipe.schedule.steps, trainer.step):
        finished = trainer.run(console)
    write_results(trainer, resolve_model(job.target), console.say)
    return finished


def make_trainer(recipe: HeadRecipe, job: HeadJob, console: HeadConsole) -> HeadTrainer:
    """Loads the target, prepares the data and makes the head."""
    check_exportable(recipe.kind, resolve_model(job.target))
    target = load_target(job.target, job.device)
    make_head(recipe, target, torch.zeros(target.shape.vocab_size))  # fails before an earlier run is deleted
    data = prepare(recipe, job, target, console.say)
    head = make_head(recipe, target, data.train.counts(target.shape.vocab_size))
    feed = make_feed(recipe, job, data.train, target, captured_layers(head, target), console.say)
    heldout = OnlineFeed(data.heldout, target, captured_layers(head, target))
    num_weights = sum(weight.numel() for weight in head.parameters())
    console.say(f"{recipe.kind} head of {num_weights} trained weights; {len(feed.rows)} sequences")
    weights = step_weights(head.num_steps, recipe.head.decay)
    loss = HeadLoss(head, target, recipe.head.labels, weights, recipe.run.compile)
    return HeadTrainer(recipe, loss, feed, heldout, job.folder, identity_of(recipe, target, feed.rows))


def check_exportable(kind: str, target_folder: Path) -> None:
    """A draft model is exported with its target's tokenizer; raises UnsupportedError if there is none."""
    if kind == "draft" and not (target_folder / "tokenizer.json").is_file():
        raise UnsupportedError(
            f"{target_folder} has no tokenizer.json, which a draft model gets from its target; give the target as a "
            "folder that has one, or train medusa, eagle3, dflash or mtp heads"
        )


def load_target(name: str, device: str) -> TrainingTarget:
    """The target as a torch network if that computes it exactly, else through the engine."""
    folder = resolve_model(name)
    place = torch_device(device)
    if folder.is_dir() and is_plain_llama(read_table(folder)):
        return load_net_target(folder, place)
    if place.type != "cpu":
        raise UnsupportedError(
            f"{name} is computed by the engine, on the CPU: only plain Llama models train on {device}"
        )
    return EngineTarget(load_model(name, select_kernels("auto", None)))


def torch_device(name: str) -> torch.device:
    """The device of a name; raises ConfigError or ResourceError if it does not exist."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name} is unknown; allowed are {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ResourceError("this machine has no CUDA device that torch can use; train with --device cpu")
    return torch.device(name)


def make_feed(
    recipe: HeadRecipe, job: HeadJob, rows: Rows, target: TrainingTarget, layers: tuple[int, ...], report: Report
) -> Feed:
    """States from disk within the recipe's budget, or computed while training."""
    budget = recipe.data.capture_bytes
    if not budget:
        return OnlineFeed(rows, target, layers, recipe.run.compile and isinstance(target, NetTarget))
    rows = rows_within(rows, len(layers) * target.shape.hidden_size, budget, report)
    about = {"target": job.target, "text": fingerprint(rows)}
    return capture(rows, target, layers, job.folder / "data", about, report)


def identity_of(recipe: HeadRecipe, target: TrainingTarget, rows: Rows) -> dict[str, Any]:
    """What decides the outcome of a training."""
    fields = {name: value for name, value in asdict(recipe).items() if name not in FREE}
    shape = asdict(target.shape)
    return {**fields, "precision": recipe.run.precision, "target": shape, "text": fingerprint(rows)}


# -- results -------------------------------------------------------------------------------------------------------


def write_results(trainer: HeadTrainer, target_folder: Path, report: Report) -> None:
    """Writes the exported head, the metrics and, with matplotlib, the picture."""
    folder = trainer.folder
    export_head(trainer.head, target_folder, folder / "export")
    metrics = {
        "step": trainer.step,
        "kind": trainer.recipe.kind,
        "acceptance_length": last_measured(trainer),
        "history": [asdict(line) for line in trainer.history],
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    if not draw_head_history(trainer.history, folder / "loss.png"):
        report(NO_PICTURE)


def last_measured(trainer: HeadTrainer) -> float | None:
    """The simulated acceptance length measured last."""
    return next((x.acceptance_length for x in reversed(trainer.history) if x.acceptance_length is not None), None)
