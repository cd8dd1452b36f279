"""load_model: layouts, options, and one clear error for everything that can be wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    ResourceError,
    UnsupportedError,
    VocabularyError,
)
from forerun.models import memory
from forerun.models.loader import load_model, read_config
from tests.models import factory
from tests.models.factory import Runner

TOKENS = [5, 9, 40, 33, 7]
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return factory.make_checkpoint("llama", tmp_path)


def load(folder: Path | str, **options: Any) -> Any:
    return load_model(folder, factory.make_kernels(), **options)


def change_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = factory.make_checkpoint("qwen3", tmp_path / "single")
    module = factory.random_hf_model(*factory.CASES["qwen3"])
    sharded = factory.save_checkpoint(module, tmp_path / "sharded", max_shard_size="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    logits = [Runner(load(folder).model, 8).span(TOKENS).logits for folder in (single, sharded)]
    assert torch.equal(*logits)


def test_progress_and_max_position(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load(folder, max_position=16, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert loaded.model.max_position == 16
    assert loaded.model.parts.layers[0].attention.rope_table.shape[0] == 16
    assert loaded.config == read_config(folder)
    assert loaded.tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize("wanted", [0, 65, -1])
def test_impossible_max_position(folder: Path, wanted: int) -> None:
    with pytest.raises(ConfigError, match="from 1 to 64"):
        load(folder, max_position=wanted)


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype must be one of auto, float32, bfloat16, float16; got 'int3'"):
        load(folder, dtype="int3")


def test_unknown_model() -> None:
    with pytest.raises(ModelNotFoundError, match="embedded models are mini, mini-draft"):
        load("/no/such/folder")


def test_missing_shard(tmp_path: Path) -> None:
    folder = factory.save_checkpoint(factory.random_hf_model("llama"), tmp_path, max_shard_size="30KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(folder)


def test_truncated_weights(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[:-100])
    with pytest.raises(CheckpointError, match="cut off"):
        load(folder)


def test_missing_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_missing_norm(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load(folder)


def test_wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=56)
    with pytest.raises(CheckpointError, match=r"gate_proj.*config\.json asks for"):
        load(folder)


def test_wrong_shape_of_one_part(folder: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.{}_proj.weight"
        tensors[name.format("q")] = torch.zeros(31, 32)
        tensors[name.format("k")] = torch.zeros(17, 32)

    change_weights(folder, swap)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight"):
        load(folder)


def test_tensors_that_would_change_the_computation(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(UnsupportedError, match=r"q_proj\.bias"):
        load(folder)


def test_tensors_that_change_nothing(folder: Path) -> None:
    usual = Runner(load(folder).model, 8).span(TOKENS).logits
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change_weights(folder, lambda tensors: tensors.update(extra))
    assert torch.equal(Runner(load(folder).model, 8).span(TOKENS).logits, usual)


def test_integer_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}))
    with pytest.raises(UnsupportedError, match="stored as I64"):
        load(folder)


def test_no_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "other.bin")
    with pytest.raises(CheckpointError, match=r"found other\.bin"):
        load(folder)


def as_bin(folder: Path, num_files: int = 1) -> Path:
    """The same weights as files of torch.save."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-{index % num_files}.bin" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["qwen2", "mixtral", "phi3"])
def test_bin_files_give_the_bits_of_safetensors(case: str, dtype: torch.dtype, num_files: int, tmp_path: Path) -> None:
    folder = factory.make_checkpoint(case, tmp_path, dtype)
    usual = Runner(load(folder).model, 8).span(TOKENS).logits
    assert torch.equal(Runner(load(as_bin(folder, num_files)).model, 8).span(TOKENS).logits, usual)


def test_bin_files_through_transformers(tmp_path: Path) -> None:
    folder = factory.save_checkpoint(factory.random_hf_model("gpt2"), tmp_path)
    usual = Runner(load(folder).model, 8).span(TOKENS).logits
    assert torch.equal(Runner(load(as_bin(folder, 2)).model, 8).span(TOKENS).logits, usual)


@pytest.mark.parametrize("content", ["", "{", "[]", "{]", '{"a": 1}'])
def test_broken_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load(folder)


def test_unsupported_config(folder: Path) -> None:
    change_config(folder, hidden_act="relu")
    with pytest.raises(UnsupportedError, match="relu"):
        load(folder)


def test_family_without_implementation(folder: Path) -> None:
    change_config(folder, model_type="gpt2")
    with pytest.raises(UnsupportedError, match="^leave .implementation. at 'auto'.* of its own for gpt2"):
        load(folder, implementation="forerun")


def test_tokenizer_larger_than_the_model(folder: Path) -> None:
    factory.write_tokenizer(folder, 120)
    with pytest.raises(VocabularyError, match=r"up to 119 .* only 96"):
        load(folder)


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load(folder)


def test_too_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(ResourceError, match="GB are available"):
        load(folder)


def test_available_memory_is_known() -> None:
    assert (memory.available_bytes() or 0) > 1 << 20


def test_without_a_count_of_free_pages_all_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    known = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def sysconf(name: str) -> int:  # macOS's
        if name not in known:
            raise ValueError("unrecognized configuration name")
        return known[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert memory.available_bytes() == 4096000


def test_a_container_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_bytes() == 400000
    (tmp_path / "memory.max").write_text("max\n")
    assert (memory.available_bytes() or 0) > 1 << 20
