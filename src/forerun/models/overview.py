"""What a model is and what it would take, told by its configuration and headers: no weight is read.

Knows: the sizes a loaded model will have. Does not know: how tensors are decoded, engines, how any of it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.errors import UnsupportedError
from forerun.kernels.device import CPU
from forerun.models.adapters import CONFIG_FILE
from forerun.models.base import LayerSpec, StateSpec
from forerun.models.config import ModelConfig, ignored_fields, num_parameters
from forerun.models.family import Family
from forerun.models.headers import check_headers
from forerun.models.loader import check_device, dtype_named, find_family, gguf_family, open_checkpoint, read_config
from forerun.models.recurrent_dims import ConvDims, DeltaDims, MambaDims
from forerun.models.storage import cache_dtype, check_float16, decoder_bytes, dense_bytes, state_specs, tensors_of
from forerun.quant.formats import check_tensors
from forerun.weights.checkpoint import FLOAT_DTYPES, Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer, check_vocabulary

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Overview:
    """A model that was not loaded; of one that runs through transformers what its headers tell."""

    folder: Path  # or the GGUF file
    raw_config: Mapping[str, Any]
    config: ModelConfig | None  # None for a model that runs through transformers
    tokenizer: Tokenizer
    vocab_size: int
    max_position: int
    num_parameters: int
    stored_bytes: int  # in files; of a checkpoint's modules for drafting and parts for images nothing is counted
    weight_bytes: int  # in memory
    kv_specs: tuple[LayerSpec, ...]  # () for a model that keeps its own state
    state_specs: tuple[StateSpec, ...]
    adapters: tuple[str, ...]  # names of folders beside the weights that hold PEFT adapters
    ignored_fields: tuple[str, ...] = ()  # of config.json, which forerun does not know

    @property
    def implementation(self) -> str:
        """What runs it."""
        return "transformers" if self.config is None else "forerun"


def look_at(
    name_or_path: str | Path, dtype: str = "auto", activations: str = "auto", device: torch.device = CPU
) -> Overview:
    """What `load_model` would load with kernels of these activations on that device.

    Raises ModelError, for damage to tensors' data excepted.
    """
    kept, folder = dtype_named(dtype), resolve_model(name_or_path)
    if dtype == "float16":
        check_float16(folder)
    stored = open_checkpoint(folder)
    tokenizer = stored.tokenizer() if isinstance(stored, GgufCheckpoint) else Tokenizer.from_folder(folder)
    family = gguf_family(stored) if isinstance(stored, GgufCheckpoint) else find_family(stored.config)
    config = read_config(folder)
    if family is None or config is None:
        assert isinstance(stored, Checkpoint)
        return _through_transformers(folder, stored, tokenizer, kept, device)
    if isinstance(stored, Checkpoint):
        check_tensors(stored)
        # Whether an output layer is a copy of the embedding would show only in its data: it is counted.
        has_head = stored.has(f"{family.names.lm_head}.weight")
        config = replace(config, tie_embeddings=config.tie_embeddings and not has_head)
    check_vocabulary(tokenizer, config.vocab_size)
    check_headers(config, family, stored)
    return Overview(
        folder,
        stored.config,
        config,
        tokenizer,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        num_parameters=num_parameters(config),
        stored_bytes=sum(nbytes for *_, nbytes in tensors_of(config, family, stored)),
        weight_bytes=decoder_bytes(config, family, stored, kept, activations == "float32"),
        kv_specs=_kv_specs(config, _kv_dtype(config, family, stored, kept)),
        state_specs=state_specs(config),
        adapters=_adapters(folder),
        ignored_fields=ignored_fields(stored.config, family) if isinstance(stored, Checkpoint) else (),
    )


def why_refused(found: Overview, device: torch.device) -> str | None:
    """Why loading the model there fails; None if the device can run it."""
    try:
        if found.config is not None:
            check_device(found.config, device)
    except UnsupportedError as error:
        return str(error)
    return None


def _through_transformers(
    folder: Path, stored: Checkpoint, tokenizer: Tokenizer, dtype: torch.dtype | None, device: torch.device
) -> Overview:
    from forerun.models.hf import max_position
    from forerun.models.hf_loading import kv_specs_of, read_hf_config  # imports transformers, which takes seconds

    config = read_hf_config(folder, stored.config)
    text, kv_specs = config.get_text_config(), kv_specs_of(config, dtype) if device.type == "cpu" else ()
    sizes = {name: value for name in _SIZES if isinstance(value := getattr(text, name, None), int)}
    if kv_specs:
        sizes["num_key_value_heads"] = kv_specs[0].num_kv_heads
    return Overview(
        folder,
        {**stored.config, **sizes},  # families have names of their own for them
        None,
        tokenizer,
        vocab_size=text.vocab_size,
        max_position=max_position(text),
        num_parameters=sum(math.prod(stored.shape(name)) for name in stored),
        stored_bytes=stored.nbytes,
        weight_bytes=dense_bytes(stored, dtype),
        kv_specs=kv_specs,
        state_specs=(),
        adapters=_adapters(folder),
    )


def _kv_dtype(
    config: ModelConfig, family: Family, stored: Checkpoint | GgufCheckpoint, dtype: torch.dtype | None
) -> torch.dtype:
    """As `Builder.decoder` has it: float32 beside float32 and float16 matrices, else bfloat16; see `cache_dtype`."""
    names = family.names_of(family.names, 0)
    outs = {ConvDims: names.conv.out, MambaDims: names.mamba.out, DeltaDims: names.delta.out}
    last = outs[type(config.recurrent)] if config.is_recurrent(0) else names.out
    out = f"{names.layer.format(index=0)}.{last}.weight" if config.has_mixer(0) else f"{names.lm_head}.weight"
    kind = stored.stored_as(out) if stored.has(out) else ""
    kept = dtype or FLOAT_DTYPES.get(kind, torch.bfloat16)
    return cache_dtype(stored.config, config, kept)


def _kv_specs(config: ModelConfig, dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    attending = [i for i in range(config.num_layers) if config.has_mixer(i) and not config.is_recurrent(i)]
    stored = [config.shape(layer).heads for layer in attending if config.shape(layer).kv_layer is None]
    return tuple(LayerSpec(heads.num_kv, heads.head_dim, dtype, config.latents is not None) for heads in stored)


def _adapters(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))) if folder.is_dir() else ()
