"""Norms and activations in Triton: against torch in float64, and the same bits in every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.cases import bounded_swiglu, clipped_swiglu, rms_error
from torch import Tensor
from torch.nn import functional

from forerun.errors import KernelError

WIDTHS = (1, 7, 100, 384)
OPS = (
    "rms_norm", "add_rms_norm", "layer_norm", "scaled", "capped", "silu", "gelu_tanh", "clipped_swiglu", "sigmoid",
    "silu_within_7", "silu_within_16",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter


def op_and_definition(
    name: str, width: int, device: torch.device
) -> tuple[Callable[[Any, Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The op on its device, and its definition in the dtype of the argument."""
    generator = torch.Generator().manual_seed(width)
    weight, up = torch.randn(width, generator=generator), 8 * torch.randn(width, generator=generator)
    scale, factor = weight.to(device), up.to(device)

    def rms(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.to(x.dtype)

    def gated(kernels: Any, x: Tensor) -> Tensor:
        return kernels.gated_act(torch.cat([x, factor.expand_as(x)], 1).contiguous(), name)

    def layer(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (width,), weight.to(x.dtype), eps=1e-5)

    return {
        "layer_norm": (lambda k, x: k.rms_norm(x, scale, 1e-5, centered=True), layer),
        "scaled": (lambda k, x: k.scaled(x, 1.3), lambda x: x * 1.3),
        "capped": (lambda k, x: k.scaled(x, 0.1, 3.0), lambda x: torch.tanh(x * 0.1 / 3) * 3),
        "rms_norm": (lambda k, x: k.rms_norm(x, scale, 1e-5), rms),
        "add_rms_norm": (lambda k, x: k.add_rms_norm(x, x * 3, scale, 1e-5), lambda x: rms(x + x * 3)),
        "silu": (gated, lambda x: functional.silu(x) * up.to(x)),
        "sigmoid": (gated, lambda x: torch.sigmoid(x) * up.to(x)),
        "gelu_tanh": (gated, lambda x: functional.gelu(x, approximate="tanh") * up.to(x)),
        "clipped_swiglu": (gated, lambda x: clipped_swiglu(x, up.to(x))),
        "silu_within_7": (gated, lambda x: bounded_swiglu(x, up.to(x), 7.0)),
        "silu_within_16": (gated, lambda x: bounded_swiglu(x, up.to(x), 16.0)),
    }[name]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", OPS)
def test_error_and_bits(kernels: Any, name: str, width: int) -> None:
    x = torch.randn(12, width, generator=torch.Generator().manual_seed(1)) * 4
    op, definition = op_and_definition(name, width, kernels.device)
    truth = definition(x.double())
    whole = op(kernels, x.to(kernels.device))
    floor = 1e-7 * float(truth.abs().mean() + 1e-3)
    assert rms_error(whole.cpu(), truth) <= 2 * rms_error(definition(x), truth) + floor
    on_device = x.to(kernels.device)
    assert torch.equal(op(kernels, on_device[3:4]), whole[3:4])  # a view that starts anywhere
    assert torch.equal(op(kernels, on_device[1:6]), whole[1:6])
    order = torch.randperm(12)[:5].to(kernels.device)
    assert torch.equal(op(kernels, on_device[order]), whole[order])


@pytest.mark.parametrize("shift", [0, 1])
def test_the_residual_is_updated_in_place(kernels: Any, shift: int) -> None:
    x, memory, weight = (torch.randn(size, device=kernels.device) for size in (60, 61, 20))
    residual = memory[shift : shift + 60].view(3, 20)  # aligned, or not
    expected = residual + x.view(3, 20)
    out = kernels.add_rms_norm(x.view(3, 20), residual, weight, 1e-6)
    assert torch.equal(residual, expected)
    assert torch.equal(out, kernels.rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_at_the_edges(kernels: Any, activation: str) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 8.0, -8.0, 50.0, 1e30, -1e30, torch.inf, torch.nan]])
    gate_up = torch.cat([x, torch.ones_like(x)], 1).to(kernels.device)
    function = functional.silu if activation == "silu" else lambda x: functional.gelu(x, approximate="tanh")
    expected = function(x.double()).float()
    assert torch.allclose(kernels.gated_act(gate_up, activation).cpu(), expected, rtol=2e-6, atol=1e-7, equal_nan=True)


def test_what_is_not_supported_is_refused(kernels: Any) -> None:
    with pytest.raises(KernelError, match="activation"):
        kernels.gated_act(torch.randn(1, 4, device=kernels.device), "relu")
    wide = torch.ones(1, 1 << 18, device=kernels.device)
    with pytest.raises(KernelError, match="262144 entries"):
        kernels.rms_norm(wide, wide[0], 1e-6)
