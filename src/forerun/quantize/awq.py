"""AWQ: inputs that matter more get a finer grid, their scale folded into what computes them.

Knows: the grid search of Lin et al., "AWQ" (arXiv 2306.00978), on second moments. Does not know: models,
and which of their parts divide the inputs by the scales found here.

The loss of a quantized matrix Q for W is tr((Q - W) H (Q - W)^T), the mean squared error of its outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forerun.quantize.grid import round_to_nearest
from forerun.quantize.settings import QuantizeSettings

NUM_RATIOS = 20
SMALLEST_SCALE = 1e-4


def find_scales(weights: Tensor, moments: Tensor, magnitudes: Tensor, settings: QuantizeSettings) -> Tensor:
    """The scales to divide the inputs by and multiply the columns of [N, K] with -> [K] float32.

    magnitudes [K]: mean absolute inputs; inputs of equal magnitude get equal scales.
    """
    plain = replace(settings, clip=False)
    best, least = torch.ones_like(magnitudes), float("inf")
    for step in range(NUM_RATIOS):
        scales = magnitudes.clamp(min=SMALLEST_SCALE) ** (step / NUM_RATIOS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(weights * scales, plain, torch.float32).dequantize() / scales
        loss = output_loss(rounded - weights, moments)
        if loss < least:
            best, least = scales, loss
    return best


def output_loss(error: Tensor, moments: Tensor) -> float:
    """tr(E H E^T) of an error [N, K]."""
    return float(((error @ moments) * error).sum())
