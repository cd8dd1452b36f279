"""What is told of a checkpoint by its headers is what loading it gives."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import CheckpointError, ConfigError, ModelError, ResourceError
from forerun.kernels.select import select_kernels
from forerun.models import memory
from forerun.models.base import state_specs_of
from forerun.models.gguf_export import export_gguf
from forerun.models.loader import load_model
from forerun.models.overview import look_at, why_refused
from forerun.quantize.run import open_source, round_model
from forerun.quantize.settings import QuantizeSettings
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.resolve import resolve_model
from tests.models import factory

HALVES = [(case, dtype) for case in ("llama", "gpt-oss", "qwen3.5-moe") for dtype in (torch.bfloat16, torch.float16)]


def check(path: Path, dtype: str = "auto", activations: str = "auto") -> None:
    kernels = select_kernels("auto", threads=1, activations=activations)
    loaded, found = load_model(path, kernels, dtype), look_at(path, dtype, activations)
    model = loaded.model
    assert (found.folder, found.config, found.implementation) == (loaded.folder, loaded.config, "forerun")
    assert (found.kv_specs, found.state_specs) == (model.kv_specs, state_specs_of(model))
    assert (found.vocab_size, found.max_position) == (model.vocab_size, model.max_position)
    assert found.num_parameters == model.num_parameters
    assert found.weight_bytes == pytest.approx(model.weight_bytes, rel=0.15)  # 16 rows at least a matrix


@pytest.mark.parametrize(("case", "dtype"), [*((case, torch.float32) for case in factory.CASES), *HALVES])
def test_a_folder(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check(factory.make_checkpoint(case, tmp_path, dtype))


def test_another_dtype(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path, torch.bfloat16)
    check(folder, "float32")
    with pytest.raises(ConfigError, match="float16"):
        look_at(folder, "float16")
    with pytest.raises(ConfigError, match="dtype must be one of"):
        look_at(folder, "int3")


@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0"])
def test_a_gguf_file(mix: str, tmp_path: Path) -> None:
    export_gguf(resolve_model("mini"), tmp_path / "mini.gguf", mix)
    check(tmp_path / "mini.gguf")
    check(tmp_path / "mini.gguf", activations="float32")
    check(tmp_path / "mini.gguf", "bfloat16")


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_a_folder(bits: int, tmp_path: Path) -> None:
    settings = QuantizeSettings(method="rtn", bits=bits, group_size=32)
    round_model(open_source(resolve_model("mini"), settings), tmp_path, settings, lambda _: None)
    check(tmp_path)
    check(tmp_path, activations="float32")
    assert look_at(tmp_path, activations="float32").weight_bytes > look_at(tmp_path).weight_bytes


@pytest.mark.parametrize("format_", ["gguf", "rtn"])
def test_memory_is_checked_by_what_is_kept(format_: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside activations in float32 integers take more, and that is looked for before they are read."""
    path = tmp_path / "mini.gguf" if format_ == "gguf" else tmp_path
    if format_ == "gguf":
        export_gguf(resolve_model("mini"), path, "Q4_K_M")
    else:
        settings = QuantizeSettings(method="rtn", bits=4, group_size=32)
        round_model(open_source(resolve_model("mini"), settings), path, settings, lambda _: None)
    rounded, exact = (look_at(path, activations=activations).weight_bytes for activations in ("auto", "float32"))
    monkeypatch.setattr(memory, "available_bytes", lambda: (rounded + exact) // 2)
    assert load_model(path, select_kernels("auto", threads=1), max_position=1).implementation == "forerun"
    with pytest.raises(ResourceError, match=rf"{re.escape(str(path))} needs about {exact / 1e9:.2f} GB"):
        load_model(path, select_kernels("auto", threads=1, activations="float32"), max_position=1)


def test_memory_of_another_dtype_is_checked_through_transformers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = factory.save_checkpoint(factory.random_hf_model("gpt_neox"), tmp_path, torch.bfloat16)
    stored = look_at(folder).weight_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: stored)
    assert load_model(folder, factory.make_kernels()).implementation == "transformers"
    with pytest.raises(ResourceError, match="GB are available"):
        load_model(folder, factory.make_kernels(), "float32")


