"""A quantization run: every layer of a model in turn, then the folder.

Knows: the order of things, and what makes two runs the same. Does not know: commands, terminals, where text is from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, UnsupportedError
from forerun.models.decoder import Decoder
from forerun.models.family import Family
from forerun.models.loader import LoadedModel, find_family
from forerun.quantize.layers import LayerWork
from forerun.quantize.layout import check_fits, quantization_config, tensors_of
from forerun.quantize.methods import quantize_layer
from forerun.quantize.output import write_model
from forerun.quantize.partial import Partial
from forerun.quantize.settings import QuantizeSettings
from forerun.quantize.stream import LayerStream
from forerun.weights.checkpoint import Checkpoint

Advance = Callable[[int], None]  # told how many more layers are done


def quantize_model(
    loaded: LoadedModel, out: Path, settings: QuantizeSettings, sequences: Sequence[Sequence[int]], advance: Advance
) -> None:
    """Quantize a freshly loaded model into the folder `out`, calibrated with `sequences` of token ids.

    The loaded model's matrices are replaced on the way: it cannot be used afterwards. A run that was interrupted goes
    on when it is asked the same again. Raises UnsupportedError and ConfigError for what cannot be quantized so.
    """
    decoder, family, checkpoint = quantizable_parts(loaded, settings)
    if any(len(ids) > decoder.max_position for ids in sequences):
        raise ConfigError(f"calibration sequences may have at most {decoder.max_position} tokens in this model")
    partial = Partial(out, _asked(loaded, checkpoint, settings, sequences))
    _quantize_layers(decoder, family, checkpoint, loaded, settings, sequences, partial, advance)
    prefixes = [family.names.layer.format(index=index) + "." for index in range(len(decoder.parts.layers))]
    layers = {prefix: partial.layer_file(index) for index, prefix in enumerate(prefixes)}
    write_model(checkpoint, layers, quantization_config(settings), out)
    partial.remove()


def _quantize_layers(
    decoder: Decoder, family: Family, checkpoint: Checkpoint, loaded: LoadedModel, settings: QuantizeSettings,
    sequences: Sequence[Sequence[int]], partial: Partial, advance: Advance,
) -> None:  # fmt: skip
    assert loaded.config is not None
    stream = None if settings.method == "rtn" else LayerStream(decoder, sequences)
    first = partial.next_layer
    if stream is not None and first:
        stream.residuals = partial.residuals()
    advance(first)
    for index in range(first, len(decoder.parts.layers)):
        work = LayerWork(decoder, checkpoint, family, index)
        quantize_layer(work, index, stream, loaded.config, settings)
        if stream is not None:
            stream.advance(index)
        partial.save_layer(index, _tensors(work, settings), [] if stream is None else stream.residuals)
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


def quantizable_parts(loaded: LoadedModel, settings: QuantizeSettings) -> tuple[Decoder, Family, Checkpoint]:
    """The pieces of a model that can be quantized with these settings.

    Raises UnsupportedError and ConfigError for one that cannot.
    """
    family = find_family(loaded.raw_config)
    if not isinstance(loaded.model, Decoder) or family is None or loaded.config is None:
        raise UnsupportedError(
            f"{loaded.folder} runs through transformers; quantizing is implemented for the families forerun runs itself"
        )
    if loaded.config.experts is not None or loaded.config.latents is not None:
        raise UnsupportedError(
            f"{loaded.folder} is a {loaded.config.model_type} model; quantizing is implemented for dense feed-forward "
            "layers behind attention with keys and values, not for mixtures of experts or latent attention"
        )
    if loaded.raw_config.get("quantization_config") or not loaded.folder.is_dir():  # a GGUF file is no folder
        raise UnsupportedError(f"{loaded.folder} is quantized already; start from the unquantized checkpoint")
    checkpoint = Checkpoint.open(loaded.folder)
    names = family.names
    for index in range(loaded.config.num_layers):
        prefix = names.layer.format(index=index)
        for name in (*names.qkv, names.out, *names.gate_up, names.down):
            rows, columns = checkpoint.shape(f"{prefix}.{name}.weight")
            check_fits(f"{prefix}.{name}", (rows, columns), settings)
    return loaded.model, family, checkpoint


def _asked(
    loaded: LoadedModel, checkpoint: Checkpoint, settings: QuantizeSettings, sequences: Sequence[Sequence[int]]
) -> dict[str, Any]:
    text = hashlib.sha256(json.dumps([list(ids) for ids in sequences]).encode()).hexdigest()
    folder = str(loaded.folder.resolve())
    return {"model": folder, "bytes": checkpoint.nbytes, "text": text, "settings": asdict(settings)}
