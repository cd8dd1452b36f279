"""The comparison of block types: its files and forerun's side of the table. llama.cpp is not run here."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import perplexities
from forerun.errors import ConfigError
from forerun.models.gguf_export import export_gguf
from likelihoods import Apart, apart, by_forerun
from tests.models import factory

SEQUENCES = [[3, 17, 40, 8, 25, 61, 9], [33, 50, 12]]


def test_a_file_is_written_again_in_one_block_type_and_in_floats(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    folder = factory.save_checkpoint(factory.random_hf_model("llama", sizes), tmp_path / "folder")
    plain = export_gguf(folder, tmp_path / "plain.gguf", "F32")
    file, exact = tmp_path / "blocks.gguf", tmp_path / "exact.gguf"
    perplexities.rewrite(plain, file, "Q8_0", perplexities.encode)
    perplexities.rewrite(file, exact, "F32", lambda kind, values: values)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    floats = {tensor.name: tensor for tensor in gguf.GGUFReader(exact).tensors}
    assert all(tensor.tensor_type.name == ("Q8_0" if len(tensor.shape) > 1 else "F32") for tensor in stored.values())
    for name, tensor in stored.items():
        assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), floats[name].data), name
    kernels = factory.make_kernels()
    own, oracle = (by_forerun(path, kernels) for path in (file, exact))
    found = apart({"forerun": own, "float32": oracle}, oracle, SEQUENCES)
    assert found["forerun"].perplexity == pytest.approx(found["float32"].perplexity, rel=0.01)
    assert found["float32"].mean == 0.0 < found["forerun"].mean < 0.05


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="Q4_K needs rows that are a multiple of 256, not 384"):
        perplexities.encode("Q4_K", np.zeros((2, 384), np.float32))


def said(nats: float, *errors: float) -> Apart:
    return Apart([torch.tensor(errors)], nats)


def test_a_row_says_how_far_engines_are_apart() -> None:
    found = {"forerun": said(math.log(101), 0.001), "llama.cpp": said(math.log(100), -0.004)}
    found["float32"] = said(math.log(101), 0.0)
    alike = "| Q4_0 | 101.0000 | 100.0000 | 101.0000 | +1.000% | +0.000% | -0.990% | 1.00e-03 | 4.00e-03 | 4.0 |"
    assert perplexities.row("Q4_0", found) == alike
    del found["llama.cpp"]  # which is not installed
    assert perplexities.row("Q4_0", found) == "| Q4_0 | 101.0000 | - | 101.0000 | - | +0.000% | - | 1.00e-03 | - | - |"
