"""What training a head needs of the target: its states, its output layer, its embedding.

Knows the interface and one implementation, a plain torch network for Llama models with tied embeddings, which also
runs on a GPU and under torch.compile. Any other target runs through the engine (`engine_target`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.training.export import load_model
from forerun.training.net import Net, NetConfig


class Norm(Protocol):
    """The target's final norm."""

    weight: Any

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes [..., hidden]."""


class TrainingTarget(Protocol):
    """A frozen model. Layers count as in `models.base`: 0 is the embedding, i the output of layer i - 1, and
    num_layers + 1 the state after the final norm."""

    shape: NetConfig
    embedding: Tensor  # [vocab, hidden]
    head: Tensor  # [vocab, hidden], the output layer, with `logit_scale` in it
    logit_scale: float
    logit_cap: float  # logits l become cap * tanh(l / cap); 0: they stay
    final_norm: Norm
    eos_token_id: int | None

    def states(self, ids: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """States along `ids` [batch, T] at each of `layers`, [batch, T, hidden]."""


class NetTarget:
    """A target as a plain torch network."""

    def __init__(self, net: Net, eos_token_id: int | None, device: torch.device) -> None:
        self.net = net.to(device).requires_grad_(False).eval()
        self.shape, self.eos_token_id = net.config, eos_token_id
        self.embedding = self.head = net.model.embed_tokens.weight.detach()
        self.logit_scale, self.logit_cap = 1.0, 0.0
        self.final_norm: Norm = net.model.norm

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """See `TrainingTarget`."""
        cos, sin = self.net.cos[: ids.shape[1]], self.net.sin[: ids.shape[1]]
        found, x = {}, self.net.model.embed_tokens(ids)
        for index, layer in enumerate(self.net.model.layers):
            if index in layers:
                found[index] = x
            x = layer(x, cos, sin, None)
        depth = self.shape.num_layers
        return {**found, depth: x, depth + 1: self.net.model.norm(x)}


def read_table(folder: Path) -> dict[str, Any]:
    """Reads a model folder's config.json."""
    try:
        table: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no readable config.json: {error}; give a model folder") from error
    return table


def is_plain_llama(table: dict[str, Any]) -> bool:
    """Whether `training.net` computes the model of a config.json exactly."""
    odd = ("rope_scaling", "attention_bias", "mlp_bias", "sliding_window", "quantization_config")
    plain = table.get("model_type") == "llama" and not any(table.get(name) for name in odd)
    rope = table.get("rope_parameters") or {"rope_type": "default"}
    known = all(name in table for name in ("rope_theta", "head_dim")) and table.get("hidden_act") == "silu"
    return plain and known and bool(table.get("tie_word_embeddings")) and rope.get("rope_type") == "default"


def load_net_target(folder: Path, device: torch.device) -> NetTarget:
    """Loads a plain Llama as a network."""
    eos = read_table(folder).get("eos_token_id")
    return NetTarget(load_model(folder), eos[0] if isinstance(eos, list) else eos, device)
