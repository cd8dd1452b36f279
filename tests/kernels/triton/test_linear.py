"""Dense products, heads and embedding tables in Triton: exact where they can be, and the same bits in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.cases import kernels_named, rms_error

from forerun.errors import KernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPLIT = (40, 1030)  # so few outputs that the inputs are split
BRAIN = torch.bfloat16


def linear(kernels: Any, x: torch.Tensor, packed: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    place = kernels.device
    return kernels.linear(x.to(place), packed, None if bias is None else bias.to(place)).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(kernels: Any, dtype: torch.dtype) -> None:
    for num_outputs, num_inputs in ((1, 1), (17, 129), SPLIT):
        weight, bias = torch.randint(-8, 9, (num_outputs, num_inputs)).to(dtype), torch.randint(-8, 9, (num_outputs,))
        x = torch.randint(-300, 301, (3, num_inputs)).float()
        packed = kernels.pack_linear(weight)
        assert packed.shape == (num_outputs, num_inputs) and packed.nbytes == weight.nbytes
        assert torch.equal(linear(kernels, x, packed, bias.float()), x @ weight.float().T + bias)


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (40, 384)), (BRAIN, SPLIT), (torch.float16, SPLIT)])
def test_error_is_at_most_twice_torchs(kernels: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(shape[1])
    weight, x = torch.randn(shape).to(dtype), torch.randn(6, shape[1]) * torch.rand(6, 1).exp2()
    truth = x.double() @ weight.double().T
    assert rms_error(linear(kernels, x, kernels.pack_linear(weight)), truth) <= 2 * rms_error(
        x @ weight.float().T, truth
    )


@pytest.mark.parametrize(("dtype", "shape"), [(BRAIN, (33, 130)), (torch.float32, (17, 200)), (BRAIN, SPLIT)])
def test_a_row_has_the_same_bits_in_every_batch(kernels: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    packed, x, bias = (
        kernels.pack_linear(torch.randn(shape).to(dtype)),
        torch.randn(65, shape[1]),
        torch.randn(shape[0]),
    )
    alone = torch.cat([linear(kernels, row[None].clone(), packed, bias) for row in x[:3]])
    for num_rows in (2, 17, 65)[: 2 if shape == SPLIT else 3]:  # one, two and four tiles a program, and two programs
        order = torch.randperm(65)[:num_rows]
        order[torch.randperm(num_rows)[: min(num_rows, 3)]] = torch.arange(min(num_rows, 3))
        found = linear(kernels, x[order], packed, bias)
        for row in range(min(num_rows, 3)):
            assert torch.equal(found[(order == row).nonzero()[0, 0]], alone[row]), (num_rows, row)


def test_extreme_values_stay_in_their_row(kernels: Any) -> None:
    packed, x = kernels.pack_linear(torch.randn(20, 64).bfloat16()), torch.randn(5, 64)
    clean = linear(kernels, x, packed)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, 3.4e38 * torch.eye(64)[0]
    dirty = linear(kernels, x, packed)
    assert torch.equal(dirty[[0, 4]], clean[[0, 4]])
    assert dirty[1].isnan().all() and not dirty[2].isfinite().any() and not dirty[3].isnan().any()


@pytest.mark.parametrize(("dtype", "passed"), [(torch.float32, 3), (BRAIN, 0), (torch.float16, 3)])
def test_heads_have_their_own_matrices_and_pass_the_rest_on(kernels: Any, dtype: torch.dtype, passed: int) -> None:
    torch.manual_seed(passed)
    weight, x = torch.randn(3, 20, 36).to(dtype), torch.randn(17, 3 * (36 + passed))
    packed, reference = kernels.pack_heads(weight), kernels_named("reference")
    found = kernels.linear_heads(x.to(kernels.device), packed).cpu()
    expected = reference.linear_heads(x, reference.pack_heads(weight))
    assert packed.shape == (3, 20, 36) and torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.view(17, 3, -1)[:, :, 20:], x.view(17, 3, -1)[:, :, 36:])
    assert torch.equal(kernels.linear_heads(x[7:9].clone().to(kernels.device), packed).cpu(), found[7:9])


def test_embedding_reads_tables_and_packed_matrices(kernels: Any) -> None:
    table, ids = torch.randn(50, 70), torch.tensor([0, 49, 7, 7, -1, 50])
    for dtype in DTYPES:
        for stored in (table.to(dtype).to(kernels.device), kernels.pack_linear(table.to(dtype))):
            rows = kernels.embedding(ids.to(kernels.device), stored).cpu()
            assert torch.equal(rows[:4], table.to(dtype).float()[ids[:4]]) and rows[4:].isnan().all()


def test_no_rows_are_no_trouble(kernels: Any) -> None:
    nothing = torch.empty(0, 8, device=kernels.device)
    assert kernels.linear(nothing, kernels.pack_linear(torch.ones(3, 8))).shape == (0, 3)
    assert kernels.linear(nothing, kernels.pack_linear(torch.ones(3, 8).half())).shape == (0, 3)
    assert kernels.embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 8, device=kernels.device)).shape == (0, 8)


def test_what_others_packed_and_misfits_are_refused(kernels: Any) -> None:
    reference = kernels_named("reference")
    with pytest.raises(KernelError, match="ReferenceLinear"):
        kernels.linear(torch.ones(1, 4), reference.pack_linear(torch.ones(2, 4)))
    with pytest.raises(KernelError, match="columns"):
        kernels.linear(torch.ones(1, 5), kernels.pack_linear(torch.ones(2, 4)))
    with pytest.raises(KernelError, match="ReferenceHeads"):
        kernels.linear_heads(torch.ones(1, 4), reference.pack_heads(torch.ones(1, 2, 4)))
    with pytest.raises(KernelError, match="ReferenceLinear"):
        kernels.embedding(torch.zeros(1, dtype=torch.int64), reference.pack_linear(torch.ones(2, 4)))
    with pytest.raises(KernelError, match="not"):
        kernels.pack_linear(torch.ones(2, 4, dtype=torch.float64))
