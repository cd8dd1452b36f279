"""Mini at the cost of the largest shape there is room for, with its heads; written while other parts run on the GPU.

    python lab/gpu_widen.py FOLDER    (what FOLDER/widened.request.json asks for)

A model at the 8B shape is 16 GB of numbers, most of a minute of one core: a process of its own begins with the run, and
the parts that need the model wait for what is left of it. Everything is written whole or not at all; a run that was
started again goes on behind what is there.

Knows: what is widened to which sizes, where it lies. Does not know: what is measured with it, results.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.bench.shapes import Shape, read_shape
from forerun.models.config import ModelConfig, num_parameters
from forerun.models.memory import memory_of
from forerun.weights.resolve import resolve_model
from gpu_watch import write_state
from widening.heads import WidenedTarget, widen_head
from widening.model import open_source, widen, widened_config
from widening.sizes import Sizes

HEADS = ("eagle", "mtp", "medusa")  # what must be shown first
ROOM = 3  # a widened model's bytes must be there so often on the GPU: weights, engines' pools, transformers' copy
REQUEST, DONE = "widened.request.json", "widened.json"
MODEL, SHAPE = "widened", "widened-shape"  # the model; its config.json alone, which is there at once


class Widened(NamedTuple):
    """What there is, and by name what there is not and why."""

    folder: Path
    heads: dict[str, Path]
    errors: dict[str, str]


class WideningProcess:
    """The process that widens, and where its work lies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def shape(self) -> Path:
        """A folder with the config.json of the model to come."""
        return self._folder / SHAPE

    def begin(self, model: str, heads: Sequence[str], shapes: Sequence[str], device: torch.device) -> None:
        """Widen `model` to the largest of the shapes, small to large, that `device` and the disk have room for.

        To twice its width where there is room for none.
        """
        checkpoint, config, _ = open_source(resolve_model(model))
        sizes = chosen_sizes(config, shapes, self._folder, device)
        self.shape.mkdir(exist_ok=True)
        write_state(dict(widened_config(checkpoint.config, config, sizes, model)), self.shape / "config.json")
        write_state({"model": model, "heads": list(heads), "sizes": asdict(sizes)}, self._folder / REQUEST)
        if not (self._folder / DONE).exists():
            self._process = subprocess.Popen([sys.executable, __file__, str(self._folder)])

    def result(self, timeout_s: float | None = None) -> Widened:
        """Wait for what is left to do; raises what `Popen.wait` does, RuntimeError where there is no model."""
        if self._process is not None:
            self._process.wait(timeout_s)
        done = self._folder / DONE
        silent = {"heads": [], "errors": {MODEL: "its process said nothing"}}
        told = json.loads(done.read_text("utf-8")) if done.exists() else silent
        if MODEL in told["errors"]:
            raise RuntimeError(f"the model was not widened: {told['errors'][MODEL]}")
        heads = {head: head_folder(self._folder, head) for head in told["heads"]}
        return Widened(self._folder / MODEL, heads, told["errors"])


def head_folder(folder: Path, head: str) -> Path:
    """Where a head for the widened model lies."""
    return folder / f"{MODEL}-{head}"


def chosen_sizes(config: ModelConfig, shapes: Sequence[str], folder: Path, device: torch.device) -> Sizes:
    """The largest shape that GPU and disk have room for, else twice the width."""
    for name in reversed(shapes):
        needed, free = 2 * num_parameters(read_shape(name).config), memory_of(device)
        if shutil.disk_usage(folder).free > 1.2 * needed and (free is None or free > ROOM * needed):
            return as_wide(config, read_shape(name))
    return replace(Sizes.of(config), hidden_size=2 * config.hidden_size, ffn_size=2 * config.ffn_size)


def as_wide(config: ModelConfig, shape: Shape) -> Sizes:
    """The shape's sizes with as many entries of queries, keys and values, in heads of `config`'s size."""
    wanted, own = Sizes.of(shape.config), config.heads.head_dim
    per_head = shape.config.heads.head_dim // own
    return replace(wanted, num_q=wanted.num_q * per_head, num_kv=wanted.num_kv * per_head)


# -- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Do what was asked for and say what came of it."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text("utf-8"))
    told: dict[str, Any] = {"heads": [], "errors": {}}
    try:
        if not (folder / MODEL).exists():
            source = open_source(resolve_model(request["model"]))
            widen(source, Sizes(**request["sizes"]), folder / MODEL, request["model"])
    except Exception:
        told["errors"][MODEL] = traceback.format_exc()
    for head in [] if told["errors"] else request["heads"]:
        try:
            if not head_folder(folder, head).exists():
                target = WidenedTarget.open(folder / MODEL)
                widen_head(target, resolve_model(f"mini-{head}"), head_folder(folder, head))
            told["heads"].append(head)
        except Exception:
            told["errors"][head] = traceback.format_exc()
    write_state(told, folder / DONE)


if __name__ == "__main__":
    main()
