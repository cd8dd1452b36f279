"""Checkpoint folders: lazy reading, shards, indices that lie."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.checkpoint import INDEX_FILE, TORCH_FILE, Checkpoint, has_weights, read_optional_json


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


def test_an_index_of_files_that_are_gone_does_not_hide_the_model_in_one_file(folder: Path) -> None:
    """transformers leaves it where a model that was in shards is saved again in one file."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint.open(folder).tensor("a").shape == (2, 3)


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


# -- files of torch.save --------------------------------------------------------------------------------------------


class Code:
    """Unpickling it would call a function."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo this must not run > /dev/stderr",)


def saved(folder: Path, value: object, **options: Any) -> Path:
    (folder / "config.json").write_text("{}")
    torch.save(value, folder / TORCH_FILE, **options)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(tmp_path: Path, zipped: bool) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": table.T, "b": torch.nn.Parameter(table[1].half()), "c": torch.tensor([1, 2])}
    checkpoint = Checkpoint.open(saved(tmp_path, tensors, _use_new_zipfile_serialization=zipped))
    assert has_weights(tmp_path) and checkpoint.files == [tmp_path / TORCH_FILE]
    assert checkpoint.shape("a") == (4, 3) and checkpoint.dtype("b") == torch.float16
    assert torch.equal(checkpoint.tensor("a", (4, 3)), table.T) and checkpoint.unread == ["b", "c"]
    assert not checkpoint.tensor("b").requires_grad
    assert checkpoint.integers("c").tolist() == [1, 2]
    with pytest.raises(CheckpointError, match=r"a of .*pytorch_model\.bin has shape \[4, 3\].*asks for \[3, 4\]"):
        checkpoint.tensor("a", (3, 4))
    with pytest.raises(UnsupportedError, match="stored as I64"):
        checkpoint.tensor("c")


def test_safetensors_come_before_torch_files(folder: Path) -> None:
    assert torch.equal(Checkpoint.open(saved(folder, {"a": torch.zeros(1)})).tensor("a"), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": torch.ones(2), "b": Code()}, r"asks for \w+\.system, which could run code"),
        (torch.nn.Linear(2, 2), "asks for torch.nn.modules.linear.Linear, which could run code"),
        ([torch.ones(2)], r"holds no table of tensors by name \(a list\)"),
        ({"state_dict": {"a": torch.ones(2)}}, "holds 'state_dict', which is no plain tensor"),
        ({"a": torch.eye(2).to_sparse()}, "holds 'a', which is no plain tensor"),
        ({"a": torch.empty(2, device="meta")}, "tensor 'a' has no plain data"),
    ],
)
def test_torch_files_of_something_else(tmp_path: Path, value: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        Checkpoint.open(saved(tmp_path, value))
    assert "\n" not in str(caught.value) and TORCH_FILE in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_torch_files_never_crash(tmp_path: Path, zipped: bool) -> None:
    saved(tmp_path, {"a": torch.ones(2, 3), "b": torch.zeros(4)}, _use_new_zipfile_serialization=zipped)
    whole, draw, refused = (tmp_path / TORCH_FILE).read_bytes(), random.Random(0), 0
    for number in range(120):
        raw = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        (tmp_path / TORCH_FILE).write_bytes(raw[: draw.randrange(len(raw))] if number % 3 == 0 else raw)
        try:
            Checkpoint.open(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert TORCH_FILE in str(error) and "\n" not in str(error) and len(str(error)) < 500
    assert refused > 40  # every one that is cut off, to begin with


def test_optional_json(tmp_path: Path) -> None:
    assert read_optional_json(tmp_path / "absent.json") == {}
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"broken\.json is not valid JSON"):
        read_optional_json(tmp_path / "broken.json")


def test_a_folder_of_a_gguf_file_alone_names_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"has no config.json, but GGUF files.*: give .*/model\.gguf$"):
        Checkpoint.open(tmp_path)
