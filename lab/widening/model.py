"""A checkpoint of a larger shape that computes the same function, so that real text meets a real cost.

Knows: what is checked, written and copied. Does not know: single tensors (`widening.tensors`).

What agrees: the function is the same, its rounding not always. With a hidden size 4, 16, 64 ... times the old one the
norms' factor is a power of two and no weight is rounded; if also as many query heads share a key-value head as before,
the C++ kernels sum the old entries in the old order and the logits have the same bits (but not where AMX tiles take
matrices for being large, docs/decisions/0009; `"cpu:avx512"` is free of them). Otherwise norms are rounded to
float32 (and stored in it) or products are summed in other groups: intermediate results differ in the last bits of
float32, which a bfloat16 KV cache can turn into its own last bit, and logits agree to about four digits. Widened models
are for measuring: say beside every number taken on one that it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from forerun.bench.speed import WIDENED_FROM
from forerun.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from forerun.models.build import INERT_TENSORS
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.loader import find_family
from forerun.weights.checkpoint import INDEX_FILE, INDEX_FILES, Checkpoint, read_json
from forerun.weights.safetensors_write import write_tensors
from widening.sizes import Sizes, is_exact
from widening.tensors import TensorPiece, Widening

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # whose arithmetic the argument in widening.tensors covers
SHARD_BYTES = 512 << 20
NOT_COPIED = ("config.json", *INDEX_FILES)
COPIED = ("*.json", "*.model", "*.jinja", "*.txt", "*.md")


def open_source(folder: Path) -> tuple[Checkpoint, ModelConfig, Family]:
    """The checkpoint to widen; raises UnsupportedError for families and storages that cannot be."""
    if folder.is_file():
        raise UnsupportedError(f"{folder} is a single file; give the folder of the unquantized model in safetensors")
    raw = read_json(folder / "config.json")
    family = find_family(raw)
    if family is None or family.model_type not in FAMILIES:
        raise UnsupportedError(
            f"{folder}: models of type {raw.get('model_type')} cannot be widened; supported are {', '.join(FAMILIES)}"
        )
    if raw.get("quantization_config"):
        raise UnsupportedError(f"{folder} is quantized; widen the unquantized checkpoint, then quantize the result")
    return Checkpoint.open(folder), ModelConfig.read(raw, family), family


def widen(source: tuple[Checkpoint, ModelConfig, Family], sizes: Sizes, out: Path, name: str) -> dict[str, Any]:
    """Write the widened checkpoint to the new folder `out` -> a report.

    `name` is how the model was called; the new config.json says it.
    Raises ConfigError if `out` is taken, ResourceError if the disk is too small, UnsupportedError for tensors that
    are not part of the model.
    """
    checkpoint, config, family = source
    pieces = list(Widening(checkpoint, config, family, sizes).pieces())
    _refuse_others(checkpoint, pieces)
    total = write_folder(out, pieces, widened_config(checkpoint.config, config, sizes, name), checkpoint.folder)
    return _report(config, sizes, pieces, total)


def write_folder(out: Path, pieces: Sequence[TensorPiece], config: Mapping[str, Any], source: Path) -> int:
    """Write tensors, config.json and the other files of the folder `source` to the new folder `out` -> bytes."""
    total = sum(piece.nbytes for piece in pieces)
    _check_target(out, total)
    folder = out.with_name(f".{out.name}.{os.getpid()}")
    folder.mkdir()
    try:
        _write_tensors(folder, pieces)
        _copy_others(source, folder)
        _write_json(folder / "config.json", config)
        folder.replace(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return total


def widened_config(raw: Mapping[str, Any], config: ModelConfig, sizes: Sizes, name: str) -> dict[str, Any]:
    """config.json of the widened model, which names what it was made from."""
    added = sizes.num_layers - config.num_layers
    changed: dict[str, Any] = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_q,
        "num_key_value_heads": sizes.num_kv,
        "head_dim": config.heads.head_dim,
        "rms_norm_eps": config.norm_eps * config.hidden_size / sizes.hidden_size,
        WIDENED_FROM: {"model": name, **asdict(Sizes.of(config))},
    }
    if isinstance(raw.get("layer_types"), list):
        changed["layer_types"] = [*raw["layer_types"], *["full_attention"] * added]
    return {**raw, **changed}


def _refuse_others(checkpoint: Checkpoint, pieces: Sequence[TensorPiece]) -> None:
    """Tensors that would be left out silently may belong to the function."""
    known = {piece.name for piece in pieces}
    inert = (*INERT_TENSORS, "lm_head.weight")  # the last: a stored copy of a tied table
    others = [name for name in checkpoint if name not in known and not name.endswith(inert)]
    if others:
        raise UnsupportedError(
            f"{checkpoint.folder} has {len(others)} tensors that cannot be widened, e.g. {', '.join(others[:3])}; "
            "take a checkpoint without them"
        )


def _check_target(out: Path, needed: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; give a folder that does not, or delete it")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} to write {out.name} into; make it first")
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise ResourceError(
            f"the widened model takes {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free in {out.parent}; choose "
            "another place or smaller sizes"
        )


def _write_tensors(folder: Path, pieces: Sequence[TensorPiece]) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(pieces), 1):
        name = f"model-{number:05d}.safetensors"
        tensors = {piece.name: piece.make().contiguous() for piece in shard}
        _check_finite(tensors)
        write_tensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    total = sum(piece.nbytes for piece in pieces)
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """NaN or infinity times a zero column is no zero: such a model has no widening."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
            raise CheckpointError(f"tensor {name} holds NaN or infinity; a model with such weights cannot be widened")


def _shards(pieces: Sequence[TensorPiece]) -> Iterator[list[TensorPiece]]:
    """Neighbouring tensors of about SHARD_BYTES together."""
    shard: list[TensorPiece] = []
    for piece in pieces:
        if shard and sum(other.nbytes for other in shard) + piece.nbytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(piece)
    yield shard


def _copy_others(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation settings."""
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.name not in NOT_COPIED and path.is_file():
                shutil.copyfile(path, target / path.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _report(config: ModelConfig, sizes: Sizes, pieces: Sequence[TensorPiece], total: int) -> dict[str, Any]:
    old = Sizes.of(config)
    return {
        "sizes": asdict(sizes),
        "sizes_before": asdict(old),
        "weight_bytes": total,
        "num_parameters": sum(torch.Size(piece.shape).numel() for piece in pieces),
        "same_bits": is_exact(old.hidden_size, sizes.hidden_size) and old.group == sizes.group,
    }
