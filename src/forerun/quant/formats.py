"""Which storage formats exist, in the order they are tried, and which quantization settings are refused.

Knows: the list. Does not know: how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from forerun.errors import UnsupportedError
from forerun.quant import auto_round, awq, bitsandbytes, compressed, float8, gptq, modelopt, stacked, torchao
from forerun.quant.awq import AwqFormat
from forerun.quant.base import CheckedFormat, TensorSource, WeightFormat
from forerun.quant.bitsandbytes import BitsAndBytesFormat
from forerun.quant.compressed import CompressedFormat
from forerun.quant.dense import DenseFormat
from forerun.quant.float8 import Float8Format
from forerun.quant.gguf import GgufFormat
from forerun.quant.gptq import GptqFormat
from forerun.quant.modelopt import ModelOptFormat
from forerun.quant.settings import REMEDY, SECTION, Settings
from forerun.quant.torchao import TorchaoFormat

FORMATS: tuple[WeightFormat, ...] = (
    GptqFormat(), AwqFormat(), CompressedFormat(), Float8Format(), ModelOptFormat(), BitsAndBytesFormat(),
    TorchaoFormat(), GgufFormat(), DenseFormat(),
)  # fmt: skip
PACKED_NAMES = ("qweight", "weight_packed")
MATRIX_NAMES = ("weight", torchao.DATA, *PACKED_NAMES)  # of a module's tensors, what stands for its matrix
CHECKS: Mapping[str, Callable[[Settings], None]] = {
    gptq.METHOD: gptq.check_gptq,
    awq.METHOD: awq.check_awq,
    compressed.METHOD: compressed.check_compressed,
    **dict.fromkeys(float8.METHODS, float8.check_float8),
    modelopt.METHOD: modelopt.check_modelopt,
    bitsandbytes.METHOD: bitsandbytes.check_bitsandbytes,
    torchao.METHOD: torchao.check_torchao,
    stacked.METHOD: stacked.check_mxfp4,
}


def find_format(source: TensorSource, prefix: str) -> WeightFormat | None:
    """The format in which the module `prefix` is stored, None if the module has no tensors.

    Raises UnsupportedError for packed integers whose format config.json does not name.
    """
    packed = next((name for name in PACKED_NAMES if source.has(f"{prefix}.{name}")), None)
    if packed is not None and not source.config.get(SECTION):
        raise UnsupportedError(
            f"{prefix}.{packed} holds packed integers, but config.json has no {SECTION} that says how; copy the "
            "checkpoint with its config.json again"
        )
    return next((form for form in FORMATS if form.matches(source, prefix)), None)


class NamedTensors(TensorSource, Iterable[str], Protocol):
    """A TensorSource that can list the names of its tensors."""


def check_tensors(source: NamedTensors) -> None:
    """Raise CheckpointError for modules whose scales are missing or misshapen; reads headers alone."""
    for name in source:
        prefix, _, kind = name.rpartition(".")
        form = find_format(source, prefix) if kind in MATRIX_NAMES else None
        if isinstance(form, CheckedFormat):
            form.check(source, prefix)


def check_quantization(section: object) -> None:
    """Raise UnsupportedError if the `quantization_config` of a config.json asks for what no format here reads."""
    settings = Settings(auto_round.restated(section))
    check = CHECKS.get(settings.method or "")
    if check is None:
        raise UnsupportedError(
            f"the checkpoint is quantized ({SECTION}: {settings.get('quant_method') or 'unnamed'}); supported are "
            f"{', '.join((*CHECKS, auto_round.METHOD))} and unquantized weights; {REMEDY}"
        )
    check(settings)
