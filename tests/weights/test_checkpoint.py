"""Checkpoint folders: lazy reading, shards, indices that lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import CheckpointError
from forerun.weights.checkpoint import INDEX_FILE, Checkpoint, has_weights, read_optional_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path, weight_map: object) -> Path:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_reading(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert sorted(checkpoint) == ["a", "b"] and checkpoint.nbytes == 32 and has_weights(folder)
    assert checkpoint.shape("a") == (2, 3) and checkpoint.dtype("b") == torch.float16
    assert checkpoint.unread == ["a", "b"]
    assert torch.equal(checkpoint.tensor("a", (2, 3)), torch.ones(2, 3))
    assert checkpoint.unread == ["b"] and checkpoint.has("b") and not checkpoint.has("c")


def test_errors_name_the_tensor(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match=r"a of .*model\.safetensors has shape \[2, 3\].*asks for \[3, 2\]"):
        checkpoint.tensor("a", (3, 2))
    with pytest.raises(CheckpointError, match="no tensor c"):
        checkpoint.tensor("c")


def test_a_file_that_disappears(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read tensor a"):
        checkpoint.tensor("a")


def test_shards(folder: Path) -> None:
    assert Checkpoint.open(shard(folder, {"a": "one.safetensors"})).tensor("a").shape == (2, 3)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "one.safetensors", "x": "two.safetensors"}, r"lacks 1 of 2 .*two\.safetensors"),
        ({"missing": "one.safetensors"}, "lacks tensor missing"),
        ({"a": "../one.safetensors"}, "not a file name"),
        ({"a": 3}, "not a file name"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_lying_indices(folder: Path, weight_map: object, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Checkpoint.open(shard(folder, weight_map))


def test_optional_json(tmp_path: Path) -> None:
    assert read_optional_json(tmp_path / "absent.json") == {}
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"broken\.json is not valid JSON"):
        read_optional_json(tmp_path / "broken.json")
