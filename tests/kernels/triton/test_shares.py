"""Ranks that have some of a matrix's rows give the bits of one process: sums over inputs know the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory
from tests.models.test_shares import save
from tests.support.adapters import write_adapter
from tests.support.ranks import on_ranks
from torch import Tensor

from forerun.kernels.ranks import ALONE, Ranks
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.loader import load_adapter, load_model
from forerun.quant.rows import only_rows, packs_part

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, under the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="factory.Runner's pool lies on the host"),
]
KNOWN = [5, 9, 40, 7]
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "llama": ONE_LAYER,
    "olmo2": ONE_LAYER,  # norms over all heads
    "qwen3-moe": ONE_LAYER,
    "qwen2-moe": ONE_LAYER,  # an expert for every row, which is weighed
    "deepseek": ONE_LAYER,  # latents
    "falcon-h1-norm": ONE_LAYER,  # Mamba-2
}


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The inputs of small matrices are split, into fewer parts where there are more outputs, as on a GPU."""
    from forerun.kernels.triton import linear

    sizes = {"BLOCK_N": 16, "BLOCK_K": 16, "LEAST_TILES_OF_INPUTS": 1, "WANTED_PROGRAMS": 6}
    with monkeypatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(linear, name, size)
        yield


def logits(path: Path, ranks: Ranks, device: torch.device, adapter: Path | None = None) -> Tensor:
    """Of a span, with its adapter."""
    from forerun.kernels.triton.backend import TritonKernels

    kernels = TritonKernels(device)
    loaded = load_model(path, kernels, adapters=[] if adapter is None else [adapter], ranks=ranks)
    found = None if adapter is None else load_adapter("a", adapter, loaded, kernels)
    runner = factory.Runner(loaded.model, 8)
    rows = SequenceRows("r", runner.table, 0, KNOWN, len(KNOWN), span_logits=True)
    return runner.model.forward(ForwardBatch.build([rows], runner.block_size, adapters=[found]), runner.kvs).logits


def check(path: Path, size: int, device: torch.device, adapter: Path | None = None) -> None:
    expected = logits(path, ALONE, device, adapter)
    for found in on_ranks(size, lambda ranks: logits(path, ranks, device, adapter), in_turns=True):
        assert torch.equal(found, expected)


def test_parts_of_sums_are_those_of_the_whole_matrix(kernels: Any, many_parts: None) -> None:
    """In every way in which rows are packed; without being told a rank's rows would be added up otherwise."""
    weight, x, own = torch.randn(96, 90).bfloat16(), torch.randn(3, 90), torch.arange(30, 50)
    whole, part = kernels.pack_linear(weight), packs_part(kernels, 96).pack_linear(weight[own])
    alone, pieces = kernels.pack_linear(weight[own]), only_rows(kernels, own, 96)
    assert [each.splits for each in (whole, part, alone)] == [1, 1, 3]
    assert torch.equal(kernels.linear(x, part), kernels.linear(x, whole)[:, own])
    assert not torch.equal(kernels.linear(x, alone), kernels.linear(x, part))
    halves = [pieces.pack_linear(half) for half in weight.split(48)]
    assert [(each.shape[0], each.splits) for each in halves] == [(18, 2), (2, 2)]  # as one process packs two of 48
    of_expert = packs_part(packs_part(kernels, None), 48).pack_linear(weight[:48])
    assert of_expert.splits == 1 and kernels.pack_linear(weight[:48]).splits == 2
    assert packs_part(factory.make_kernels("reference"), 96).name == "reference"  # which adds in one order


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_bits_of_one(case: str, device: torch.device, many_parts: None, tmp_path: Path) -> None:
    check(save(case, tmp_path, torch.bfloat16, **CASES[case]), 2, device)


def test_more_ranks_than_key_heads_and_sizes_that_do_not_divide(
    device: torch.device, many_parts: None, tmp_path: Path
) -> None:
    check(save("llama", tmp_path, torch.bfloat16, intermediate_size=50, vocab_size=97, **ONE_LAYER), 4, device)


def test_an_adapter(device: torch.device, many_parts: None, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "base", **ONE_LAYER)
    adapter = write_adapter(tmp_path / "adapter", folder, ["q_proj", "v_proj", "down_proj"], rank=40)
    check(folder, 2, device, adapter)
