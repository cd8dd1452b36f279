"""A quantization run: every matrix of a model in turn, then the folder.

Knows: the order of things, and what makes two runs the same. Does not know: commands, terminals, where text comes from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import ConfigError, UnsupportedError
from forerun.kernels.threads import single_torch_thread
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.family import Family
from forerun.models.loader import LoadedModel, find_family
from forerun.quantize.grid import round_to_nearest
from forerun.quantize.layers import LayerWork
from forerun.quantize.layout import check_fits, quantization_config, tensors_of
from forerun.quantize.methods import quantize_layer
from forerun.quantize.output import write_model
from forerun.quantize.partial import Partial
from forerun.quantize.settings import QuantizeSettings
from forerun.quantize.stream import LayerStream
from forerun.weights.checkpoint import Checkpoint, read_json

Advance = Callable[[int], None]  # told how many more layers (or, when rounding, matrices) are done


class Quantizable(NamedTuple):
    """A folder whose matrices can be quantized."""

    checkpoint: Checkpoint
    family: Family
    config: ModelConfig

    @property
    def modules(self) -> list[str]:
        """Names of the matrices, layer by layer."""
        names = self.family.names
        own = (*names.qkv, names.out, *names.gate_up, names.down)
        prefixes = [names.layer.format(index=index) for index in range(self.config.num_layers)]
        return [f"{prefix}.{name}" for prefix in prefixes for name in own]


def open_source(folder: Path, settings: QuantizeSettings) -> Quantizable:
    """Open a folder to quantize; no weights are read.

    Raises UnsupportedError or ConfigError if it cannot be quantized with these settings.
    """
    if not folder.is_dir():  # a GGUF file
        raise UnsupportedError(f"{folder} is quantized already; start from the unquantized checkpoint")
    raw = read_json(folder / "config.json")
    family = find_family(raw)
    if family is None:
        raise UnsupportedError(
            f"{folder} runs through transformers; quantizing is implemented for the families forerun runs itself"
        )
    if raw.get("quantization_config"):
        raise UnsupportedError(f"{folder} is quantized already; start from the unquantized checkpoint")
    source = Quantizable(Checkpoint.open(folder), family, ModelConfig.read(raw, family))
    config = source.config
    if config.experts is not None or config.latents is not None or config.recurrent is not None:
        raise UnsupportedError(
            f"{folder} is a {config.model_type} model; quantizing is implemented for dense feed-forward layers "
            "behind attention with keys and values, not for mixtures of experts, latent attention or recurrent layers"
        )
    if config.value_norms:
        raise UnsupportedError(
            f"{folder} is a {config.model_type} model; quantizing is not implemented for norms of values and "
            "layers that read another one's keys"
        )
    names = family.names
    if family.norm_offset or not names.attention_norm or not names.mlp_norm or config.qk_norm == "row":
        raise UnsupportedError(
            f"{folder} is a {family.model_type} model; quantizing is implemented for attention and feed-forward layers "
            "each behind a norm whose weights are stored as they are, without norms over all heads together"
        )
    for module in source.modules:
        rows, columns = source.checkpoint.shape(f"{module}.weight")
        check_fits(module, (rows, columns), settings)
    return source


def round_model(source: Quantizable, out: Path, settings: QuantizeSettings, advance: Advance) -> None:
    """Write the folder `out`, every matrix rounded to the nearest ("rtn"): each is read once, no model is loaded."""
    partial = Partial(out, _asked(source, settings, ()))
    with single_torch_thread():  # many short operations: its threads would wait for each other longer than they compute
        write_model(source.checkpoint, _rounded(source, settings, advance), quantization_config(settings), out)
    partial.remove()


def _rounded(source: Quantizable, settings: QuantizeSettings, advance: Advance) -> Iterator[tuple[str, Tensor]]:
    matrices = {f"{module}.weight": module for module in source.modules}
    for name in source.checkpoint:
        tensor = source.checkpoint.tensor(name)
        if name not in matrices:
            yield name, tensor
            continue
        packed = tensors_of(round_to_nearest(tensor, settings, tensor.dtype), settings)
        yield from ((f"{matrices[name]}.{part}", values) for part, values in packed.items())
        advance(1)


def quantize_model(
    source: Quantizable, loaded: LoadedModel, out: Path, settings: QuantizeSettings,
    sequences: Sequence[Sequence[int]], advance: Advance,
) -> None:  # fmt: skip
    """Quantize `source`, freshly loaded as `loaded`, into the folder `out` by gptq or awq, calibrated with `sequences`.

    The loaded model's matrices are replaced on the way: it cannot be used afterwards. An interrupted run is
    resumed by the same call. Raises ConfigError for sequences longer than the model's positions.
    """
    decoder = loaded.model
    assert isinstance(decoder, Decoder)  # of every family in FAMILIES
    if any(len(ids) > decoder.max_position for ids in sequences):
        raise ConfigError(f"calibration sequences may have at most {decoder.max_position} tokens in this model")
    partial = Partial(out, _asked(source, settings, sequences))
    _quantize_layers(source, decoder, settings, sequences, partial, advance)
    write_model(source.checkpoint, _finished(source, partial), quantization_config(settings), out)
    partial.remove()


def _quantize_layers(
    source: Quantizable, decoder: Decoder, settings: QuantizeSettings, sequences: Sequence[Sequence[int]],
    partial: Partial, advance: Advance,
) -> None:  # fmt: skip
    stream, first = LayerStream(decoder, sequences), partial.next_layer
    if first:
        stream.residuals = partial.residuals()
    advance(first)
    for index in range(first, len(decoder.parts.layers)):
        work = LayerWork(decoder, source.checkpoint, source.family, index)
        quantize_layer(work, index, stream, source.config, settings)
        stream.advance(index)
        partial.save_layer(index, _tensors(work, settings), stream.residuals)
        work.release()
        advance(1)


def _tensors(work: LayerWork, settings: QuantizeSettings) -> dict[str, Any]:
    tensors = work.dense_tensors()
    for stage in work.stages:
        assert stage.quantized is not None
        for index, module in enumerate(stage.modules):
            rows = stage.part(index)
            packed = tensors_of(stage.quantized.rows(rows.start, rows.stop), settings)
            tensors |= {f"{module}.{name}": tensor for name, tensor in packed.items()}
    return tensors


def _finished(source: Quantizable, partial: Partial) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors outside of the layers, then those of the finished layers."""
    num_layers = source.config.num_layers
    prefixes = tuple(source.family.names.layer.format(index=index) + "." for index in range(num_layers))
    yield from ((name, source.checkpoint.tensor(name)) for name in source.checkpoint if not name.startswith(prefixes))
    for index in range(num_layers):
        yield from load_file(partial.layer_file(index)).items()


def _asked(source: Quantizable, settings: QuantizeSettings, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    text = hashlib.sha256(json.dumps([list(ids) for ids in sequences]).encode()).hexdigest()
    folder = str(source.checkpoint.folder.resolve())
    return {"model": folder, "bytes": source.checkpoint.nbytes, "text": text, "settings": asdict(settings)}
