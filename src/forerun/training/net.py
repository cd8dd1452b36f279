"""The network that is trained: a Llama decoder as a plain `torch.nn.Module`.

Knows the arithmetic of the architecture and the Hugging Face parameter names, so that its state dict *is* a
checkpoint. Knows nothing of KV blocks, kernels or quantization: the engine has its own decoder, and the two are
compared through the exported files only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.errors import ConfigError

INIT_STD = 0.02


@dataclass(frozen=True)
class NetConfig:
    """The shape of a decoder; head sizes and counts as in a Llama `config.json`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "choose a num_kv_heads that divides it"
            )

    def published(self) -> dict[str, Any]:
        """The shape in the fields of a Llama `config.json`."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
        }


class RMSNormModule(nn.Module):
    """Divides by the root mean square of the last axis and scales; same shape out as in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `x` [..., size]."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary_tables(config: NetConfig) -> tuple[Tensor, Tensor]:
    """Computes cosines and sines of all positions, each [max_positions, head_dim]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-half)
    doubled = torch.cat((angles, angles), dim=-1)  # [max_positions, head_dim]
    return doubled.cos(), doubled.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates half-split pairs: `x` [batch, heads, seq, head_dim] by tables [seq, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


@dataclass
class LayerCache:
    """Keys and values of one layer, each [batch, kv_heads, max_seq, head_dim], filled up to `length`."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new rows [batch, kv_heads, seq, head_dim] and returns all rows so far."""
        end = self.length + keys.shape[2]
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class AttentionModule(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> Tensor:
        """Attends within `x` [batch, seq, hidden] and the cached rows before it."""
        query = rotate(self.split(self.q_proj(x)), cos, sin)
        keys = rotate(self.split(self.k_proj(x)), cos, sin)
        values = self.split(self.v_proj(x))  # [batch, kv_heads, seq, head_dim]
        if cache is not None:
            keys, values = cache.append(keys, values)
        # A single new row sees everything; a block of new rows is only ever the start of a sequence.
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=x.shape[1] > 1, enable_gqa=True)
        return torch.as_tensor(self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def split(self, x: Tensor) -> Tensor:
        """Splits [batch, seq, heads * head_dim] into [batch, heads, seq, head_dim]."""
        batch, seq, size = x.shape
        return x.view(batch, seq, size // self.head_dim, self.head_dim).transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU feed-forward; same shape out as in."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [..., hidden]."""
        return torch.as_tensor(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each after a norm, each added to the stream."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNormModule(config.hidden_size, config.norm_eps)
        self.self_attn = AttentionModule(config)
        self.post_attention_layernorm = RMSNormModule(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None) -> Tensor:
        """Maps `x` [batch, seq, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + torch.as_tensor(self.mlp(self.post_attention_layernorm(x)))


class DecoderModule(nn.Module):
    """Embedding, layers and final norm, named as in a Hugging Face Llama checkpoint."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNormModule(config.hidden_size, config.norm_eps)


class Net(nn.Module):
    """A causal language model with tied embeddings; its state dict has the Hugging Face names."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderModule(config)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draws all matrices from a normal; those that write to the residual stream are scaled down by depth."""
        depth_scale = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=INIT_STD * (depth_scale if writes else 1.0))

    def hidden(self, ids: Tensor, caches: list[LayerCache] | None = None) -> Tensor:
        """Runs the layers over `ids` [batch, seq] and returns normed states [batch, seq, hidden]."""
        start = caches[0].length if caches else 0
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, caches[index] if caches else None)
        return torch.as_tensor(self.model.norm(x))

    def head(self, hidden: Tensor) -> Tensor:
        """Turns states [..., hidden] into logits [..., vocab]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Computes logits [batch, seq, vocab] of the tokens after each of `ids` [batch, seq]."""
        return self.head(self.hidden(ids))

    def new_caches(self, batch: int, max_seq: int) -> list[LayerCache]:
        """Allocates empty caches for `batch` sequences of up to `max_seq` tokens."""
        shape, device = (batch, self.config.num_kv_heads, max_seq, self.config.head_dim), self.cos.device
        new = [torch.zeros(shape, device=device) for _ in range(2 * len(self.model.layers))]
        return [LayerCache(keys, values) for keys, values in zip(new[::2], new[1::2], strict=True)]
