"""Keyed noise in Triton: the tokens the definition gives, for every kind of row and key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.cases import kernels_named
from torch import Tensor

from forerun.kernels.ops import NoiseKeys


def keys(num_rows: int, position: int = 3, stream: int = 1) -> NoiseKeys:
    rows = torch.arange(num_rows)
    return NoiseKeys(rows * 7919 - 5, rows + position, torch.full((num_rows,), stream))


def heat(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def agree(kernels: Any, logits: Tensor, temperatures: Tensor, noise: NoiseKeys, k: int) -> None:
    expected_ids, expected = kernels_named("reference").gumbel_topk(logits, temperatures, noise, k)
    ids, scores = kernels.gumbel_topk(logits.to(kernels.device), temperatures, noise, k)
    assert torch.equal(ids.cpu(), expected_ids)
    # the last bit of a logarithm may be another one's: see the module's docstring
    assert torch.allclose(scores.cpu(), expected, rtol=1e-14, atol=1e-14)
    best = kernels.gumbel_argmax(logits.to(kernels.device), temperatures, noise)
    assert torch.equal(best.cpu(), expected_ids[:, 0])
    expected_ids, expected = kernels_named("reference").gumbel_chances(logits, temperatures, noise, k)
    ids, chances = kernels.gumbel_chances(logits.to(kernels.device), temperatures, noise, k)
    found = min(k, logits.shape[1])  # torch's has no more places
    assert torch.equal(ids.cpu()[:, :found], expected_ids) and (ids[:, found:] == -1).all()
    assert torch.allclose(chances.cpu()[:, :found], expected, rtol=1e-13, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("vocab_size", (1, 63, 500))
def test_equal_to_the_definition(kernels: Any, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size) * 3
    logits[0, torch.randint(vocab_size, (vocab_size // 2,))] = -torch.inf
    temperatures = heat(1.0, 0.0, 1e-310, 1e-6, 0.7, 1e6)
    agree(kernels, logits, temperatures, keys(6), min(vocab_size + 1, 4))


def test_large_vocabularies_are_searched_in_parts(kernels: Any) -> None:
    logits = torch.randn(2, 4500) * 3
    logits[1, 4300] = logits[1, 2000] = 30.0  # a tie across parts
    agree(kernels, logits, heat(0.8, 0.0), keys(2), 5)


@pytest.mark.parametrize(("position", "stream"), [(2**31, 5), (2**40 + 17, 2**32 - 1)])
def test_all_bits_of_a_key_count(kernels: Any, position: int, stream: int) -> None:
    agree(kernels, torch.randn(3, 40), heat(1.0, 1.0, 1.0), keys(3, position, stream), 3)


def test_rows_without_an_answer_and_ties(kernels: Any) -> None:
    logits = torch.zeros(5, 100)
    logits[0, 50], logits[1, 99], logits[2], logits[4, [60, 40, 41]] = torch.nan, torch.inf, -torch.inf, 2.0
    for temperature in (0.0, 1.0):
        temperatures = heat(*([temperature] * 4), 0.0)
        ids, scores = kernels.gumbel_topk(logits.to(kernels.device), temperatures, keys(5), 4)
        assert (ids[:3] == -1).all() and (scores[:3] == -torch.inf).all() and (ids[3] >= 0).all()
        assert ids[4].tolist() == [40, 41, 60, 0]


def test_a_row_gives_the_same_in_every_batch(kernels: Any) -> None:
    logits, temperatures, noise = torch.randn(9, 300), torch.rand(9, dtype=torch.float64) * 2, keys(9)
    whole = kernels.gumbel_topk(logits.to(kernels.device), temperatures, noise, 3)
    order = torch.randperm(9)[:4]
    picked = NoiseKeys(*(column[order] for column in noise))
    part = kernels.gumbel_topk(logits[order].to(kernels.device), temperatures[order], picked, 3)
    assert torch.equal(part[0], whole[0][order]) and torch.equal(part[1], whole[1][order])
