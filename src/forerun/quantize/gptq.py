"""GPTQ: rounding column by column, every error spread over the columns that follow.

Knows: the algorithm of Frantar et al., "GPTQ" (arXiv 2210.17323), in its Cholesky form, with act-order. Does not
know: models, text, files.

With H the inputs' second moments and U the upper Cholesky factor of its inverse, the best correction of column j
for an error in column i is to subtract the error divided by U[i, i], times U[i, j].
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ResourceError
from forerun.quantize.grid import Grid, QuantizedMatrix, assembled, fit, fit_clipped
from forerun.quantize.settings import QuantizeSettings

MAX_BLOCK = 128  # columns between two updates of the rest
MAX_DAMP = 1.0


def gptq(weights: Tensor, moments: Tensor, settings: QuantizeSettings, dtype: torch.dtype) -> QuantizedMatrix:
    """Quantize [N, K] for inputs with second moments [K, K] (any scale); `dtype` is the checkpoint's own precision."""
    columns = weights.shape[1]
    hessian, rest = moments.clone(), weights.clone()
    dead = hessian.diagonal() == 0  # an input that is always 0: its weights count for nothing
    hessian.diagonal()[dead] = 1
    rest[:, dead] = 0
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if settings.act_order else None
    if order is not None:
        rest, hessian = rest[:, order], hessian[order][:, order]
    group_ids = torch.arange(columns) // settings.group_of(columns)
    codes, grids = _round_columns(rest, hessian, settings, dtype)
    if order is not None:
        codes, group_ids = codes[:, order.argsort()], group_ids[order.argsort()]
    return assembled(codes.to(torch.uint8), grids, group_ids)


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor of the inverse of H + damp * mean(diag H) * I; damp grows until there is one."""
    size = hessian.shape[0]
    mean = float(hessian.diagonal().mean())
    while damp <= MAX_DAMP:
        damped = hessian.double() + damp * mean * torch.eye(size, dtype=torch.float64)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not bool(failed):
                return torch.as_tensor(upper.float())
        damp *= 10
    raise ResourceError(
        "the inputs of a matrix are too alike for GPTQ (their second moments cannot be factored): "
        "use more or more varied calibration text"
    )


def _round_columns(
    rest: Tensor, hessian: Tensor, settings: QuantizeSettings, dtype: torch.dtype
) -> tuple[Tensor, list[Grid]]:
    """Codes [N, K] and the grids of the groups; `rest` is used up."""
    columns = rest.shape[1]
    size = settings.group_of(columns)
    factor = inverse_factor(hessian, settings.damp)  # [K, K]
    codes, grids = torch.empty_like(rest), list[Grid]()
    for group_start in range(0, columns, size):
        group = slice(group_start, min(group_start + size, columns))
        grids.append(_grid(rest[:, group], hessian[group, group], settings, dtype))
        for start in range(group.start, group.stop, MAX_BLOCK):
            end = min(start + MAX_BLOCK, group.stop)
            codes[:, start:end], errors = _round_block(
                rest[:, start:end], factor[start:end, start:end], grids[-1], settings.bits
            )
            rest[:, end:] -= errors @ factor[start:end, end:]
    return codes, grids


def _round_block(block: Tensor, factor: Tensor, grid: Grid, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scaled errors of neighbouring columns [N, b]; errors also move within the block."""
    rest = block.T.contiguous()  # [b, N]: each column is contiguous
    codes, errors, grid = torch.empty_like(rest), torch.empty_like(rest), Grid(grid.scale[:, 0], grid.zero[:, 0])
    for column, weights in enumerate(rest):
        codes[column] = grid.codes(weights, bits)
        errors[column] = (weights - grid.values(codes[column])) / factor[column, column]
        rest[column + 1 :].addr_(factor[column, column + 1 :], errors[column], alpha=-1)
    return codes.T, errors.T


def _grid(block: Tensor, moments: Tensor, settings: QuantizeSettings, dtype: torch.dtype) -> Grid:
    return fit_clipped(block, settings, dtype, moments) if settings.clips else fit(block, settings, dtype)
