"""What a quantization run has finished, in OUT/.partial, so that an interrupted one can be resumed.

Knows: a file per finished layer, the calibration text's state after the last one, the run's request. Does
not know: layers, methods. Every file is written under another name and renamed, so none is ever incomplete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import ConfigError
from forerun.weights.safetensors_write import write_tensors

FOLDER = ".partial"
ASKED, STATE = "asked.json", "state.safetensors"
NEXT_LAYER = "next_layer"


class Partial:
    """The finished part of a run."""

    def __init__(self, out: Path, asked: Mapping[str, Any]) -> None:
        """Start, or resume an interrupted run with the same settings.

        Raises ConfigError if `out` holds another run's work or a finished model.
        """
        if (out / "config.json").exists():
            raise ConfigError(f"{out} already holds a model; choose another folder, or delete it first")
        self._folder = out / FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted, path = json.dumps(asked, sort_keys=True), self._folder / ASKED
        if path.exists() and path.read_text("utf-8") != wanted:
            raise ConfigError(
                f"{self._folder} holds a run on another model, text or options; give the same ones to go on, or delete "
                "the folder to start again"
            )
        path.write_text(wanted, "utf-8")

    @property
    def next_layer(self) -> int:
        """How many layers are finished."""
        if not (self._folder / STATE).exists():
            return 0
        with safetensors.safe_open(str(self._folder / STATE), framework="pt") as file:
            return int(file.metadata()[NEXT_LAYER])

    def residuals(self) -> list[Tensor]:
        """The residual stream after the last finished layer."""
        tensors = load_file(self._folder / STATE)
        return [tensors[name] for name in sorted(tensors)]

    def save_layer(self, index: int, tensors: Mapping[str, Tensor], residuals: Sequence[Tensor]) -> None:
        """Record layer `index` as finished: its tensors, and the residual stream after it."""
        self._save(dict(tensors), self.layer_file(index), None)
        state = {f"{number:06}": tensor for number, tensor in enumerate(residuals)}
        self._save(state, self._folder / STATE, {NEXT_LAYER: str(index + 1)})

    def layer_file(self, index: int) -> Path:
        """Where a finished layer's tensors are."""
        return self._folder / f"layer-{index:05}.safetensors"

    def remove(self) -> None:
        """The model is written: delete what was kept for resuming."""
        shutil.rmtree(self._folder)

    def _save(self, tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        aside = path.with_suffix(".new")
        write_tensors(aside, {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
        os.replace(aside, path)
