"""The training loop of `forerun train lm`: batches in, checkpoints and a loss history out.

Knows steps, schedules and optimizers. Does not know: losses (`losses`), where data comes from (`mixture`), how the
result is written as a model (`export`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forerun.training.checkpoint import LAST, STABLE, find_checkpoint, write_atomically
from forerun.training.data import Tokens
from forerun.training.heldout import Heldout, bits_per_byte
from forerun.training.mixture import Mixture
from forerun.training.muon import Muon
from forerun.training.net import Net
from forerun.training.recipe import OptimizerConfig, Recipe

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StepReport:
    """One line of the history: the mean loss in nats per token since the last line."""

    step: int
    tokens: int
    loss: float
    learning_rate_scale: float
    tokens_per_s: float
    heldout: dict[str, float] = field(default_factory=dict)


class Watcher(Protocol):
    """Is told about progress and may ask for an early stop."""

    def on_report(self, report: StepReport) -> None:
        """Takes one line of the history."""

    def should_stop(self) -> bool:
        """Tells whether to save and stop after this step."""


def make_optimizers(net: nn.Module, config: OptimizerConfig, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Gives Muon, computing in `dtype`, the matrices of the layers and AdamW the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in net.named_parameters():
        (matrices if weight.ndim == 2 and "embed_tokens" not in name else rest).append(weight)
    adamw = torch.optim.AdamW(rest, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [Muon(matrices, config.muon_lr, config.muon_momentum, config.muon_weight_decay, dtype), adamw]


def apply_gradients(
    net: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rates: Sequence[float], clip_norm: float
) -> None:
    """Clips the gradients of `net` and steps every optimizer, a rate per parameter group; then clears gradients."""
    nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Trainer:
    """Trains one network by a recipe; resumed runs equal uninterrupted ones exactly."""

    def __init__(
        self,
        recipe: Recipe,
        net: Net,
        loss: Loss,
        sources: Mapping[str, Tokens],
        weights: Mapping[str, float],
        heldout: Heldout,
        folder: Path,
        end_of_text: int | None,
    ) -> None:
        self.recipe, self.net, self.loss, self.heldout, self.folder = recipe, net, loss, heldout, folder
        schedule = recipe.schedule
        self.optimizers = make_optimizers(net, recipe.optimizer, recipe.run.dtype)
        self.base_rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.mixtures = {
            seq_len: Mixture(sources, weights, seq_len, recipe.seed, end_of_text)
            for seq_len in {schedule.seq_len, schedule.decay_seq_len}
        }
        self.step = 0
        self.history: list[StepReport] = []

    def resume(self) -> bool:
        """Continues from the newest fitting checkpoint, if there is one."""
        state = find_checkpoint(self.folder, self.recipe)
        if state is None:
            return False
        self.step = state["step"]
        self.net.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for seq_len, counts in state["windows_drawn"].items():
            if seq_len in self.mixtures:
                self.mixtures[seq_len].counts.update(counts)
        self.history = [StepReport(**line) for line in state["history"]]
        return True

    def save(self, name: str = LAST) -> None:
        """Writes a checkpoint."""
        state: dict[str, Any] = {
            "step": self.step,
            "recipe": asdict(self.recipe),
            "model": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "windows_drawn": {seq_len: dict(mixture.counts) for seq_len, mixture in self.mixtures.items()},
            "history": [asdict(line) for line in self.history],
        }
        write_atomically(self.folder / name, state)

    def run(self, watcher: Watcher) -> bool:
        """Trains to the end of the schedule; returns False if it was stopped before."""
        started, losses = time.perf_counter(), []
        while self.step < self.recipe.schedule.steps:
            if self.step == self.recipe.schedule.decay_start:
                self.save(STABLE)
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
        """Runs one optimizer step; returns the mean loss in nats per token."""
        schedule = self.recipe.schedule
        seq_len = schedule.seq_len_at(self.step)
        num_micro = schedule.tokens_per_step // schedule.micro_tokens
        total = 0.0
        for _ in range(num_micro):
            windows = self.mixtures[seq_len].next_batch(schedule.micro_tokens // seq_len)
            loss = self.loss(windows.to(self.recipe.run.device)) / num_micro
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self.update_weights(schedule.learning_rate_scale(self.step))
        return total

    def update_weights(self, scale: float) -> None:
        """Clips the gradients and applies both optimizers at the scaled learning rates."""
        clip_norm = self.recipe.optimizer.clip_norm
        apply_gradients(self.net, self.optimizers, [rate * scale for rate in self.base_rates], clip_norm)

    def log(self, watcher: Watcher, losses: list[float], elapsed_s: float) -> None:
        """Adds a line to the history, with held-out figures when they are due."""
        tokens_per_step = self.recipe.schedule.tokens_per_step
        report = StepReport(
            step=self.step,
            tokens=self.step * tokens_per_step,
            loss=sum(losses) / len(losses),
            learning_rate_scale=self.recipe.schedule.learning_rate_scale(self.step - 1),
            tokens_per_s=len(losses) * tokens_per_step / elapsed_s,
            heldout=bits_per_byte(self.net, self.heldout) if self.is_due(self.recipe.run.heldout_every) else {},
        )
        self.history.append(report)
        watcher.on_report(report)
