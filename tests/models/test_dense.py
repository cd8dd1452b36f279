"""Dense weights: exact storage, joined parts, and who recognises what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import CheckpointError
from forerun.layers.linear import Linear
from forerun.quant.base import RowPart
from forerun.quant.dense import DenseFormat, DenseWeight
from forerun.quant.formats import find_format
from forerun.weights.checkpoint import Checkpoint
from tests.models import factory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_gives_the_matrix_back(dtype: torch.dtype, kernels: str) -> None:
    matrix = torch.randn(13, 24).to(dtype)
    weight = DenseWeight(factory.make_kernels(kernels), matrix)
    assert weight.shape == (13, 24) and weight.nbytes >= 13 * 24 * (2 if dtype == torch.bfloat16 else 4)
    assert torch.equal(weight.dequantize(), matrix.float())
    x, bias = torch.randn(3, 24), torch.randn(13)
    linear = Linear(weight, bias)
    assert torch.allclose(linear(x), x @ matrix.float().T + bias, atol=1e-4)
    assert linear.num_parameters == 13 * 25 and linear.nbytes == weight.nbytes + 52


def test_parts_are_joined_by_rows(tmp_path: Path) -> None:
    parts = {"q.weight": torch.randn(4, 16), "k.weight": torch.randn(2, 16)}
    save_file(parts, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = Checkpoint.open(tmp_path)
    kernels = factory.make_kernels()
    weight = DenseFormat().read(source, [RowPart("q", 4), RowPart("k", 2)], 16, kernels, None)
    assert torch.equal(weight.dequantize(), torch.cat(list(parts.values())))
    rounded = DenseFormat().read(source, [RowPart("q", 4)], 16, kernels, torch.bfloat16)
    assert torch.equal(rounded.dequantize(), parts["q.weight"].bfloat16().float())
    with pytest.raises(CheckpointError, match=r"k\.weight"):
        DenseFormat().read(source, [RowPart("q", 4), RowPart("k", 3)], 16, kernels, None)
    assert find_format(source, "q") is not None and find_format(source, "v") is None
