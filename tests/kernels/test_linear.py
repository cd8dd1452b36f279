"""linear: exact where it can be, close to torch elsewhere, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.cases import ISAS, cpu_kernels, kernels_named, rms_error

from forerun.errors import KernelError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (5, 3), (16, 16), (17, 129), (100, 384), (64, 1000), (333, 257))


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(isa: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(isa)
    for num_outputs, num_inputs in SHAPES:
        weight = torch.randint(-8, 9, (num_outputs, num_inputs)).to(dtype)
        x, bias = torch.randint(-8, 9, (7, num_inputs)).float(), torch.randint(-8, 9, (num_outputs,)).float()
        packed = kernels.pack_linear(weight)
        assert packed.shape == (num_outputs, num_inputs)
        assert torch.equal(kernels.linear(x, packed), x @ weight.float().T)
        assert torch.equal(kernels.linear(x, packed, bias), x @ weight.float().T + bias)


@pytest.mark.parametrize("isa", ("reference", "avx512", "avx2"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_inputs", (96, 384, 2048, 5000))
def test_error_is_at_most_twice_torchs(isa: str, dtype: torch.dtype, num_inputs: int) -> None:
    torch.manual_seed(num_inputs)
    kernels = kernels_named(isa)
    weight, x = torch.randn(200, num_inputs).to(dtype), torch.randn(20, num_inputs)
    truth = x.double() @ weight.double().T
    ours = kernels.linear(x, kernels.pack_linear(weight))
    assert rms_error(ours, truth) <= 2 * rms_error(x @ weight.float().T, truth)


@pytest.mark.parametrize("isa", ("reference", "avx512", "avx2"))
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), ((100, 384), (65, 130), (400, 1500)))
def test_a_row_has_the_same_bits_in_every_batch(
    isa: str, dtype: torch.dtype, num_outputs: int, num_inputs: int
) -> None:
    kernels = kernels_named(isa)
    packed = kernels.pack_linear(torch.randn(num_outputs, num_inputs).to(dtype))
    x, bias = torch.randn(40, num_inputs), torch.randn(num_outputs)
    alone = torch.cat([kernels.linear(row[None].clone(), packed, bias) for row in x])
    for num_rows in range(1, 41):
        assert torch.equal(kernels.linear(x[:num_rows].clone(), packed, bias), alone[:num_rows])
        order = torch.randperm(40)[:num_rows]
        assert torch.equal(kernels.linear(x[order], packed, bias), alone[order])


def test_row_blocks_of_a_long_prefill_change_nothing() -> None:
    kernels = cpu_kernels()
    packed = kernels.pack_linear(torch.randn(70, 1200).bfloat16())
    x = torch.randn(300, 1200)
    whole = kernels.linear(x, packed)
    assert torch.equal(whole, torch.cat([kernels.linear(part.clone(), packed) for part in x.split(37)]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_and_thread_count_gives_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(1030, 300).to(dtype), torch.randn(1030)
    for num_rows in (1, 2, 3, 5, 8, 13):
        x = torch.randn(num_rows, 300)
        one = cpu_kernels("portable", 1)
        expected = one.linear(x, one.pack_linear(weight), bias)
        for threads in (1, 2, 5):
            kernels = cpu_kernels(isa, threads)
            assert torch.equal(kernels.linear(x, kernels.pack_linear(weight), bias), expected)


LARGE = (1040, 1024)  # enough weights for the tiles of AMX, of whole tiles of inputs


@pytest.mark.parametrize("isa", ("avx512amx", "avx512"))
def test_large_matrices_are_exact_for_whole_numbers_and_as_close_as_float32(isa: str) -> None:
    kernels = kernels_named(isa)
    whole, x = torch.randint(-8, 9, LARGE).bfloat16(), torch.randint(-300, 301, (21, LARGE[1])).float()
    assert torch.equal(kernels.linear(x, kernels.pack_linear(whole)), x @ whole.float().T)
    weight, x = torch.randn(LARGE).bfloat16(), torch.randn(21, LARGE[1]) * torch.rand(21, 1).exp2()
    truth = x.double() @ weight.double().T
    ours = kernels.linear(x, kernels.pack_linear(weight))
    assert rms_error(ours, truth) <= 2 * rms_error(x @ weight.float().T, truth)


@pytest.mark.parametrize("isa", ("avx512amx", "avx512"))
@pytest.mark.parametrize("threads", (1, 2))
def test_rows_of_large_matrices_have_the_same_bits_in_every_batch(isa: str, threads: int) -> None:
    kernels = cpu_kernels(isa, threads)
    packed, bias = kernels.pack_linear(torch.randn(LARGE).bfloat16()), torch.randn(LARGE[0])
    x = torch.randn(150, LARGE[1])
    one = cpu_kernels(isa, 1)
    alone = torch.cat([one.linear(row[None].clone(), packed, bias) for row in x])
    for num_rows in (2, 5, 15, 16, 17, 31, 33, 64, 97, 150):
        order = torch.randperm(150)[:num_rows]
        assert torch.equal(kernels.linear(x[order], packed, bias), alone[order])


def test_tiles_of_extreme_values_stay_in_their_row() -> None:
    kernels = cpu_kernels("avx512amx")
    packed = kernels.pack_linear(torch.randn(LARGE).bfloat16())
    x = torch.randn(5, LARGE[1])
    clean = kernels.linear(x, packed)
    x[1, 3], x[2, 5], x[3] = torch.nan, torch.inf, x[3] * 1e36
    dirty = kernels.linear(x, packed)
    assert torch.equal(dirty[[0, 4]], clean[[0, 4]])
    assert dirty[1].isnan().all() and not dirty[2].isfinite().any()
    assert torch.allclose(dirty[3], clean[3] * 1e36, rtol=1e-4, atol=1e33)


@pytest.mark.parametrize("isa", ("reference", "avx2"))
def test_infinities_and_nan_stay_in_their_row(isa: str) -> None:
    kernels = kernels_named(isa)
    packed = kernels.pack_linear(torch.randn(50, 40))
    x = torch.randn(4, 40)
    clean = kernels.linear(x, packed)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    dirty = kernels.linear(x, packed)
    assert torch.equal(dirty[[0, 3]], clean[[0, 3]])
    assert dirty[1].isnan().all()
    assert not dirty[2].isfinite().any()


def test_wrong_tensors_are_refused() -> None:
    kernels, reference = cpu_kernels(), kernels_named("reference")
    packed = kernels.pack_linear(torch.randn(8, 4))
    with pytest.raises(KernelError, match="columns"):
        kernels.linear(torch.randn(2, 5), packed)
    with pytest.raises(KernelError, match="contiguous"):
        kernels.linear(torch.randn(4, 4).T, packed)
    with pytest.raises(KernelError, match="float32"):
        kernels.linear(torch.randn(4, 4).double(), packed)
    with pytest.raises(KernelError, match="packed by"):
        kernels.linear(torch.randn(2, 4), reference.pack_linear(torch.randn(8, 4)))
    with pytest.raises(KernelError, match="packed by"):
        reference.linear(torch.randn(2, 4), packed)
    for both in (kernels, reference):
        with pytest.raises(KernelError, match="linear weights"):
            both.pack_linear(torch.zeros(4, 4, dtype=torch.int8))
