"""Quantized matrices as tensors of the public checkpoint layouts, and what config.json says of them.

Knows: the GPTQ layout ("gptq", zero points stored minus one) and AWQ's "gemm". Does not know: files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import forerun
from forerun.errors import ConfigError
from forerun.quant.awq import pack_outputs
from forerun.quant.packing import WORD_BITS, pack
from forerun.quantize.grid import QuantizedMatrix
from forerun.quantize.settings import QuantizeSettings


def check_fits(module: str, shape: tuple[int, int], settings: QuantizeSettings) -> None:
    """Raise ConfigError if a matrix [N, K] cannot be cut into the groups and words of the layout."""
    rows, columns = shape
    size = settings.group_of(columns)
    if columns % size:
        raise ConfigError(
            f"{module} has {columns} inputs, which group_size {size} does not divide; choose one that does, or -1"
        )
    bits = settings.bits
    if rows * bits % WORD_BITS or (settings.layout == "gptq" and columns * bits % WORD_BITS):
        raise ConfigError(
            f"{module} is {rows} x {columns}, which {bits}-bit integers do not fill whole 32-bit words with; choose "
            "other bits"
        )


def tensors_of(quantized: QuantizedMatrix, settings: QuantizeSettings) -> dict[str, Tensor]:
    """A matrix as the tensors of its module, names without prefix."""
    scales = quantized.scales.T.contiguous().half()  # [groups, N]
    zeros = quantized.zeros.T.long()  # [groups, N]
    if settings.layout == "awq":
        codes = quantized.codes.T.long()  # [K, N]
        return {"qweight": pack_outputs(codes), "qzeros": pack_outputs(zeros), "scales": scales}
    return {
        "qweight": pack(quantized.codes, settings.bits).T.contiguous(),  # [K * bits / 32, N]
        "qzeros": pack(zeros - 1, settings.bits),
        "scales": scales,
        "g_idx": quantized.group_ids.to(torch.int32),
    }


def quantization_config(settings: QuantizeSettings) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    if settings.layout == "awq":
        return {
            "quant_method": "awq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    return {
        "quant_method": "gptq",
        "bits": settings.bits,
        "group_size": settings.group_size,
        "sym": settings.sym,
        "desc_act": settings.act_order,
        "damp_percent": settings.damp,
        "static_groups": False,
        "true_sequential": settings.method == "gptq",
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"forerun:{forerun.__version__}"], "method": settings.method},
    }
