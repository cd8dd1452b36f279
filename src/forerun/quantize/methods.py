"""How gptq and awq quantize one decoder layer.

Knows: the order of work inside a layer. Does not know: text, files, other layers.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from forerun.models.config import ModelConfig
from forerun.quantize.awq import find_scales
from forerun.quantize.gptq import gptq
from forerun.quantize.grid import QuantizedMatrix, round_to_nearest
from forerun.quantize.layers import DOWN, GATE_UP, OUT, QKV, LayerWork, Stage
from forerun.quantize.settings import QuantizeSettings
from forerun.quantize.stream import LayerInputs, LayerStream


def quantize_layer(
    work: LayerWork, index: int, stream: LayerStream, config: ModelConfig, settings: QuantizeSettings
) -> None:
    """Quantize every matrix of layer `index` by gptq or awq; `stream` holds its inputs."""
    if settings.method == "gptq":
        _gptq_layer(work, index, stream, settings)
    else:
        _awq_layer(work, index, stream, config, settings)


def _gptq_layer(work: LayerWork, index: int, stream: LayerStream, settings: QuantizeSettings) -> None:
    """Stage by stage, each calibrated on inputs from the stages already quantized ("true sequential")."""
    for stage in work.stages:
        (inputs,) = stream.watch(index, [stage.linear])
        stage.replace(gptq(stage.matrix, inputs.moments, settings, work.dtype))


def _awq_layer(
    work: LayerWork, index: int, stream: LayerStream, config: ModelConfig, settings: QuantizeSettings
) -> None:  # fmt: skip
    """Find scales for all stages with the layer in float, then round with searched ranges."""
    watched = stream.watch(index, [stage.linear for stage in work.stages])
    for number, inputs in enumerate(watched):
        watched[number] = _rescale(work, number, inputs, config, settings)
    for number, (stage, inputs) in enumerate(zip(work.stages, watched, strict=True)):
        stage.replace(_clipped(stage, number, inputs, work, config, settings))


def _rescale(
    work: LayerWork, number: int, inputs: LayerInputs, config: ModelConfig, settings: QuantizeSettings
) -> LayerInputs:
    """Fold a stage's best scales into what computes its inputs -> the scaled inputs."""
    stage, magnitudes = work.stages[number], inputs.magnitudes
    if number == OUT:
        magnitudes = _shared_by_heads(magnitudes, config)
    scales = find_scales(stage.matrix, inputs.moments, magnitudes, settings)
    scales = _fold(work, number, scales, config)
    stage.matrix *= scales
    return LayerInputs(inputs.moments / scales / scales[:, None], inputs.magnitudes / scales)


def _fold(work: LayerWork, number: int, scales: Tensor, config: ModelConfig) -> Tensor:
    """Divide the inputs of a stage by `scales`, as exactly as precision allows -> the scales really used."""
    if number in work.norms:
        return work.fold_into_norm(number, scales)
    if number == DOWN:  # its inputs are linear in the outputs of `up`, the last rows of GATE_UP
        work.divide_last_rows(GATE_UP, scales)
    else:  # its inputs are means of values, the last rows of QKV; query heads share them
        heads = config.heads
        work.divide_last_rows(QKV, scales.view(heads.num_kv, -1, heads.head_dim)[:, 0].reshape(-1))
    return scales


def _shared_by_heads(magnitudes: Tensor, config: ModelConfig) -> Tensor:
    """[Q * D], averaged over the query heads that share the same values."""
    heads = config.heads
    grouped = magnitudes.view(heads.num_kv, -1, heads.head_dim)
    return grouped.mean(1, keepdim=True).expand_as(grouped).reshape(-1)


def _clipped(
    stage: Stage, number: int, inputs: LayerInputs, work: LayerWork, config: ModelConfig, settings: QuantizeSettings
) -> QuantizedMatrix:  # fmt: skip
    """Search ranges except for queries and keys: a smaller one disturbs their products (AWQ's reference code)."""
    if number != QKV:
        return round_to_nearest(stage.matrix, settings, work.dtype, inputs.moments)
    values = config.heads.num_kv * config.heads.head_dim  # the last rows
    front = round_to_nearest(stage.matrix[:-values], replace(settings, clip=False), work.dtype)
    return front.above(round_to_nearest(stage.matrix[-values:], settings, work.dtype, inputs.moments))
