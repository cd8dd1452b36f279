"""Shapes of models to measure: a few by name, any other from a config.json.

Knows: the sizes published models have. Does not know: weights, timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forerun.errors import CheckpointError, ConfigError
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.loader import find_family
from forerun.weights.checkpoint import read_json

# Sizes as in the published config.json of these models; `small` is made up, for a quick look.
SHAPES: dict[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "tie_word_embeddings": True,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "small": {
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
}


class Shape(NamedTuple):
    """A model without weights."""

    name: str
    raw: Mapping[str, Any]  # config.json
    config: ModelConfig
    family: Family


def read_shape(name: str) -> Shape:
    """The shape of that name, or of a config.json (or a folder with one); raises ConfigError or the ModelErrors."""
    raw = SHAPES[name] if name in SHAPES else _from_file(name)
    family = find_family(raw)
    if family is None:
        raise ConfigError(
            f"{name}: models of type {raw['model_type']} have no implementation of forerun's own, and only such can be "
            f"measured without weights; choose {', '.join(SHAPES)} or another config.json"
        )
    return Shape(name, raw, ModelConfig.read(raw, family), family)


def part_of(shape: Shape, layers: int | None, vocab_size: int | None) -> Shape:
    """The shape with its first layers and tokens only (None: all); raises ConfigError for more than there are."""
    raw = dict(shape.raw)
    for field, count in (("num_hidden_layers", layers), ("vocab_size", vocab_size)):
        if count is not None and not 1 <= count <= raw[field]:
            raise ConfigError(f"{shape.name} has {field} {raw[field]}; choose from 1 to that, not {count}")
        raw[field] = raw[field] if count is None else count
    return shape._replace(raw=raw, config=ModelConfig.read(raw, shape.family))


def _from_file(name: str) -> Mapping[str, Any]:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"there is no shape and no file {name!r}; shapes are {', '.join(SHAPES)}, or a config.json")
    if path.suffix.lower() == ".gguf":
        raise ConfigError(f"{name} is a GGUF file; a shape is {', '.join(SHAPES)}, or the config.json of a model")
    raw = read_json(path)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} names no model_type; it must be the config.json of a model")
    return raw
