"""Writing the quantized model as a folder others can load.

Knows: the files of a Hugging Face folder. Does not know: how layers were quantized.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.weights.chat import OTHER_TEMPLATES
from forerun.weights.checkpoint import INDEX_FILE, INDEX_FILES, SINGLE_FILE, Checkpoint
from forerun.weights.safetensors_write import write_tensors

COPIED = ("*.json", "*.model", "*.jinja", "*.txt", OTHER_TEMPLATES)  # tokenizer, templates, generation settings
OWN = ("config.json", *INDEX_FILES, "quantize_config.json")
SHARD_BYTES = 4 << 30


def write_model(
    checkpoint: Checkpoint, tensors: Iterable[tuple[str, Tensor]], section: Mapping[str, Any], out: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Write the folder `out`: `tensors` by name, one shard in memory at a time, and the other files of `checkpoint`.

    config.json comes last: a folder without it is not a model.
    """
    config = {**checkpoint.config, "quantization_config": section}
    aside = out / "config.json.new"
    aside.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    for path in _write_shards(tensors, out, shard_bytes):
        shutil.copymode(aside, path)  # the safetensors library writes files that only their owner may read
    for pattern in COPIED:
        for path in checkpoint.folder.glob(pattern):
            if path.name not in OWN:
                copy = out / path.relative_to(checkpoint.folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)
    os.replace(aside, out / "config.json")


def weight_bytes(path: Path) -> int:
    """Bytes of a folder's weight files, or of a file that holds all."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in Checkpoint.open(path).files)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], out: Path, shard_bytes: int) -> list[Path]:
    """One file, or several with an index; their number is known only at the end."""
    shards: list[tuple[Path, list[str]]] = []
    batch: dict[str, Tensor] = {}
    total = held = 0
    for name, tensor in tensors:
        if batch and held + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(batch, out, len(shards)))
            batch, held = {}, 0
        batch[name] = tensor.contiguous()
        held, total = held + tensor.nbytes, total + tensor.nbytes
    shards.append(_write_shard(batch, out, len(shards)))
    return _name_shards(shards, out, total)


def _write_shard(tensors: dict[str, Tensor], out: Path, number: int) -> tuple[Path, list[str]]:
    path = out / f"shard-{number}.new"
    write_tensors(path, tensors)
    return path, list(tensors)


def _name_shards(shards: Sequence[tuple[Path, list[str]]], out: Path, total: int) -> list[Path]:
    if len(shards) == 1:
        return [shards[0][0].replace(out / SINGLE_FILE)]
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = f"model-{number:05}-of-{len(shards):05}.safetensors"
        os.replace(path, out / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return [out / final for final in dict.fromkeys(weight_map.values())]
