"""Float matrices as blocks of GGUF's tensor types.

Knows: how scales are chosen and how blocks are packed for Q8_0, Q4_0, Q5_0, Q4_K and Q6_K, and which type each matrix
of a mix such as Q4_K_M gets. Does not know: files. Source of the search for scales: ggml-quants.c (make_qx_quants,
make_qkx2_quants), of the mix: llama.cpp's llama-quant.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.quant.gguf_decode import BLOCK_TYPES

_CHUNK = 1 << 20  # entries encoded at a time: the search holds some 20 copies of them
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_S": 14, "Q4_K_M": 15, "Q6_K": 18, "BF16": 32}
"""Name of a mix -> `general.file_type`."""


def encode_rows(name: str, matrix: Tensor) -> Tensor:
    """Rows [N, K] float32 as blocks of type `name` -> [N, bytes of a row] uint8.

    Raises ConfigError for a type there is no encoder for and for rows that are not whole blocks.
    """
    if name not in _ENCODERS:
        raise ConfigError(f"forerun cannot write tensors of type {name}; it writes {', '.join(_ENCODERS)}")
    size, (num_rows, columns) = BLOCK_TYPES[name].size, matrix.shape
    if columns % size:
        raise ConfigError(f"{name} needs rows that are a multiple of {size}, not {columns}; use another type")
    blocks = matrix.float().reshape(-1, size)  # [b, size]
    parts = [_ENCODERS[name](part) for part in torch.split(blocks, max(_CHUNK // size, 1))]
    return torch.cat(parts).reshape(num_rows, -1)


def choose_type(mix: str, name: str, columns: int, layer: int, num_layers: int, tied: bool) -> str:
    """The tensor type of a matrix called `name` (GGUF's name) in a mix of FILE_TYPES.

    The output matrix, and in Q4_K_M half of the value and down projections, get more bits. Matrices whose rows are not
    whole blocks get a type of smaller blocks. Raises ConfigError for an unknown mix.
    """
    if mix not in FILE_TYPES:
        raise ConfigError(f"there is no mix of types {mix!r}; choose from {', '.join(FILE_TYPES)}")
    if mix in ("F32", "F16", "BF16"):
        return mix
    wanted = mix if mix in _ENCODERS else "Q4_K"
    is_output = name == "output.weight" or (tied and name == "token_embd.weight")
    sensitive = name.endswith(("attn_v.weight", "ffn_down.weight")) and _gets_more_bits(layer, num_layers)
    if wanted != "Q8_0" and (is_output or (mix == "Q4_K_M" and sensitive)):
        wanted = "Q6_K"
    return _fitting(wanted, columns)


def _gets_more_bits(layer: int, num_layers: int) -> bool:
    """The first and last eighth of the layers and every third between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _fitting(name: str, columns: int) -> str:
    if columns % BLOCK_TYPES[name].size == 0:
        return name
    if columns % 32 == 0:
        return "Q5_0" if name == "Q4_K" else "Q8_0"
    return "F16"


# -- blocks of 32 with one scale ----------------------------------------------------------------------------------


def _q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(dim=1, keepdim=True) / 127  # [b, 1]
    scaled = x * _inverse(scale)
    away = scaled.abs().add(0.5).floor().copysign(scaled)  # roundf: halves away from zero
    return torch.cat((_half(scale), away.to(torch.int8).view(torch.uint8)), dim=1)


def _q4_0(x: Tensor) -> Tensor:
    codes, scale = _signed_maximum(x, 8)
    return torch.cat((_half(scale), _nibbles(codes, 16)), dim=1)


def _q5_0(x: Tensor) -> Tensor:
    codes, scale = _signed_maximum(x, 16)
    fifth = (codes >> 4).reshape(-1, 4, 8) << torch.arange(8, dtype=torch.uint8)  # [b, 4, 8]
    return torch.cat((_half(scale), fifth.sum(dim=2).to(torch.uint8), _nibbles(codes & 15, 16)), dim=1)


def _signed_maximum(x: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """Codes [b, 32] and scale [b, 1] such that the entry of largest magnitude becomes -zero."""
    largest = x.gather(1, x.abs().argmax(dim=1, keepdim=True))
    scale = largest / -zero
    shifted = x * _inverse(scale) + (zero + 0.5)
    return shifted.trunc().clamp(0, 2 * zero - 1).to(torch.uint8), scale


# -- blocks of 256 with a scale for every group -------------------------------------------------------------------


def _q6_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 16, 16)  # [b, groups, entries]
    scales = _fit_symmetric(groups, 32)  # [b, 16]
    largest = scales.gather(1, scales.abs().argmax(dim=1, keepdim=True))
    unit = _as_half(largest / -128)  # [b, 1]
    steps = (scales * _inverse(unit)).round().clamp(-128, 127)
    codes = (groups * _inverse(unit * steps)[..., None]).round().clamp(-32, 31) + 32
    codes = codes.to(torch.uint8).reshape(-1, 2, 4, 32)  # [b, halves, quarters, entries]
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4  # [b, 2, 2, 32]
    high = _planes(codes >> 4, 2)  # [b, 2, 32]
    packed = [low.reshape(-1, 128), high.reshape(-1, 64), steps.to(torch.int8).view(torch.uint8), _half(unit)]
    return torch.cat(packed, dim=1)


def _q4_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 8, 32)  # [b, groups, entries]
    scales, minima = _fit_affine(groups, 15)  # [b, 8] each
    unit = _as_half(scales.amax(dim=1, keepdim=True) / 63)  # [b, 1]
    unit_min = _as_half(minima.amax(dim=1, keepdim=True) / 63)
    steps = (scales * _inverse(unit)).round().clamp(0, 63)
    min_steps = (minima * _inverse(unit_min)).round().clamp(0, 63)
    shifted = groups + (unit_min * min_steps)[..., None]
    codes = (shifted * _inverse(unit * steps)[..., None]).round().clamp(0, 15).to(torch.uint8)
    packed = _pack_scales(steps.to(torch.uint8), min_steps.to(torch.uint8))
    return torch.cat((_half(unit), _half(unit_min), packed, _nibbles(codes, 32)), dim=1)


