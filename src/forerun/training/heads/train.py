"""The training loop of draft heads: batches in, checkpoints and a history out.

Knows steps, optimizers and checkpoints. Does not know: losses (`loss`), where batches come from (`feed`), how the
acceptance length is simulated (`acceptance`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from forerun.errors import TrainingError
from forerun.training.checkpoint import LAST, read_checkpoint, write_atomically
from forerun.training.heads.acceptance import AcceptanceTally, HeldoutAcceptance, guess, matches_of
from forerun.training.heads.config import HeadOptimizer, HeadRecipe
from forerun.training.heads.feed import Batch, Feed
from forerun.training.heads.loss import HeadLoss
from forerun.training.heads.rows import Order
from forerun.training.muon import Muon
from forerun.training.recipe import changes
from forerun.training.train import apply_gradients

EVAL_BATCH = 8


@dataclass(frozen=True)
class HeadReport:
    """One line of the history: the mean loss since the last line, and the simulated acceptance where it was due."""

    step: int
    tokens: int
    loss: float
    learning_rate_scale: float
    tokens_per_s: float
    acceptance_length: float | None = None
    acceptance_by_depth: tuple[float, ...] = ()


class HeadWatcher(Protocol):
    """Is told about progress and may ask for an early stop."""

    def show(self, report: HeadReport) -> None:
        """Takes one line of the history."""

    def should_stop(self) -> bool:
        """Tells whether to save and stop after this step."""


def make_optimizers(head: nn.Module, config: HeadOptimizer, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """One optimizer for everything, or Muon for the matrices inside the head and AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in head.named_parameters():
        inside = weight.ndim == 2 and "lm_head" not in name and "embed_tokens" not in name
        (matrices if inside and config.name == "muon" else rest).append(weight)
    adamw = torch.optim.AdamW(
        rest, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=config.adamw_weight_decay, fused=True
    )
    if not matrices:
        return [adamw]
    return [Muon(matrices, config.muon_lr, config.muon_momentum, config.muon_weight_decay, dtype), adamw]


class HeadTrainer:
    """Trains one head; resumed runs equal uninterrupted ones exactly."""

    def __init__(
        self, recipe: HeadRecipe, loss: HeadLoss, feed: Feed, heldout: Feed, folder: Path, identity: Mapping[str, Any]
    ) -> None:
        """identity: values that must equal a checkpoint's for it to be resumed."""
        self.recipe, self.loss, self.feed, self.heldout, self.folder = recipe, loss, feed, heldout, folder
        self.identity = dict(identity)
        self.head, self.device = loss.head, loss.device
        self.dtype = torch.bfloat16 if recipe.run.precision == "bfloat16" else torch.float32
        self.optimizers = make_optimizers(self.head, recipe.optimizer, self.dtype)
        self.base_rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.order = Order(len(feed.rows), recipe.seed)
        self.step = 0
        self.history: list[HeadReport] = []

    # -- checkpoints --------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Continues from the checkpoint in the folder, if there is one; raises TrainingError if it is another run's."""
        if not (self.folder / LAST).is_file():
            return False
        state = read_checkpoint(self.folder / LAST)
        self.check_identity(state.get("identity", {}))
        self.step = state["step"]
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.history = [HeadReport(**line) for line in state["history"]]
        return True

    def check_identity(self, found: Mapping[str, Any]) -> None:
        """Refuses the checkpoint of another recipe, target or data; what an older one does not have does not count."""
        changed = changes(found, self.identity) if found else ["its checkpoint does not say of what"]
        if changed:
            raise TrainingError(
                f"{self.folder} holds another training: {'; '.join(changed)}. Use another --out, or --fresh"
            )

    def save(self) -> None:
        """Writes a checkpoint."""
        state: dict[str, Any] = {
            "step": self.step,
            "identity": self.identity,
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "history": [asdict(line) for line in self.history],
        }
        write_atomically(self.folder / LAST, state)

    # -- steps --------------------------------------------------------------------------------------------------

    def run(self, watcher: HeadWatcher) -> bool:
        """Trains to the end of the schedule; returns False if it was stopped before."""
        started, losses = time.perf_counter(), []
        while self.step < self.recipe.schedule.steps:
            losses.append(self.train_step())
            self.step += 1
            if self.is_due(self.recipe.run.log_every):
                self.log(watcher, losses, time.perf_counter() - started)
                started, losses = time.perf_counter(), []
            if self.is_due(self.recipe.run.checkpoint_every) or watcher.should_stop():
                self.save()
            if watcher.should_stop():
                return self.step == self.recipe.schedule.steps
        return True

    def is_due(self, every: int) -> bool:
        """Tells whether something done every so many steps is due after this one."""
        return self.step % every == 0 or self.step == self.recipe.schedule.steps

    def train_step(self) -> float:
        """Runs one optimizer step; returns the mean loss in nats per guess."""
        schedule = self.recipe.schedule
        num_micro = schedule.tokens_per_step // schedule.micro_tokens
        rows = schedule.micro_tokens // schedule.seq_len
        total = 0.0
        for micro in range(num_micro):
            numbers = self.order.numbers((self.step * num_micro + micro) * rows, rows)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype is torch.bfloat16):
                batch = self.feed.batch(numbers, schedule.seq_len)
                loss = self.loss(batch.ids, batch.answer, batch.states, batch.final) / num_micro
            loss.backward()
            total += loss.item()
        self.update_weights(schedule.learning_rate_scale(self.step))
        return total

    def update_weights(self, scale: float) -> None:
        """Clips the gradients and applies the optimizers at the scaled learning rates."""
        clip_norm = self.recipe.optimizer.clip_norm
        apply_gradients(self.head, self.optimizers, [rate * scale for rate in self.base_rates], clip_norm)

    # -- the history --------------------------------------------------------------------------------------------

    def log(self, watcher: HeadWatcher, losses: list[float], elapsed_s: float) -> None:
        """Adds a line to the history, with the simulated acceptance when it is due."""
        tokens_per_step = self.recipe.schedule.tokens_per_step
        found = measure(self.loss, self.heldout) if self.is_due(self.recipe.run.heldout_every) else None
        report = HeadReport(
            step=self.step,
            tokens=self.step * tokens_per_step,
            loss=sum(losses) / len(losses),
            learning_rate_scale=self.recipe.schedule.learning_rate_scale(self.step - 1),
            tokens_per_s=len(losses) * tokens_per_step / elapsed_s,
            acceptance_length=found.length if found else None,
            acceptance_by_depth=found.by_depth if found else (),
        )
        self.history.append(report)
        watcher.show(report)


@torch.no_grad()
def measure(loss: HeadLoss, heldout: Feed) -> HeldoutAcceptance:
    """Simulates drafting the held-out answers, in float32."""
    tally, rows = AcceptanceTally(), heldout.rows
    for first in range(0, len(rows), EVAL_BATCH):
        numbers = list(range(first, min(first + EVAL_BATCH, len(rows))))
        longest = max(int(rows.lens[numbers].max()), loss.head.num_steps + 2)  # room for every step of a chain
        batch: Batch = heldout.batch(numbers, longest)
        matches, possible = matches_of(guess(loss.head, batch.states, batch.ids), batch.ids, batch.answer)
        tally.add(matches, possible, rows.prompts[numbers].tolist(), rows.lens[numbers].tolist())
    return tally.result()
