"""Writing a Hugging Face folder as a GGUF file.

Knows: which type each tensor gets, and the GGUF keys that hold a configuration. Does not know: how blocks are
encoded (`quant.gguf_encode`), tokenizers (`weights.gguf_vocabulary`) or the container (`weights.gguf_write`).
Source: llama.cpp convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.layers.rotary import RopeSpec
from forerun.models.config import ModelConfig
from forerun.models.families import FAMILIES
from forerun.models.loader import tied_as_stored
from forerun.quant.gguf_encode import FILE_TYPES, choose_type, encode_rows
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_config import llama3_factors
from forerun.weights.gguf_names import gguf_name, has_gguf_name, pairs_from_halves, reordered_heads
from forerun.weights.gguf_vocabulary import tokenizer_metadata
from forerun.weights.gguf_write import TensorToWrite, tensor_bytes, write_gguf

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3"}
_QUANTIZATION_VERSION = 2  # of ggml's block layouts
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def export_gguf(
    folder: Path, out: Path, mix: str, name: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write the model of `folder` to the file `out`, its matrices in the types of `mix` (one of FILE_TYPES).

    name: the model's name in the file; the folder's name by default. progress(done, total) is called as tensors are
    written. Raises UnsupportedError for models that this module cannot write as GGUF, ConfigError for an unknown mix.
    """
    checkpoint = Checkpoint.open(folder)
    family = FAMILIES.get(str(checkpoint.config.get("model_type")))
    if family is None or family.model_type not in ARCHITECTURES:
        raise UnsupportedError(f"{folder} is none of {', '.join(ARCHITECTURES)}, the families forerun writes as GGUF")
    if checkpoint.config.get("quantization_config"):
        raise UnsupportedError(f"{folder} is quantized already; start from the unquantized checkpoint")
    config = tied_as_stored(ModelConfig.read(checkpoint.config, family), family, checkpoint)
    tensors = [*_rope_tensors(config), *_tensors(checkpoint, config, mix)]
    metadata = {
        "general.architecture": ARCHITECTURES[config.model_type],
        "general.name": name or folder.name,
        "general.file_type": FILE_TYPES[mix],
        "general.quantization_version": _QUANTIZATION_VERSION,
        **_config_metadata(config),
        **tokenizer_metadata(folder, config.vocab_size),
    }
    return write_gguf(out, metadata, tensors, progress)


def _config_metadata(config: ModelConfig) -> dict[str, Any]:
    heads, rope = config.heads, config.rope
    values = {
        "context_length": _context(config),
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads.num_q,
        "attention.head_count_kv": heads.num_kv,
        "attention.key_length": heads.head_dim,
        "attention.value_length": heads.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": rope.rotary_dim,
        "rope.freq_base": float(rope.theta),
        **_scaling(rope),
        **_window(config),
    }
    return {f"{ARCHITECTURES[config.model_type]}.{key}": value for key, value in values.items()}


def _context(config: ModelConfig) -> int:
    """The context length before linear rope scaling, which is what max_position_embeddings of config.json says."""
    stretched = config.rope.kind == "linear"
    return round(config.max_position / config.rope.factor) if stretched else config.max_position


def _scaling(rope: RopeSpec) -> dict[str, Any]:
    if rope.kind in ("default", "llama3"):  # llama3 scaling is a tensor: see _rope_tensors
        return {}
    if rope.kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "longrope":
        return {
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.attn_factor": float(rope.amplitude),
        }
    default = 1.0 + 0.1 * math.log(rope.factor) if rope.factor > 1 else 1.0  # llama.cpp computes this amplitude
    if rope.kind != "yarn" or not rope.truncate or not math.isclose(rope.amplitude, default):
        raise UnsupportedError(f"GGUF files have no keys for a {rope.kind} rope with these settings; use safetensors")
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor),
        "rope.scaling.original_context_length": rope.original_max_position,
        "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
        "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
    }


def _window(config: ModelConfig) -> dict[str, Any]:
    windows = set(config.windows)
    if windows != {0} and (len(windows) > 1 or config.model_type not in ("mistral", "phi3")):
        raise UnsupportedError(f"GGUF files have no keys for the sliding windows of this {config.model_type} model")
    needed = windows != {0} or config.model_type == "phi3"  # llama.cpp wants the key for Phi-3
    return {"attention.sliding_window": config.windows[0]} if needed else {}


def _rope_tensors(config: ModelConfig) -> list[TensorToWrite]:
    """Divisors of the rope frequencies, for scalings that llama.cpp reads from a tensor."""
    rope = config.rope
    if rope.kind == "longrope":
        short = torch.tensor(rope.short_factors)
        # forerun runs these models within their original context only, where the short factors apply.
        return [_vector("rope_factors_long.weight", short), _vector("rope_factors_short.weight", short)]
    if rope.kind != "llama3":
        return []
    factors = llama3_factors(
        rope.theta,
        rope.rotary_dim,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position,
    )
    return [_vector("rope_freqs.weight", torch.from_numpy(factors))]


def _vector(name: str, values: Tensor) -> TensorToWrite:
    return TensorToWrite(name, "F32", tuple(values.shape), lambda: tensor_bytes(values.float()))


def _tensors(checkpoint: Checkpoint, config: ModelConfig, mix: str) -> list[TensorToWrite]:
    """Every tensor of the decoder; each is read and encoded when its turn to be written comes."""
    found: list[TensorToWrite] = []
    for name in sorted(checkpoint):
        own = gguf_name(name)
        if ".rotary_emb." in name or (own == "output.weight" and config.tie_embeddings):
            continue
        if not has_gguf_name(name):
            raise UnsupportedError(f"{checkpoint.folder} has a tensor {name}, for which forerun knows no GGUF name")
        shape = checkpoint.shape(name)
        kind = _type_of(own, shape, config, mix)
        found.append(TensorToWrite(own, kind, shape, partial(_encoded, checkpoint, name, kind, config)))
    return found


def _type_of(own: str, shape: tuple[int, ...], config: ModelConfig, mix: str) -> str:
    layer = int(own.split(".")[1]) if own.startswith("blk.") else -1
    kind = choose_type(mix, own, shape[-1], layer, config.num_layers, config.tie_embeddings)
    return "F32" if len(shape) == 1 else kind


def _encoded(checkpoint: Checkpoint, name: str, kind: str, config: ModelConfig) -> Tensor:
    """The bytes of one tensor, with its rows in the order that llama.cpp expects."""
    values, heads = checkpoint.tensor(name), reordered_heads(gguf_name(name))
    if heads is not None and ARCHITECTURES[config.model_type] == "llama":
        num_heads = config.heads.num_q if heads == "q" else config.heads.num_kv
        values = values[pairs_from_halves(values.shape[0], num_heads)]
    if kind not in _FLOATS:
        return encode_rows(kind, values)
    narrow = values.to(_FLOATS[kind])
    if not narrow.isfinite().all():
        raise CheckpointError(f"{name} has entries that {kind} cannot hold; choose BF16 or F32")
    return tensor_bytes(narrow)
