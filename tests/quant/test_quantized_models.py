"""Whole models with quantized matrices: the logits of the same decoder on the matrices they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.select import select_kernels
from forerun.layers.linear import Linear
from forerun.models.base import Model
from forerun.models.decoder import Decoder
from forerun.models.loader import load_model
from forerun.models.overview import look_at
from tests.models import factory
from tests.models.factory import Runner
from tests.quant import stored
from tests.quant.stored import Stored

CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
SECTIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNEL}},
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"},
}
MAKERS: dict[str, Callable[[int, int], Stored]] = {
    "gptq": lambda rows, columns: stored.gptq(
        rows, columns, 4, 16, group_ids=(torch.arange(columns) // 16)[torch.randperm(columns)]
    ),
    "awq": lambda rows, columns: stored.awq(rows, columns, 16),
    "compressed-tensors": lambda rows, columns: stored.compressed(rows, columns, 8, None, packed=False),
    "fp8": stored.float8,
}


def quantized_copy(folder: Path, out: Path, method: str, kept: Sequence[str] = ()) -> Mapping[str, Tensor]:
    """Replace every matrix of the layers but routers and `kept` ones by a stored one -> the tensors they stand for."""
    tensors: dict[str, Tensor] = {}
    dense = load_file(folder / "model.safetensors")
    for name, tensor in list(dense.items()):
        if tensor.dim() != 2 or ".layers." not in name or any(end in name for end in (".gate.weight", *kept)):
            tensors[name] = tensor
            continue
        module = MAKERS[method](*tensor.shape)
        prefix = name.removesuffix("weight")
        tensors |= {prefix + key: value for key, value in module.tensors.items()}
        dense[name] = module.matrix.float().contiguous()
    out.mkdir()
    save_file(tensors, out / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": SECTIONS[method]}))
    factory.write_tokenizer(out)
    return dense


def linears(model: Model) -> list[Linear]:
    assert isinstance(model, Decoder)
    return [linear for layer in model.parts.layers for linear in (*layer.attention.linears, *layer.mlp.linears)]


@pytest.mark.parametrize("case", ["llama-tied-biased", "qwen2", "phi3", "mixtral"])
@pytest.mark.parametrize("method", SECTIONS)
def test_logits_are_those_of_the_matrices(method: str, case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = factory.make_checkpoint(case, tmp_path / "dense")
    dense = quantized_copy(folder, tmp_path / "quantized", method)
    save_file(dict(dense), folder / "model.safetensors", metadata={"format": "pt"})
    known = torch.randint(3, 96, (12,)).tolist()
    kernels = factory.make_kernels()
    plain, loaded = (load_model(where, kernels).model for where in (folder, tmp_path / "quantized"))
    for linear, exact in zip(linears(loaded), linears(plain), strict=True):
        assert torch.allclose(linear.weight.dequantize(), exact.weight.dequantize(), rtol=1e-5, atol=1e-6)
    truth, found = Runner(plain, 20).span(known).logits, Runner(loaded, 20).span(known).logits
    assert factory.rms_error(found, truth.double()) < 0.05 * float(truth.std())
    runner = Runner(loaded, 20)
    alone = [runner.root(token, index) for index, token in enumerate(known)]
    assert torch.equal(torch.stack(alone), found)  # the same bits token by token


@pytest.mark.parametrize("case", ["llama-tied-biased", "mixtral"])
@pytest.mark.parametrize("method", SECTIONS)
def test_without_rounding_activations_logits_are_those_of_the_floats(method: str, case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = factory.make_checkpoint(case, tmp_path / "dense")
    dense = quantized_copy(folder, tmp_path / "quantized", method)
    save_file(dict(dense), folder / "model.safetensors", metadata={"format": "pt"})
    known, kernels = torch.randint(3, 96, (12,)).tolist(), select_kernels(threads=1, activations="float32")
    runners = [
        Runner(load_model(where, kernels, dtype="float32").model, 20) for where in (folder, tmp_path / "quantized")
    ]
    truth, found = (runner.span(known).logits for runner in runners)
    assert factory.rms_error(found, truth.double()) < 1e-5 * float(truth.std())


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_latent_attention_over_quantized_matrices(method: str, tmp_path: Path) -> None:
    check_logits("deepseek", method, (), tmp_path)


@pytest.mark.parametrize(
    ("case", "kept"),
    [("qwen3-next", (".in_proj_ba.", ".shared_expert_gate.")), ("qwen3.5", (".in_proj_a.", ".in_proj_b."))],
)
def test_delta_nets_of_which_b_and_a_are_not_quantized(case: str, kept: Sequence[str], tmp_path: Path) -> None:
    check_logits(case, "fp8", kept, tmp_path)


def check_logits(case: str, method: str, kept: Sequence[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = factory.make_checkpoint(case, tmp_path / "dense")
    dense = quantized_copy(folder, tmp_path / "quantized", method, kept)
    save_file(dict(dense), folder / "model.safetensors", metadata={"format": "pt"})
    known, kernels = torch.randint(3, 96, (12,)).tolist(), factory.make_kernels()
    plain, loaded = (load_model(where, kernels).model for where in (folder, tmp_path / "quantized"))
    truth, found = Runner(plain, 20).span(known).logits, Runner(loaded, 20).span(known).logits
    assert factory.rms_error(found, truth.double()) < 0.05 * float(truth.std())
    runner = Runner(loaded, 20)
    assert torch.equal(torch.stack([runner.root(token, index) for index, token in enumerate(known)]), found)


@pytest.mark.parametrize("method", SECTIONS)
def test_the_engine_generates_with_any_drafter(method: str, tmp_path: Path) -> None:
    quantized_copy(factory.make_checkpoint("llama", tmp_path / "dense"), tmp_path / "quantized", method)
    plain = LLM(str(tmp_path / "quantized"), drafter="none", kernels="auto", threads=1)
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True)
    prompt = [list(range(5, 15)) * 2]
    texts = [llm.generate(prompt, params)[0].outputs[0].token_ids for llm in (plain, plain.with_drafter("ngram"))]
    assert texts[0] == texts[1] and len(texts[0]) == 16


def test_biases_of_zeros_are_allowed_and_others_are_not(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "dense")
    quantized_copy(folder, tmp_path / "quantized", "gptq")
    path = tmp_path / "quantized" / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file({**load_file(path), name: torch.zeros(32)}, path)
    kernels = factory.make_kernels()
    assert load_model(tmp_path / "quantized", kernels).model.vocab_size == 96
    save_file({**load_file(path), name: torch.ones(32)}, path)
    with pytest.raises(UnsupportedError, match=name):
        load_model(tmp_path / "quantized", kernels)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, "no tensor .*k_proj.weight_scale_inv"),
        (torch.ones(3, 3), r"k_proj.weight_scale_inv has shape \[3, 3\], \[1, 1\]"),
    ],
)
def test_scales_are_checked_before_weights_are_read(scale: Tensor | None, said: str, tmp_path: Path) -> None:
    quantized_copy(factory.make_checkpoint("llama", tmp_path / "dense"), tmp_path / "quantized", "fp8")
    path, name = tmp_path / "quantized" / "model.safetensors", "model.layers.1.self_attn.k_proj.weight_scale_inv"
    tensors = {key: tensor for key, tensor in load_file(path).items() if key != name}
    save_file(tensors if scale is None else {**tensors, name: scale}, path)
    layers_read: list[int] = []
    with pytest.raises(CheckpointError, match=said):
        load_model(
            tmp_path / "quantized", factory.make_kernels(), progress=lambda done, total: layers_read.append(done)
        )
    assert not layers_read


def test_fp8_caches_become_int8_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized_copy(factory.make_checkpoint("llama", tmp_path / "dense"), tmp_path / "quantized", "compressed-tensors")
    path, config = tmp_path / "quantized" / "model.safetensors", tmp_path / "quantized" / "config.json"
    scales = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in ("k", "v")}
    save_file({**load_file(path), **scales}, path)
    raw = json.loads(config.read_text())
    raw["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    config.write_text(json.dumps(raw))
    loaded = load_model(tmp_path / "quantized", factory.make_kernels())
    assert {spec.dtype for spec in loaded.kv_specs} == {torch.int8}
    assert loaded.kv_specs == look_at(tmp_path / "quantized").kv_specs
    assert "int8 takes its place" in caplog.text
    config.write_text(
        json.dumps({**raw, "quantization_config": {**raw["quantization_config"], "kv_cache_scheme": None}})
    )
    assert {spec.dtype for spec in load_model(tmp_path / "quantized", factory.make_kernels()).kv_specs} == {
        torch.bfloat16
    }


def test_quantized_tensors_without_settings(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "dense")
    quantized_copy(folder, tmp_path / "quantized", "gptq")
    path = tmp_path / "quantized" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "quantization_config"}))
    with pytest.raises(UnsupportedError, match=r"_proj\.qweight .* no quantization_config"):
        load_model(tmp_path / "quantized", factory.make_kernels())
