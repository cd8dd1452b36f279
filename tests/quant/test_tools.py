"""Checkpoints of other tools (lab/quantized_fixtures.py): their own matrices, to the bit, at their own size."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.models.loader import load_model
from forerun.quant.base import RowPart, Weight
from forerun.quant.coded import CodedWeight
from forerun.quant.formats import check_quantization, find_format
from forerun.weights.checkpoint import Checkpoint
from tests.kernels.cases import cpu_kernels
from tests.models import factory
from tests.models.factory import Runner

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
SIZES = {"q": (128, 128), "k": (64, 128), "v": (64, 128), "o": (128, 128), "gate": (256, 128), "up": (256, 128)}
LEFT_OUT = ("quant_state", "quant_map", "weight_format", "input_scale", "k_scale", "v_scale")  # of a file's bytes
# Relative difference where the tool rounds more often (SCB / 127), divides by a factor (weight_global_scale), or says
# only what it simulated before it wrote the file, where single weights are a step of e4m3 away.
ROUNDED = {
    "bnb-int8": 2**-22,
    "nvfp4": 2**-8,
    "modelopt-fp8": 2**-3,
    "auto-round-nvfp4": 2**-22,
    "auto-round-fp8": 2**-7,
}
# Two floats a row count where rows have 128 inputs; zero points of AWQ become floats of 4 bytes, beside scales of 4.
LARGER = {"nf4-nested": 1.15, "auto-round-awq": 1.09}


def modules(name: str) -> dict[str, tuple[int, int]]:
    """Every matrix of a fixture, and its shape."""
    matrices = json.loads((FIXTURES / name / "expected.json").read_text())["matrices"]
    return {module: SIZES.get(module.split(".")[-1].removesuffix("_proj"), (128, 256)) for module in matrices}


def weight_of(source: Checkpoint, module: str, shape: tuple[int, int]) -> Weight:
    form = find_format(source, module)
    assert form is not None and form.name != "dense"
    return form.read(source, [RowPart(module, shape[0])], shape[1], cpu_kernels(), None)


def matrix_of(weight: Weight) -> Tensor:
    """The matrix to the bit: as rows of a table where `dequantize` is rounded."""
    if isinstance(weight, CodedWeight):
        return weight.dequantize()
    assert weight.packed is not None
    return cpu_kernels().embedding(torch.arange(weight.shape[0]), weight.packed)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_the_tools_own(name: str) -> None:
    source = Checkpoint.open(FIXTURES / name)
    expected: dict[str, Any] = json.loads((FIXTURES / name / "expected.json").read_text())["matrices"]
    for module, shape in modules(name).items():
        found, theirs = matrix_of(weight_of(source, module, shape)), expected[module]
        first = torch.tensor(theirs["first"])
        if name in ROUNDED:
            assert torch.allclose(found.flatten()[: len(first)], first, rtol=ROUNDED[name], atol=0)
            continue
        found = found.to(getattr(torch, theirs["dtype"].removeprefix("torch."))) + 0
        assert hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest() == theirs["hash"], module


@pytest.mark.parametrize("name", ["fp8-tensor", "llmc-w8a8"])
def test_what_is_called_frozen_is_the_same_where_it_is_compressed(name: str, tmp_path: Path) -> None:
    """The status of models written through transformers; of others it says that matrices are not compressed yet."""
    shutil.copytree(FIXTURES / name, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["quantization_status"] == "compressed"
    config["quantization_config"]["quantization_status"] = "frozen"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    check_quantization(config["quantization_config"])
    known, found = Checkpoint.open(FIXTURES / name), Checkpoint.open(tmp_path / "model")
    module, shape = next(iter(modules(name).items()))
    expected = matrix_of(weight_of(known, module, shape))
    assert torch.equal(matrix_of(weight_of(found, module, shape)), expected)
    tensors = {key: found.raw(key) for key in found}
    save_file({**tensors, f"{module}.weight": expected.bfloat16()}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=module):
        weight_of(Checkpoint.open(tmp_path / "model"), module, shape)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_the_files(name: str) -> None:
    source = Checkpoint.open(FIXTURES / name)
    held = sum(weight_of(source, module, shape).nbytes for module, shape in modules(name).items())
    own = tuple(f"{module}." for module in modules(name))
    stored = sum(
        size for key, _, size in source.stored() if key.startswith(own) and not any(part in key for part in LEFT_OUT)
    )
    assert held <= LARGER.get(name, 1.05) * stored


@pytest.mark.parametrize("name", NAMES)
def test_models_load_and_rows_are_their_own(name: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / name, tmp_path / "model")
    factory.write_tokenizer(tmp_path / "model")
    kernels = factory.make_kernels()
    loaded = load_model(tmp_path / "model", kernels).model
    dense: dict[str, Tensor] = {}
    source = Checkpoint.open(FIXTURES / name)
    matrices = modules(name)
    for key in source:
        module = next((each for each in matrices if key.startswith(f"{each}.")), None)
        if module is None:
            dense[key] = source.tensor(key).float()
        elif f"{module}.weight" not in dense:
            dense[f"{module}.weight"] = matrix_of(weight_of(source, module, matrices[module]))
    config = {**source.config, "quantization_config": None}
    (tmp_path / "dense").mkdir()
    save_file(dense, tmp_path / "dense" / "model.safetensors")
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config))
    factory.write_tokenizer(tmp_path / "dense")
    plain = load_model(tmp_path / "dense", kernels).model
    known = torch.randint(3, 96, (12,), generator=torch.Generator().manual_seed(0)).tolist()
    truth, found = (Runner(model, 20).span(known).logits for model in (plain, loaded))
    assert factory.rms_error(found, truth.double()) < 0.02 * float(truth.std())
    runner = Runner(loaded, 20)
    assert torch.equal(torch.stack([runner.root(token, index) for index, token in enumerate(known)]), found)
