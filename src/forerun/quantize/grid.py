"""Grids of integers: the scale and zero point of a group of weights, and rounding to them.

Knows: symmetric and asymmetric ranges, searching a smaller range, what a quantized matrix holds. Does not know: in
which order weights are rounded, nor files.

The value of a code is scale * (code - zero). Zero points are at least 1, so that the common layout, which stores them
minus one, can hold them; scales are rounded to their stored precision before weights are rounded with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.quantize.settings import QuantizeSettings

SMALLEST_SCALE = 2.0**-20
_CHUNK = 1 << 17  # weights rounded at a time, so that intermediate results stay in the L2 cache
CLIP_RATIOS = tuple(1 - 0.025 * step for step in range(29))  # 1 down to 0.3


class Grid(NamedTuple):
    """A scale and a zero point per row, in a shape that broadcasts over the weights."""

    scale: Tensor  # [..., 1] float32
    zero: Tensor  # [..., 1] float32, whole

    def codes(self, weights: Tensor, bits: int) -> Tensor:
        """The nearest codes of weights [..., k] -> float32, whole."""
        return (weights / self.scale).add_(self.zero).round_().clamp_(0, (1 << bits) - 1)

    def values(self, codes: Tensor) -> Tensor:
        """What codes [..., k] stand for."""
        return self.scale * (codes - self.zero)

    def rounded(self, weights: Tensor, bits: int) -> Tensor:
        """The nearest values on the grid."""
        return self.values(self.codes(weights, bits))


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix of codes, inputs in their own order."""

    codes: Tensor  # [N, K] uint8
    scales: Tensor  # [N, groups] float32, representable in float16
    zeros: Tensor  # [N, groups] float32, whole
    group_ids: Tensor  # [K] int64

    def dequantize(self) -> Tensor:
        """The matrix it stands for -> [N, K] float32."""
        return self.scales[:, self.group_ids] * (self.codes.float() - self.zeros[:, self.group_ids])

    def rows(self, start: int, end: int) -> QuantizedMatrix:
        """Some of its rows."""
        part = slice(start, end)
        return QuantizedMatrix(self.codes[part], self.scales[part], self.zeros[part], self.group_ids)

    def above(self, other: QuantizedMatrix) -> QuantizedMatrix:
        """Its rows, then those of another one with the same groups."""
        pairs = ((self.codes, other.codes), (self.scales, other.scales), (self.zeros, other.zeros))
        codes, scales, zeros = (torch.cat(pair) for pair in pairs)
        return QuantizedMatrix(codes, scales, zeros, self.group_ids)


def fit(weights: Tensor, settings: QuantizeSettings, dtype: torch.dtype, ratio: float = 1.0) -> Grid:
    """The grid over the range of weights [..., k], times `ratio`; `dtype` is the checkpoint's own precision."""
    low, high = weights.amin(-1, keepdim=True).clamp(max=0) * ratio, weights.amax(-1, keepdim=True).clamp(min=0) * ratio
    top = (1 << settings.bits) - 1
    if settings.sym:
        scale = _storable(2 * torch.maximum(-low, high) / top, dtype)
        return Grid(scale, torch.full_like(scale, float(1 << (settings.bits - 1))))
    scale = torch.where(low == 0, high / (top - 1), (high - low) / top)  # a zero point of 1 wastes a code
    scale = _storable(scale, dtype)
    return Grid(scale, (-low / scale).round().clamp(1, top))


def fit_clipped(weights: Tensor, settings: QuantizeSettings, dtype: torch.dtype, importance: Tensor | None) -> Grid:
    """The grid over the share of the range with the smallest loss, row by row.

    The loss of a row's rounding error e is e importance e^T, with the inputs' second moments [k, k] as importance;
    without importance, the sum of its squares.
    """
    best = fit(weights, settings, dtype)
    least = _loss(best.rounded(weights, settings.bits) - weights, importance)
    for ratio in CLIP_RATIOS[1:]:
        grid = fit(weights, settings, dtype, ratio)
        loss = _loss(grid.rounded(weights, settings.bits) - weights, importance)
        better = loss < least  # [..., 1]
        least = torch.where(better, loss, least)
        best = Grid(torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best


def round_to_nearest(
    weights: Tensor, settings: QuantizeSettings, dtype: torch.dtype, moments: Tensor | None = None
) -> QuantizedMatrix:
    """Every weight of [N, K] to the nearest value of its group's grid; `moments` [K, K] weigh the search of ranges."""
    columns = weights.shape[1]
    size = settings.group_of(columns)
    group_ids = torch.arange(columns) // size
    if moments is not None and settings.clips:
        groups = [slice(start, start + size) for start in range(0, columns, size)]
        grids = [fit_clipped(weights[:, group], settings, dtype, moments[group, group]) for group in groups]
        found = [grid.codes(weights[:, group], settings.bits) for grid, group in zip(grids, groups, strict=True)]
        return assembled(torch.cat(found, 1).to(torch.uint8), grids, group_ids)
    rows = torch.split(weights, max(_CHUNK // columns, 1))
    parts = [_rounded_rows(part, size, settings, dtype) for part in rows]
    codes, scales, zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return QuantizedMatrix(codes, scales, zeros, group_ids)


def _rounded_rows(
    weights: Tensor, size: int, settings: QuantizeSettings, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] of a few rows, scales and zero points [N, groups]."""
    groups = weights.float().reshape(len(weights), -1, size)  # [N, groups, size]
    grid = fit_clipped(groups, settings, dtype, None) if settings.clips else fit(groups, settings, dtype)
    codes = grid.codes(groups, settings.bits).to(torch.uint8)
    return codes.flatten(1), grid.scale[..., 0], grid.zero[..., 0]


def assembled(codes: Tensor, grids: list[Grid], group_ids: Tensor) -> QuantizedMatrix:
    """A matrix of codes [N, K] with the grids of its groups in order."""
    scales = torch.cat([grid.scale for grid in grids], dim=1)  # [N, groups]
    return QuantizedMatrix(codes, scales, torch.cat([grid.zero for grid in grids], dim=1), group_ids)


def _loss(error: Tensor, importance: Tensor | None) -> Tensor:
    """[..., k] -> [..., 1]."""
    weighted = error if importance is None else error @ importance
    return (weighted * error).sum(-1, keepdim=True)


def _storable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded so that both the checkpoint's precision and float16, which the layouts ask for, hold it."""
    return torch.where(scale > 0, scale, torch.ones_like(scale)).clamp(min=SMALLEST_SCALE).to(dtype).half().float()