def _pack_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits in 12 bytes; see `gguf_decode._scales_and_mins`."""
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    high = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return torch.cat((low, high, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4), dim=1)


def _fit_symmetric(x: Tensor, most: int) -> Tensor:
    """The scale [...] for x [..., n] with the least error weighted by x^2, out of 19 roundings (make_qx_quants)."""
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))  # [..., 1]
    weights = x * x
    best, scale = torch.full(x.shape[:-1], -1.0), torch.zeros(x.shape[:-1])
    for shift in range(-9, 10):
        whole = (x * _inverse(largest) * -(most + 0.1 * shift)).round().clamp(-most, most - 1)
        along, square = (weights * x * whole).sum(-1), (weights * whole * whole).sum(-1)
        explained = along * along * _inverse(square)
        scale = torch.where(explained > best, along * _inverse(square), scale)
        best = torch.maximum(best, explained)
    return scale


def _fit_affine(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """scale and minimum (>= 0, to be subtracted) [...] for x [..., n]: least squares over 22 roundings.

    An entry's weight is its magnitude plus the group's root mean square (make_qkx2_quants).
    """
    weights = x.abs() + x.square().mean(dim=-1, keepdim=True).sqrt()
    low = x.amin(dim=-1).clamp(max=0)  # [...]
    span = x.amax(dim=-1) - low
    scale, minimum = span / most, low
    best = _affine_error(x, weights, scale, minimum, most)
    for shift in range(21):
        factor = _inverse(span) * (most - 1 + 0.1 * shift)
        whole = ((x - low[..., None]) * factor[..., None]).round().clamp(0, most)
        fitted = _least_squares(x, weights, whole)
        error = _affine_error(x, weights, *fitted, most)
        better = error < best
        scale, minimum = torch.where(better, fitted[0], scale), torch.where(better, fitted[1], minimum)
        best = torch.minimum(best, error)
    return scale, -minimum


def _least_squares(x: Tensor, weights: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """scale and minimum (<= 0) of the weighted line through (whole, x)."""
    sum_w, sum_x, sum_l = weights.sum(-1), (weights * x).sum(-1), (weights * whole).sum(-1)
    sum_ll, sum_xl = (weights * whole * whole).sum(-1), (weights * x * whole).sum(-1)
    inverse = _inverse(sum_w * sum_ll - sum_l * sum_l)
    scale, minimum = (sum_w * sum_xl - sum_x * sum_l) * inverse, (sum_ll * sum_x - sum_l * sum_xl) * inverse
    through_zero = minimum > 0
    scale = torch.where(through_zero, sum_xl * _inverse(sum_ll), scale).clamp(min=0)
    return scale, minimum.clamp(max=0)


def _affine_error(x: Tensor, weights: Tensor, scale: Tensor, minimum: Tensor, most: int) -> Tensor:
    """The weighted squared error when every entry takes its nearest level."""
    whole = ((x - minimum[..., None]) * _inverse(scale)[..., None]).round().clamp(0, most)
    return (weights * (scale[..., None] * whole + minimum[..., None] - x).square()).sum(-1)


# -- packing ------------------------------------------------------------------------------------------------------


def _inverse(x: Tensor) -> Tensor:
    """1 / x, 0 for 0."""
    return torch.where(x == 0, 0.0, 1 / x)


def _as_half(x: Tensor) -> Tensor:
    """Rounded as it will be stored, so that codes are chosen for the scale the reader sees."""
    return x.half().float()


def _half(x: Tensor) -> Tensor:
    """[b, 1] float32 as the bytes of a float16 -> [b, 2] uint8."""
    return x.half().view(torch.uint8)


def _nibbles(codes: Tensor, width: int) -> Tensor:
    """Runs of 2 * width 4-bit codes as `width` bytes: the first half of a run in the low bits -> [b, n / 2] uint8."""
    pairs = codes.reshape(codes.shape[0], -1, 2, width)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(codes.shape[0], -1)


def _planes(codes: Tensor, bits: int) -> Tensor:
    """[b, runs, planes, n] small codes side by side in a byte -> [b, runs, n] uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (codes << shifts).sum(dim=2).to(torch.uint8)


_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
