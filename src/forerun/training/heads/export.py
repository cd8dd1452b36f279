"""Writing a trained head as a checkpoint folder in its published layout.

Knows files and precisions. Names, shapes and config fields are the head's own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from forerun.training.export import write_json, write_weights
from forerun.training.heads.base import Head
from forerun.training.tokenizer import TOKENIZER_FILES

DRAFT_FILES = (*TOKENIZER_FILES, "generation_config.json")  # a draft model is a model of its own


def stored(tensor: Tensor) -> Tensor:
    """A tensor as it is written: floats as bfloat16, ids and masks as they are."""
    kind = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind).contiguous().clone()  # tables shared in memory are written one by one


def export_head(head: Head, target_folder: Path, folder: Path) -> None:
    """Writes config.json and model.safetensors; a draft model also gets its target's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", head.config())
    if head.kind == "draft":
        for name in DRAFT_FILES:
            if (target_folder / name).is_file():
                shutil.copy(target_folder / name, folder / name)
    weights = {name: stored(tensor) for name, tensor in head.tensors().items()}
    write_weights(folder, weights)
