"""Keyed noise: known answers of Philox, and argmax and top k equal to the numpy definition for every input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.cases import ISAS, cpu_kernels, kernels_named
from torch import Tensor

from forerun.kernels import philox
from forerun.kernels.ops import NoiseKeys
from forerun.speculation import noise

REFERENCE = kernels_named("reference")


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], seed: int, expected: tuple[int, ...]) -> None:
    words = philox.philox(np.array([counter], dtype=np.uint32), seed)
    assert tuple(words[0].tolist()) == expected
    assert noise.philox is philox.philox


def _keys(num_rows: int, seed: int = 1, position: int = 0, stream: int = 0) -> NoiseKeys:
    rows = torch.arange(num_rows)
    return NoiseKeys(rows * 7919 + seed, rows + position, torch.full((num_rows,), stream))


def _temperatures(num_rows: int, value: float) -> Tensor:
    return torch.full((num_rows,), value, dtype=torch.float64)


def _agree(isa: str, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int = 5) -> None:
    kernels = cpu_kernels(isa)
    expected_ids, expected_scores = REFERENCE.gumbel_topk(logits, temperatures, keys, k)
    ids, scores = kernels.gumbel_topk(logits, temperatures, keys, k)
    assert torch.equal(ids, expected_ids)
    # numpy may take its logarithms from another library than C: a last bit may differ
    assert torch.allclose(scores, expected_scores, rtol=1e-14, atol=1e-14)
    assert torch.equal(kernels.gumbel_argmax(logits, temperatures, keys), expected_ids[:, 0])
    assert torch.equal(REFERENCE.gumbel_argmax(logits, temperatures, keys), expected_ids[:, 0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab_size", (1, 3, 16, 63, 64, 65, 1000, 8192))
@pytest.mark.parametrize("temperature", (0.0, 1e-6, 0.3, 1.0, 5.0, 1e6))
def test_equal_to_the_definition(isa: str, vocab_size: int, temperature: float) -> None:
    torch.manual_seed(vocab_size)
    for spread in (0.0, 1.0, 8.0):
        logits = torch.randn(6, vocab_size) * spread
        logits[0, torch.randint(vocab_size, (vocab_size // 2,))] = -torch.inf
        _agree(isa, logits, _temperatures(6, temperature), _keys(6, vocab_size), k=min(vocab_size + 1, 5))


@pytest.mark.parametrize("isa", ISAS)
def test_large_vocabularies_are_searched_in_parts(isa: str) -> None:
    logits = torch.randn(2, 70_001) * 3
    logits[1, 65_000] = logits[1, 20_000] = 30.0  # a tie across parts at temperature 0
    for temperature in (0.0, 0.8):
        _agree(isa, logits, _temperatures(2, temperature), _keys(2), k=20)


def test_many_keys() -> None:
    logits = torch.randn(64, 500) * 2
    for position, stream in ((0, 0), (2**31, 5), (2**32 + 17, 2**31), (2**40, 2**32 - 1)):
        keys = _keys(64, seed=-5, position=position, stream=stream)
        _agree("portable", logits, _temperatures(64, 1.0), keys)
        _agree("avx2", logits, _temperatures(64, 1.0), keys)


_LOGITS = st.lists(
    st.one_of(
        st.sampled_from([0.0, 1.0, -1.0, 3.5, -torch.inf, torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, -0.0]),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(min_value=-30, max_value=30, width=32),
    ),
    min_size=1,
    max_size=150,
)
_TEMPERATURES = st.one_of(
    st.sampled_from([0.0, 1e-310, 1e-300, 1e-40, 1e-20, 1e-3, 1.0, 1e3, 1e300]), st.floats(min_value=0.05, max_value=3)
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=_LOGITS, temperature=_TEMPERATURES, seed=st.integers(-(2**63), 2**63 - 1), k=st.integers(1, 9))
def test_any_logits(values: list[float], temperature: float, seed: int, k: int) -> None:
    keys = NoiseKeys(torch.tensor([seed]), torch.tensor([3]), torch.tensor([0]))
    _agree("avx2", torch.tensor([values]), _temperatures(1, temperature), keys, k)
    _agree("portable", torch.tensor([values]), _temperatures(1, temperature), keys, k)


@pytest.mark.parametrize("isa", ("reference", *ISAS))
def test_rows_without_an_answer(isa: str) -> None:
    logits = torch.zeros(4, 100)
    logits[0, 50], logits[1, 99], logits[2] = torch.nan, torch.inf, -torch.inf
    for temperature in (0.0, 1.0):
        ids, scores = kernels_named(isa).gumbel_topk(logits, _temperatures(4, temperature), _keys(4), 3)
        assert (ids[:3] == -1).all()
        assert (scores[:3] == -torch.inf).all()
        assert (ids[3] >= 0).all()


@pytest.mark.parametrize("isa", ("reference", *ISAS))
def test_ties_go_to_the_lower_id(isa: str) -> None:
    logits = torch.zeros(1, 200)
    logits[0, [150, 40, 41]] = 2.0
    ids, _ = kernels_named(isa).gumbel_topk(logits, _temperatures(1, 0.0), _keys(1), 5)
    assert ids[0].tolist() == [40, 41, 150, 0, 1]


def test_a_row_gives_the_same_in_every_batch() -> None:
    kernels = cpu_kernels()
    logits = torch.randn(40, 3000) * 3
    keys, temperatures = _keys(40), torch.rand(40, dtype=torch.float64) * 2
    whole = kernels.gumbel_topk(logits, temperatures, keys, 4)
    for num_rows in range(1, 41):
        order = torch.randperm(40)[:num_rows]
        picked = NoiseKeys(*(column[order] for column in keys))
        part = kernels.gumbel_topk(logits[order], temperatures[order], picked, 4)
        assert torch.equal(part[0], whole[0][order])
        assert torch.equal(part[1], whole[1][order])


def test_the_samples_follow_the_softmax() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
    num = 20_000
    keys = NoiseKeys(torch.full((num,), 11), torch.arange(num), torch.zeros(num, dtype=torch.int64))
    ids = cpu_kernels().gumbel_argmax(logits.expand(num, 4).contiguous(), _temperatures(num, 1.0), keys)
    counts = torch.bincount(ids, minlength=4).double()
    expected = num * logits.double().exp()
    assert float(((counts - expected).square() / expected).sum()) < 16.3  # chi-square, 3 degrees, p = 0.001
