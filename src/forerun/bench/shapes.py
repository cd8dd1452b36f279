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


def _from_file(name: str) -> Mapping[str, Any]:
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"there is no shape and no file {name!r}; shapes are {', '.join(SHAPES)}, or a config.json")
    raw = read_json(path)
    if not isinstance(raw.get("model_type"), str):
        raise CheckpointError(f"{path} names no model_type; it must be the config.json of a model")
    return raw
