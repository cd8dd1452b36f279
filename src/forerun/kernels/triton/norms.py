"""Norms and gated activations: one program a row, or a piece of a row.

Knows: the formulas. Does not know: layers. A row lies in one tile whatever its length, so that its sum has one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import ACTIVATIONS, SQUARED_RELU
from forerun.kernels.reference import check_activation
from forerun.kernels.triton.common import EXACT, aligned, power_of_two, warps_for

MAX_ROW = 1 << 17  # numbers a program holds, 256 a thread of 16 warps
_ACT_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """See `Kernels.rms_norm`."""
    return _normalise(x, None, weight, eps, centered)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
    """See `Kernels.add_rms_norm`."""
    total = aligned(residual)
    out = _normalise(x, total, weight, eps, centered)
    if total is not residual:
        residual.copy_(total)
    return out


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    """See `Kernels.gated_act`."""
    check_activation(activation)
    if activation == SQUARED_RELU:
        return gate_up.clamp(min=0).square_()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, device=gate_up.device)
    grid = (num_rows, triton.cdiv(size, _ACT_BLOCK))
    _gate_kernel[grid](aligned(gate_up), out, size, ACTIVATIONS.index(activation), _ACT_BLOCK, **EXACT)
    return out


def scaled(x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
    """See `Kernels.scaled`."""
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, device=x.device)
    grid = (num_rows, triton.cdiv(size, _ACT_BLOCK))
    _scale_kernel[grid](aligned(x), out, size, factor, cap, cap > 0, _ACT_BLOCK, **EXACT)
    return out


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, centered: bool) -> Tensor:
    num_rows, size = x.shape
    if size > MAX_ROW:
        raise KernelError(f"a norm of {size} entries: the Triton kernels take up to {MAX_ROW}; use kernels 'reference'")
    out = torch.empty(num_rows, size, device=x.device)
    block, warps = power_of_two(size), warps_for(size)
    tensors = aligned(x), residual, aligned(weight), out
    _rms_kernel[(num_rows,)](*tensors, eps, size, centered, block, num_warps=warps, **EXACT)
    return out


@triton.jit
def rms_factor(squares, eps, size):
    """1 / sqrt(mean square + eps), from the sum of squares."""
    return tl.math.div_rn(1.0, tl.sqrt_rn(tl.math.div_rn(squares, size * 1.0) + eps))


@triton.jit
def _rms_kernel(
    x, residual, weight, out, eps, SIZE: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    row = tl.load(x + at, inside, 0.0)  # [BLOCK]
    if residual is not None:
        row += tl.load(residual + at, inside, 0.0)
        tl.store(residual + at, row, inside)
    if CENTERED:
        row = tl.where(inside, row - tl.math.div_rn(tl.sum(row, 0), SIZE * 1.0), 0.0)
    factor = rms_factor(tl.sum(row * row, 0), eps, SIZE)
    tl.store(out + at, row * factor * tl.load(weight + column, inside, 0.0), inside)


@triton.jit
def _gate_kernel(gate_up, out, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + row * (2 * SIZE) + column, inside, 0.0)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, inside, 0.0)
    tl.store(out + row * SIZE + column, gated(gate, up, ACTIVATION), inside)


@triton.jit
def _scale_kernel(x, out, SIZE: tl.constexpr, factor, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    row = tl.load(x + at, inside, 0.0) * factor
    if CAPPED:
        row = soft_cap(row, cap)
    tl.store(out + at, row, inside)


@triton.jit
def soft_cap(x, cap):
    """cap * tanh(x / cap); near 0 by tanh's series, where 1 - e^-2u would cancel."""
    u = tl.math.div_rn(x, cap)
    power = tl.exp(-2.0 * tl.abs(u))
    far = tl.math.div_rn(1.0 - power, 1.0 + power)
    square = u * u
    near = u + u * square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    return cap * tl.where(square < 0.0625, near, tl.where(u < 0, -far, far))


@triton.jit
def gated(x, up, ACTIVATION: tl.constexpr):
    """up * silu(x), clipped or bounded SwiGLU, up * sigmoid(x), or GELU's tanh form: 1 + tanh u = 2 / (1 + e^-2u)."""
    bound: tl.constexpr = 7.0 if ACTIVATION == 4 else 16.0
    if ACTIVATION == 0 or ACTIVATION >= 4:
        power = -x
    elif ACTIVATION == 2:
        x = tl.where(x > 7.0, 7.0, x)  # which lets NaN through
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        power = x * -1.702
    elif ACTIVATION == 3:
        power = -x
        x = tl.full(x.shape, 1.0, tl.float32)
    else:
        power = -2.0 * 0.7978845608028654 * (x + 0.044715 * (x * x * x))  # u = sqrt(2 / pi) (x + 0.044715 x^3)
    made = tl.math.div_rn(x, 1.0 + tl.exp(power))
    if ACTIVATION >= 4:
        made = tl.where(made > bound, bound, made)  # which lets NaN through
        up = tl.where(up > bound, bound, tl.where(up < -bound, -bound, up))
    return made * up
