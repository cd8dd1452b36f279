"""Writes a model whose weights are the weighted mean of those of others, parts of one training.

    python lab/average.py OUT runs/mini-world-cpu-10/export=0.6 recipes/checkpoints/mini-world-cpu-9=0.4

Knows: folders in Hugging Face layout with the same tensors in one model.safetensors. Does not know: what they learned.
Where a later part has learned one thing and lost another, the mean may know both (Wortsman et al., 2022, arXiv
2203.05482). All other files are those of the first folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import command
from forerun.errors import ConfigError

WEIGHTS = "model.safetensors"


def average(
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    parts: Annotated[list[str], typer.Argument(help="FOLDER=SHARE of each model; shares come to 1.")],
) -> None:
    """Write the weighted mean of models."""
    shares = [_share(part) for part in parts]
    if abs(sum(share for _, share in shares) - 1.0) > 1e-6:
        raise ConfigError(f"shares must come to 1, got {' + '.join(f'{share:g}' for _, share in shares)}")
    first = shares[0][0]
    if out.exists() and out.resolve() in {folder.resolve() for folder, _ in shares}:
        raise ConfigError(f"{out} is one of the models: write to another folder")
    mean = mean_of(shares)
    shutil.copytree(first, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(mean, out / WEIGHTS, metadata={"format": "pt"})
    typer.echo(f"written to {out}")


def mean_of(shares: list[tuple[Path, float]]) -> dict[str, Tensor]:
    """The mean of each tensor, computed in float32 and rounded to the first model's type."""
    sums, types = dict[str, Tensor](), dict[str, torch.dtype]()
    for number, (folder, share) in enumerate(shares):
        with safe_open(folder / WEIGHTS, "pt") as file:
            names = set(file.keys())
            if number and names != sums.keys():
                raise ConfigError(f"{folder} has other tensors than {shares[0][0]}: {sorted(names ^ sums.keys())[:3]}")
            for name in sorted(names):
                tensor = file.get_tensor(name)
                if number and tensor.shape != sums[name].shape:
                    got, wanted = list(tensor.shape), list(sums[name].shape)
                    raise ConfigError(f"{name} of {folder} is {got}, that of {shares[0][0]} {wanted}")
                types.setdefault(name, tensor.dtype)
                sums[name] = sums.get(name, 0.0) + share * tensor.float()
    return {name: tensor.to(types[name]) for name, tensor in sums.items()}


def _share(part: str) -> tuple[Path, float]:
    folder, _, share = part.rpartition("=")
    try:
        found = Path(folder), float(share)
    except ValueError:
        raise ConfigError(f"models are FOLDER=SHARE, got {part}") from None
    if not (found[0] / WEIGHTS).is_file():
        raise ConfigError(f"there is no {WEIGHTS} in {folder}")
    return found


if __name__ == "__main__":
    command.run(average)