@pytest.mark.parametrize("name", [
    "qwen35", "lfm2", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "kimi-linear",
    "gemma4", "gemma4-experts", "granite4-dense",
])  # fmt: skip
def test_a_gguf_file_of_the_converter(name: str) -> None:
    check(Path(__file__).parents[1] / "weights" / "fixtures" / "gguf" / f"{name}.gguf")


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = factory.make_checkpoint("qwen3.5", tmp_path)
    for method in ("tensor", "raw", "integers"):
        monkeypatch.setattr(Checkpoint, method, lambda *_: pytest.fail("read"))
    assert look_at(folder).state_specs[0].bytes_per_slot == 4 * (3 * 88 + 4 * 12 * 10)


def change_header(path: Path, before: bytes, after: bytes) -> None:
    assert len(before) == len(after)
    path.write_bytes(path.read_bytes().replace(before, after, 1))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            b"blk.1.attn_q.weight",
            b"blk.1.attn_q.weighs",
            r"m\.gguf has no tensor blk\.1\.attn_q\.weight, which .*again",
        ),
        (b"blk.1.ffn_norm.weight", b"blk.1.ffn_norm.weighs", r"m\.gguf has no tensor blk\.1\.ffn_norm\.weight, which"),
        (
            b"feed_forward_length\x04\0\0\0\0\x04\0\0",
            b"feed_forward_length\x04\0\0\0\0\x02\0\0",
            r"tensor blk\.0\.ffn_\w+\.weight of .*m\.gguf has shape \[1024, 384\], its metadata asks for \[512, 384\]",
        ),
    ],
)
def test_headers_of_a_gguf_file_that_give_no_model_are_refused_alike(
    before: bytes, after: bytes, message: str, tmp_path: Path
) -> None:
    export_gguf(resolve_model("mini"), path := tmp_path / "m.gguf", "F32")
    change_header(path, before, after)
    for refuse in (look_at, lambda path: load_model(path, factory.make_kernels())):
        with pytest.raises(CheckpointError, match=message):
            refuse(path)


def test_headers_of_a_folder_that_give_no_model_are_refused_alike(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for matrix, message in ((None, rf"no tensor {name}"), (tensors[name][:-1].clone(), rf"{name} of .* has shape")):
        changed = {**tensors, name: matrix} if matrix is not None else {k: v for k, v in tensors.items() if k != name}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        for refuse in (look_at, lambda path: load_model(path, factory.make_kernels())):
            with pytest.raises(CheckpointError, match=message):
                refuse(folder)


@pytest.mark.parametrize("case", ["gemma4", "nemotron-h-moe"])
def test_what_a_device_cannot_run_is_told(case: str, tmp_path: Path) -> None:
    found = look_at(factory.make_checkpoint(case, tmp_path))
    assert "run on CPUs only" in (why_refused(found, torch.device("cuda")) or "")
    assert why_refused(found, torch.device("cpu")) is None


def test_a_model_that_runs_through_transformers(tmp_path: Path) -> None:
    folder = factory.save_checkpoint(factory.random_hf_model("gpt_neox"), tmp_path)
    found, model = look_at(folder), load_model(folder, factory.make_kernels()).model
    assert (found.config, found.implementation, found.kv_specs) == (None, "transformers", model.kv_specs)
    assert found.raw_config["num_hidden_layers"] == 2 and len(model.kv_specs) == 2
    assert (found.vocab_size, found.max_position) == (model.vocab_size, model.max_position)
    assert look_at(folder, device=torch.device("cuda")).kv_specs == ()  # there it runs row by row
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        look_at(folder)


@pytest.mark.parametrize(("family", "fields"), [("falcon", {}), ("gpt2", {"pad_token_id": 0})])
def test_transformers_says_nothing_of_the_way_a_model_is_judged(
    family: str, fields: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = factory.save_checkpoint(factory.random_hf_model(family, fields), tmp_path), list[str]()
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(logger, "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    look_at(folder)
    assert said == []
