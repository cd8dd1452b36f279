"""A head from its recipe.

Knows which class trains which kind. Knows nothing of data or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError
from forerun.training.heads.base import Head
from forerun.training.heads.config import HeadRecipe
from forerun.training.heads.draft import DraftHead
from forerun.training.heads.eagle3 import Eagle3Head
from forerun.training.heads.medusa import MedusaHead
from forerun.training.heads.mtp import MtpHead
from forerun.training.heads.target import Target
from forerun.training.heads.vocabulary import DraftVocabulary, frequent_tokens

HEADS: Mapping[str, Callable[[Target, Any, DraftVocabulary], Head]] = {
    "medusa": MedusaHead,
    "eagle3": Eagle3Head,
    "mtp": lambda target, config, _vocabulary: MtpHead(target, config),
    "draft": lambda target, config, _vocabulary: DraftHead(target, config),
}


def make_head(recipe: HeadRecipe, target: Target, counts: Tensor) -> Head:
    """Makes a head with random or copied weights; counts [vocab]: how often each token stands in the data.

    Raises ConfigError if the target has too few positions for the windows.
    """
    found = target.shape.max_positions
    if recipe.schedule.seq_len > found:
        raise ConfigError(f"schedule.seq_len {recipe.schedule.seq_len} exceeds the target's {found} positions")
    torch.manual_seed(recipe.seed)
    size = min(getattr(recipe.head, "vocab_size", 0), target.shape.vocab_size)
    head = HEADS[recipe.kind](target, recipe.head, frequent_tokens(counts, size))
    if recipe.start_from:
        take_weights(head, Path(recipe.start_from))
    return head.to(target.head.device)


def take_weights(head: Head, folder: Path) -> None:
    """Copies the weights of an exported head; raises CheckpointError if it is one of another shape."""
    try:
        found = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"start_from: {folder} holds no readable exported head: {error}") from error
    own = head.tensors()
    odd = [n for n in own.keys() | found.keys() if n not in own or n not in found or own[n].shape != found[n].shape]
    if odd:
        raise CheckpointError(
            f"start_from: {folder} and [head] differ in {', '.join(sorted(odd))}; give an export of the same shape"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.is_floating_point():
                tensor.copy_(found[name])  # state dicts share their memory with the head
            elif not tensor.equal(found[name]):
                raise CheckpointError(f"start_from: {folder} drafts another vocabulary ({name}); train without it")
