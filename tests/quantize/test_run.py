"""Whole runs: what is written loads, is nearly the model, better methods lose less, interruptions do not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from forerun.errors import ConfigError, ResourceError, UnsupportedError
from forerun.models.loader import load_model
from forerun.quantize import methods, output
from forerun.quantize.layout import quantization_config
from forerun.quantize.partial import Partial
from forerun.quantize.settings import QuantizeSettings
from forerun.weights.checkpoint import Checkpoint
from tests.models import factory
from tests.quantize import models

TEXT = models.sequences()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("case", models.CASES)
@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn", "bits": 8, "group_size": 32},
        {"method": "gptq", "bits": 8, "group_size": 16, "act_order": True, "sym": False},
        {"method": "awq", "bits": 4, "group_size": 16, "sym": False},
    ],
    ids=lambda options: options["method"],
)
def test_every_family(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = models.tiny(case, tmp_path / "float")
    found = models.quantized(folder, tmp_path / "out", **options)
    truth = load_model(folder, factory.make_kernels())
    assert models.logit_error(found, truth, TEXT[:4]) < (0.01 if options["bits"] == 8 else 0.25)  # a random model
    assert factory.greedy(found.model, TEXT[0][:8], 4)  # it runs token by token


def test_methods_are_nearer_than_rounding(tmp_path: Path) -> None:
    trained = models.shallow_mini(tmp_path / "mini")
    truth, text = load_model(trained, factory.make_kernels()), models.prose()
    errors = {
        name: models.logit_error(
            models.quantized(trained, tmp_path / name, text[::12], method=name, bits=4, group_size=128, sym=False),
            truth,
            text[1::2][:6],
        )
        for name in ("rtn", "gptq", "awq")
    }
    assert errors["gptq"] < 0.6 * errors["rtn"] and errors["awq"] < 0.9 * errors["rtn"], errors


def test_folded_scales_change_nothing_but_rounding(tmp_path: Path) -> None:
    """AWQ in 8 bits: were a scale folded wrongly, the logits would be far off."""
    folder = models.tiny("llama-biased", tmp_path / "float")
    found = models.quantized(folder, tmp_path / "out", method="awq", bits=8, group_size=16, sym=False, clip=False)
    changed = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    for name in ("input_layernorm.weight", "self_attn.v_proj.bias", "mlp.up_proj.bias"):
        assert not torch.equal(changed[f"model.layers.0.{name}"], before[f"model.layers.0.{name}"])
    assert models.logit_error(found, load_model(folder, factory.make_kernels()), TEXT[:4]) < 0.01


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_interrupted_run_goes_on(method: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"method": method, "bits": 4, "group_size": 16}
    models.quantized(llama, tmp_path / "whole", **options)
    seen: list[int] = []

    def interrupted(work: Any, index: int, *rest: Any) -> None:
        seen.append(index)
        if len(seen) == 2:
            raise KeyboardInterrupt
        methods.quantize_layer(work, index, *rest)

    monkeypatch.setattr("forerun.quantize.run.quantize_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.quantized(llama, tmp_path / "stopped", **options)
    assert not (tmp_path / "stopped" / "config.json").exists()
    with pytest.raises(ConfigError, match="another model, text or options"):
        models.quantized(llama, tmp_path / "stopped", **{**options, "bits": 8})
    models.quantized(llama, tmp_path / "stopped", **options)
    assert seen == [0, 1, 1]  # the first layer was not done again
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert not (tmp_path / "stopped" / ".partial").exists()


def test_what_is_written(llama: Path, tmp_path: Path) -> None:
    models.quantized(llama, tmp_path / "gptq", method="gptq", bits=3, group_size=32, act_order=True)
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    section = config["quantization_config"]
    assert section["quant_method"] == "gptq" and section["bits"] == 3 and section["desc_act"] is True
    assert config["hidden_size"] == 64 and (tmp_path / "gptq" / "tokenizer.json").exists()
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    down = {name.rpartition(".")[2]: t for name, t in tensors.items() if ".0.mlp.down_proj." in name}
    assert {name: (list(t.shape), t.dtype) for name, t in down.items()} == {
        "qweight": ([96 * 3 // 32, 64], torch.int32),
        "qzeros": ([3, 64 * 3 // 32], torch.int32),
        "scales": ([3, 64], torch.float16),
        "g_idx": ([96], torch.int32),
    }
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
    models.quantized(llama, tmp_path / "awq", method="awq", group_size=32)
    assert json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]["version"] == "gemm"
    with safe_open(str(tmp_path / "awq" / "model.safetensors"), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert list(file.get_slice("model.layers.0.mlp.down_proj.qweight").get_shape()) == [96, 8]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_transformers_reads_the_settings(method: str) -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    section = quantization_config(QuantizeSettings(method=method, bits=4, group_size=32, sym=False))
    read = AutoQuantizationConfig.from_dict(section)
    assert (read.quant_method, read.bits, read.group_size) == (method, 4, 32)


def test_large_models_are_written_in_shards(llama: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(llama)
    tensors = ((name, checkpoint.tensor(name)) for name in checkpoint)
    output.write_model(checkpoint, tensors, {"quant_method": "gptq"}, tmp_path, shard_bytes=50_000)
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2 and not list(tmp_path.glob("*.new"))
    assert {path.stat().st_mode for path in shards} == {(tmp_path / "config.json").stat().st_mode}
    written = Checkpoint.open(tmp_path)
    assert sorted(written) == sorted(checkpoint)
    assert all(torch.equal(written.tensor(name), checkpoint.tensor(name)) for name in checkpoint)


def test_a_full_disk_is_said(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("forerun.weights.safetensors_write.save_file", fail)
    checkpoint = Checkpoint.open(llama)
    tensors = ((name, checkpoint.tensor(name)) for name in checkpoint)
    with pytest.raises(ResourceError, match=r"cannot write .*shard-0\.new: .*No space left .*; make room"):
        output.write_model(checkpoint, tensors, {}, tmp_path)
    with pytest.raises(ResourceError, match=r"cannot write .*layer-00000\.new: .*No space left .*; make room"):
        Partial(tmp_path, {}).save_layer(0, {"a": torch.ones(2)}, [])
    assert [path.name for path in tmp_path.rglob("*.new")] == ["config.json.new"], "no half of a file takes room"


def test_templates_for_tools_are_copied(tmp_path: Path) -> None:
    folder = models.tiny("llama", tmp_path / "float")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    checkpoint = Checkpoint.open(folder)
    (tmp_path / "out").mkdir()
    output.write_model(checkpoint, ((name, checkpoint.tensor(name)) for name in checkpoint), {}, tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"


def test_the_precision_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    folder = models.tiny("qwen3", tmp_path / "float", torch.bfloat16)
    models.quantized(folder, tmp_path / "out", method="awq", group_size=16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.input_layernorm.weight"].dtype is torch.bfloat16
    scales = tensors["model.layers.0.mlp.up_proj.scales"]
    assert torch.equal(scales.float(), scales.bfloat16().float())  # exact for engines that compute in bfloat16


def test_what_cannot_be_quantized(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"down_proj has 96 inputs, which group_size 64 does not divide"):
        models.quantized(llama, tmp_path / "a", group_size=64)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="at most 64 tokens"):
        models.quantized(llama, tmp_path / "b", [list(range(3, 90))], group_size=32)
    models.quantized(llama, tmp_path / "c", method="rtn", group_size=32)
    with pytest.raises(UnsupportedError, match="quantized already"):
        models.quantized(tmp_path / "c", tmp_path / "d", group_size=32)
    with pytest.raises(ConfigError, match="already holds a model"):
        models.quantized(llama, tmp_path / "c", method="rtn", group_size=32)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "quip"}, "method must be one of rtn, gptq, awq"),
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8"),
        ({"group_size": 24}, "group_size must be a multiple of 16, or -1"),
        ({"group_size": 0}, "group_size"),
        ({"method": "rtn", "act_order": True}, "act_order is an option of method gptq"),
        ({"damp": 0.0}, "damp must be above 0"),
    ],
)
def test_bad_settings(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        QuantizeSettings(**options)
