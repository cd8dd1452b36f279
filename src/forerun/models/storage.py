"""How a checkpoint's weights are stored: format, method, bits, bytes by kind of tensor, and what they take in memory.

Knows: headers of checkpoints, and what tensors' names say of their place in a model. Does not know: their data, how a
format is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ConfigError
from forerun.models.base import StateSpec
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.recurrent_dims import state_shapes
from forerun.quant import stacked
from forerun.quant.gguf_decode import BLOCK_TYPES
from forerun.quant.settings import SECTION, Settings, asks_small_cache
from forerun.quant.sizes import ZERO_POINTS, quantized_growth
from forerun.weights.checkpoint import FLOAT_DTYPES, Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint, is_gguf

# Kind -> what is in the names of its tensors; the first that fits counts.
KINDS: Mapping[str, tuple[str, ...]] = {
    "norms": ("norm", "ln_"),
    "output": ("lm_head", "embed_out"),
    "embedding": ("embed", "wte", "wpe"),
    "experts": ("expert", "_exps"),  # the latter in GGUF files, stacked
    "attention": ("attn", "attention"),
    "feed-forward": ("mlp", "feed_forward", "ffn", "fc1", "fc2"),
}
OTHER = "other"
PACKED = ("qweight", "qzeros", "weight_packed")  # integers that hold several small ones
BITS, GROUP_SIZES = ("bits", "w_bit", "num_bits"), ("group_size", "q_group_size")  # what formats call them
EXCEPTIONS = ("extra_config", "dynamic")  # what AutoRound and GPTQModel call settings of some modules
UNQUANTIZED_BITS = (16, 32)


def cache_dtype(raw: Mapping[str, Any], config: ModelConfig, kept: torch.dtype) -> torch.dtype:
    """What keys and values are kept in beside matrices of that type: int8, but of latents, if `raw` asks for FP8."""
    if asks_small_cache(raw) and config.latents is None:
        return torch.int8
    return torch.bfloat16 if kept == torch.bfloat16 else torch.float32


def describe_storage(path: Path) -> dict[str, Any]:
    """What `forerun inspect` says of the weights in a folder or GGUF file.

    "method" names the quantization, or the type of dense weights; "bits" and "group_size" are those of quantized
    matrices, null where there are none or several; "bytes" are of each kind of tensor by the type they are stored in,
    the largest first.
    """
    checkpoint = GgufCheckpoint.open(path) if is_gguf(path) else Checkpoint.open(path)
    named = _named_gguf(checkpoint.file_type) if isinstance(checkpoint, GgufCheckpoint) else _named_folder(checkpoint)
    kinds: dict[str, dict[str, int]] = {}
    for name, stored, nbytes in checkpoint.stored():
        label = f"int{named['bits']}" if name.endswith(PACKED) and named["bits"] else stored
        sizes = kinds.setdefault(kind_of(name), {})
        sizes[label] = sizes.get(label, 0) + nbytes
    return {**named, "bytes": dict(sorted(kinds.items(), key=lambda item: -sum(item[1].values())))}


def check_float16(path: Path) -> None:
    """Raise ConfigError for a folder or GGUF file whose plain tensors are not in float16, for the most part."""
    checkpoint = GgufCheckpoint.open(path) if is_gguf(path) else Checkpoint.open(path)
    found = _main_float(checkpoint)
    if found != "F16":
        raise ConfigError(
            f"dtype float16 was asked for, but {path} is stored in {found}, whose values float16 would round or not "
            "hold: leave dtype at auto, or choose bfloat16 or float32"
        )


def tensors_of(
    config: ModelConfig, family: Family, stored: Checkpoint | GgufCheckpoint
) -> Iterator[tuple[str, str, int]]:  # fmt: skip
    """Name, type and bytes of the tensors that a decoder reads."""
    names = family.names
    layers = tuple(f"{names.layer.format(index=index)}." for index in range(config.num_layers))
    heads = () if config.tie_embeddings else (f"{names.lm_head}.",)
    inputs = (names.per_layer.table, names.per_layer.projection, names.per_layer.norm) if config.per_layer else ()
    own = (*layers, *heads, *(f"{module}." for module in (names.embedding, names.final_norm, *inputs)))
    return (tensor for tensor in stored.stored() if tensor[0].startswith(own))


def decoder_bytes(
    config: ModelConfig, family: Family, stored: Checkpoint | GgufCheckpoint, dtype: torch.dtype | None,
    float_activations: bool,
) -> int:  # fmt: skip
    """Bytes in memory of what a decoder reads.

    dtype: of matrices of floats, None: as stored. float_activations: products with integers do not round activations.
    """
    bits, table = integer_bits(stored), f"{family.names.embedding}.weight"
    has_zero_points = any(name.endswith(ZERO_POINTS) for name, *_ in stored.stored())
    is_symmetric = not has_zero_points or Settings.of(stored.config).get("sym") is True
    floats = dtype is not None and stored.stored_as(table) in BLOCK_TYPES  # a table read from blocks as floats

    def growth(name: str, kind: str) -> float:
        if floats and name == table and not config.tie_embeddings:
            return 0.0
        size = FLOAT_DTYPES[kind].itemsize if kind in FLOAT_DTYPES else 1
        found = quantized_growth(name, kind, size, bits, is_symmetric, float_activations)
        return _growth(kind, dtype) / 4 if found is None else found

    matrices = math.fsum(nbytes * growth(name, kind) for name, kind, nbytes in tensors_of(config, family, stored))
    return int(matrices) + (config.vocab_size * config.hidden_size * dtype.itemsize if dtype and floats else 0)


def dense_bytes(stored: Checkpoint, dtype: torch.dtype | None) -> int:
    """Bytes in memory of all a checkpoint has, as floats of `dtype`, or as stored if that is None."""
    return sum(nbytes * _growth(kind, dtype) // 4 for _, kind, nbytes in stored.stored())


def _growth(kind: str, dtype: torch.dtype | None) -> int:
    """Quarters of its size in a file that a tensor takes in memory: formats keep theirs, float16 is widened."""
    if kind not in FLOAT_DTYPES:
        return 4
    kept = dtype or (torch.float32 if kind == "F16" else FLOAT_DTYPES[kind])
    return 4 * kept.itemsize // FLOAT_DTYPES[kind].itemsize


def integer_bits(checkpoint: Checkpoint | GgufCheckpoint) -> int | None:
    """Bits of a folder's quantized matrices; None where there are none or several, and of GGUF files."""
    found = None if isinstance(checkpoint, GgufCheckpoint) else _named_folder(checkpoint)["bits"]
    return found if isinstance(found, int) else None


