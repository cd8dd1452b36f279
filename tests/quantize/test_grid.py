"""Grids: nearest values, storable scales and zero points, ranges that lose less."""

from __future__ import annotations

import pytest
import torch

from forerun.quantize.awq import find_scales, output_loss
from forerun.quantize.gptq import gptq, inverse_factor
from forerun.quantize.grid import fit, fit_clipped, round_to_nearest
from forerun.quantize.settings import BITS, QuantizeSettings


def correlated_inputs(columns: int, rows: int = 512) -> torch.Tensor:
    """[rows, columns] with a few strong directions and magnitudes far apart."""
    mix = torch.randn(columns, columns) * torch.logspace(0, -1.5, columns)[:, None]
    return torch.randn(rows, columns) @ mix * torch.logspace(-1, 1, columns)[torch.randperm(columns)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_errors_are_at_most_half_a_step(bits: int, sym: bool) -> None:
    weights = torch.randn(6, 64)
    settings = QuantizeSettings(method="rtn", bits=bits, group_size=32, sym=sym)
    found = round_to_nearest(weights, settings, torch.float32)
    steps = found.scales[:, found.group_ids]
    excess = (found.dequantize() - weights).abs() / steps
    inside = found.codes < (1 << bits) - 1  # a symmetric range has one value less on the upper side
    assert excess[inside].max() <= 0.501 and excess.max() <= (1.01 if sym else 0.6)
    assert int(found.codes.max()) == (1 << bits) - 1 or sym
    assert found.zeros.min() >= 1 and found.zeros.max() < 1 << bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_are_what_the_file_holds(dtype: torch.dtype) -> None:
    settings = QuantizeSettings(method="rtn", group_size=16)
    scales = round_to_nearest(torch.randn(8, 64) / 3, settings, dtype).scales
    assert torch.equal(scales, scales.half().float())
    assert torch.equal(scales, scales.to(dtype).float())


@pytest.mark.parametrize("sym", [True, False])
def test_rows_of_zeros_and_of_one_sign(sym: bool) -> None:
    weights = torch.stack([torch.zeros(16), torch.linspace(0.1, 1, 16), -torch.linspace(0.1, 1, 16)])
    settings = QuantizeSettings(method="rtn", bits=4, group_size=16, sym=sym)
    found = round_to_nearest(weights, settings, torch.float32).dequantize()
    assert torch.equal(found[0], torch.zeros(16))
    assert (found - weights).abs().max() < 0.14


def test_a_searched_range_loses_less() -> None:
    weights = torch.randn(32, 64)
    weights[:, 5] *= 6  # an outlier
    settings = QuantizeSettings(method="rtn", bits=3, group_size=64, clip=True)
    x = correlated_inputs(64)
    moments = x.T @ x / len(x)
    for importance in (None, moments):
        wide, searched = (
            fit(weights, settings, torch.float32),
            fit_clipped(weights, settings, torch.float32, importance),
        )
        weigh = torch.eye(64) if importance is None else importance
        losses = [((error := grid.rounded(weights, 3) - weights) @ weigh * error).sum(1) for grid in (wide, searched)]
        assert (losses[1] <= losses[0] * 1.0001).all() and losses[1].sum() < 0.9 * losses[0].sum()


def test_inverse_factor() -> None:
    x = correlated_inputs(24)
    hessian = x.T @ x / len(x)
    upper = inverse_factor(hessian, 0.01).double()
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(24)
    assert torch.allclose(upper.T @ upper @ damped, torch.eye(24).double(), atol=1e-3)
    assert torch.equal(upper, upper.triu())
    assert inverse_factor(torch.ones(4, 4), 0.01).isfinite().all()  # of rank one


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize(("bits", "group_size", "share"), [(4, 32, 0.8), (3, 32, 0.8), (2, 32, 0.8), (4, -1, 0.8)])
def test_gptq_loses_less_than_rounding(bits: int, group_size: int, share: float, act_order: bool) -> None:
    weights, x = torch.randn(48, 96), correlated_inputs(96)
    moments = x.T @ x / len(x)
    settings = QuantizeSettings(bits=bits, group_size=group_size, act_order=act_order)
    found = gptq(weights, moments, settings, torch.float32)
    rounded = round_to_nearest(weights, settings, torch.float32)
    losses = [output_loss(matrix.dequantize() - weights, moments) for matrix in (found, rounded)]
    assert losses[0] < share * losses[1]
    counts = found.group_ids.bincount()
    assert (counts == counts[0]).all()


def test_gptq_with_independent_inputs_is_rounding() -> None:
    weights = torch.randn(8, 64)
    settings = QuantizeSettings(bits=4, group_size=32)
    found, rounded = (
        gptq(weights, torch.eye(64), settings, torch.float32),
        round_to_nearest(weights, settings, torch.float32),
    )
    assert torch.equal(found.codes, rounded.codes) and torch.equal(found.scales, rounded.scales)


def test_gptq_with_inputs_that_are_always_zero() -> None:
    x = correlated_inputs(32)
    x[:, 7] = 0
    found = gptq(torch.randn(8, 32), x.T @ x, QuantizeSettings(bits=4, group_size=16), torch.float32).dequantize()
    assert torch.equal(found[:, 7], torch.zeros(8)) and found.isfinite().all()


def test_awq_scales_lose_less_than_rounding() -> None:
    weights, x = torch.randn(48, 64), torch.randn(512, 64)
    x[:, ::16] *= 20  # inputs that matter more
    moments = x.T @ x / len(x)
    settings = QuantizeSettings(method="awq", bits=3, group_size=32, sym=False)
    plain = QuantizeSettings(method="rtn", bits=3, group_size=32, sym=False)
    scales = find_scales(weights, moments, x.abs().mean(0), settings)
    scaled = round_to_nearest(weights * scales, plain, torch.float32).dequantize() / scales
    rounded = round_to_nearest(weights, plain, torch.float32).dequantize()
    assert output_loss(scaled - weights, moments) < 0.5 * output_loss(rounded - weights, moments)
    assert scales[::16].min() > scales[1::16].max()
