"""A head from its recipe.

Knows which class trains which kind. Knows nothing of data or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError
from forerun.training.heads.base import Head
from forerun.training.heads.config import HeadRecipe
from forerun.training.heads.dflash import DFlashHead
from forerun.training.heads.draft import DraftModelTraining
from forerun.training.heads.eagle3 import Eagle3Head
from forerun.training.heads.medusa import MedusaHead
from forerun.training.heads.mtp import MtpHead
from forerun.training.heads.target import TrainingTarget
from forerun.training.heads.vocabulary import LearnedVocabulary, exported_vocabulary, frequent_tokens

HEADS: Mapping[str, Callable[[TrainingTarget, Any, LearnedVocabulary], Head]] = {
    "medusa": MedusaHead,
    "eagle3": Eagle3Head,
    "dflash": lambda target, config, _vocabulary: DFlashHead(target, config),
    "mtp": lambda target, config, _vocabulary: MtpHead(target, config),
    "draft": lambda target, config, _vocabulary: DraftModelTraining(target, config),
}


def make_head(recipe: HeadRecipe, target: TrainingTarget, counts: Tensor) -> Head:
    """Makes a head with random or copied weights; counts [vocab]: how often each token occurs in the data.

    Raises what `read_start` does.
    """
    start = read_start(recipe, target)
    torch.manual_seed(recipe.seed)
    head = HEADS[recipe.kind](target, recipe.head, _vocabulary(recipe, start, counts))
    if start is not None:
        take_weights(head, start)
    return head.to(target.head.device)


@dataclass(frozen=True)
class Export:
    """An exported head: its folder and its tensors by name."""

    folder: Path
    tensors: Mapping[str, Tensor]


def read_start(recipe: HeadRecipe, target: TrainingTarget) -> Export | None:
    """The head that training begins with, if there is one.

    Raises CheckpointError if it cannot be read, and ConfigError if the target has too few positions for the windows.
    """
    found = target.shape.max_positions
    if recipe.schedule.seq_len > found:
        raise ConfigError(f"schedule.seq_len {recipe.schedule.seq_len} exceeds the target's {found} positions")
    return read_export(Path(recipe.start_from)) if recipe.start_from else None


def read_export(folder: Path) -> Export:
    """Reads an exported head; raises CheckpointError if the folder has none."""
    try:
        return Export(folder, load_file(folder / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"start_from: {folder} holds no readable exported head: {error}") from error


def _vocabulary(recipe: HeadRecipe, start: Export | None, counts: Tensor) -> LearnedVocabulary:
    """The vocabulary of the head that is trained further, if any: its rows belong to those tokens."""
    size = min(getattr(recipe.head, "vocab_size", 0), len(counts))
    started = exported_vocabulary(start.tensors, len(counts)) if start is not None else None
    return started if started is not None and started.size == size else frequent_tokens(counts, size)


def take_weights(head: Head, start: Export) -> None:
    """Copies the weights of an exported head; raises CheckpointError if it has another shape or odd maps."""
    own, found = head.tensors(), start.tensors
    odd = [n for n in own.keys() | found.keys() if n not in own or n not in found or own[n].shape != found[n].shape]
    if odd:
        raise CheckpointError(
            f"start_from: {start.folder} and [head] differ in {', '.join(sorted(odd))}; give one of the same shape"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.is_floating_point():
                tensor.copy_(found[name])  # shares its memory with the head, but for a shared output layer
            elif not tensor.equal(found[name]):
                raise CheckpointError(
                    f"start_from: {start.folder} has a {name} that is not its draft vocabulary's; export it anew"
                )