def _main_float(checkpoint: Checkpoint | GgufCheckpoint) -> str:
    """The type most bytes of plain tensors are of."""
    totals: dict[str, int] = {}
    for _, stored, nbytes in checkpoint.stored():
        if stored in FLOAT_DTYPES:
            totals[stored] = totals.get(stored, 0) + nbytes
    return max(totals, key=lambda stored: totals[stored], default="integers")


def kind_of(name: str) -> str:
    """What a tensor of this Hugging Face name belongs to: one of KINDS or OTHER."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def _named(form: str, method: str, bits: int | None = None, group_size: int | None = None) -> dict[str, Any]:
    return {"format": form, "method": method, "bits": bits, "group_size": group_size}


def _named_gguf(mix: str) -> dict[str, Any]:
    digit = next((part for part in mix if part.isdigit()), None)
    return _named("gguf", mix, int(digit) if digit and mix.startswith(("Q", "IQ", "TQ", "MXFP", "NVFP")) else None)


def _named_folder(checkpoint: Checkpoint) -> dict[str, Any]:
    """By `quantization_config`; dense weights by the type most bytes are of."""
    if not checkpoint.config.get(SECTION):
        return _named("dense", _main_float(checkpoint))
    settings = Settings(checkpoint.config[SECTION])  # in the tool's own words
    if settings.method == stacked.METHOD:  # whose settings name no sizes
        return _named("quantized", stacked.METHOD, 4, stacked.BLOCK)
    schemes = [settings, *_schemes(settings)]
    found = [[scheme.get(name) for scheme in schemes for name in names] for names in (BITS, GROUP_SIZES)]
    sizes = [{size for size in values if type(size) is int} for values in found]
    return _named("quantized", settings.method or "unnamed", *(one.pop() if len(one) == 1 else None for one in sizes))


def _schemes(settings: Settings) -> Iterator[Settings]:
    """The schemes of weights compressed-tensors names, and settings of AutoRound's and GPTQModel's for some modules."""
    groups = settings.section("config_groups")
    for name in groups.names():
        yield groups.section(name).section("weights")
    for exceptions in (settings.section(name) for name in EXCEPTIONS):
        for name in exceptions.names():
            own = exceptions.section(name)
            if own.get("bits") not in UNQUANTIZED_BITS:
                yield own


def state_specs(config: ModelConfig) -> tuple[StateSpec, ...]:
    """What each recurrent layer keeps of a sequence; () without such layers."""
    if config.recurrent is None:
        return ()
    return (StateSpec(*state_shapes(config.recurrent, config.hidden_size)),) * len(config.recurrent.layers)
