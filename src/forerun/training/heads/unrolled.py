"""Attention while a head is unrolled over its own outputs, as in EAGLE-3's training-time test (arXiv 2503.01840).

Knows which keys a row of a later step sees. Row t of step j stands for the j-th token drafted after the known
position t: it sees the step-0 rows up to t, and of each later step the row t alone (its own draft's ancestors and
itself). Its rotary position is t + j. Knows nothing of what is fed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from forerun.training.heads.joint_attention import joint_attention
from forerun.training.net import NetConfig, RMSNormModule, rotate


@dataclass
class UnrolledKV:
    """Keys and values of every step so far, each [batch, kv_heads, rows of the step, head_dim]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps stored."""
        return len(self.keys)


class UnrolledAttention(nn.Module):
    """Grouped-query attention over inputs of `input_size`; names as in a Llama checkpoint."""

    def __init__(self, config: NetConfig, input_size: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim, self.groups = config.head_dim, config.num_kv_heads
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: UnrolledKV) -> Tensor:
        """Attends with the rows `x` [batch, rows, input] of the next step and adds them to `past`.

        cos, sin: tables of all positions [positions, head_dim]. Later steps have at most the rows of step 0.
        """
        step, rows = past.num_steps, x.shape[1]
        cos, sin = cos[step : step + rows], sin[step : step + rows]
        query = rotate(self.split(self.q_proj(x)), cos, sin)  # [batch, heads, rows, head_dim]
        past.keys.append(rotate(self.split(self.k_proj(x)), cos, sin))
        past.values.append(self.split(self.v_proj(x)))
        mixed = (self.mix_blockwise if is_blockwise(query) else self.mix)(query, past)
        return torch.as_tensor(self.o_proj(mixed.transpose(1, 2).flatten(2)))

    def mix_blockwise(self, query: Tensor, past: UnrolledKV) -> Tensor:
        """The same as `mix`, without tables of scores."""
        rows, per_group = query.shape[2], query.shape[1] // self.groups
        keys = [x[:, :, :rows].repeat_interleave(per_group, dim=1) for x in past.keys]
        values = [x[:, :, :rows].repeat_interleave(per_group, dim=1) for x in past.values]
        keys = [x.to(values[0].dtype) for x in keys]
        own = list(zip(keys[1:], values[1:], strict=True))
        return joint_attention(query.to(values[0].dtype), keys[0], values[0], own)

    def mix(self, query: Tensor, past: UnrolledKV) -> Tensor:
        """Mixes values for `query` [batch, heads, rows, head_dim]; same shape out."""
        batch, heads, rows, size = query.shape
        grouped = query.view(batch, self.groups, heads // self.groups, rows, size)
        keys, values = past.keys[0][:, :, None, :rows], past.values[0][:, :, None, :rows]
        scores = (grouped @ keys.transpose(-1, -2)).float() * size**-0.5  # [batch, groups, per_group, rows, rows]
        later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        own = [self.own_scores(grouped, step_keys[:, :, None, :rows]) for step_keys in past.keys[1:]]
        table = torch.cat((scores.masked_fill(later, -torch.inf), *own), dim=-1)  # [.., rows, rows + later steps]
        weights = table.softmax(-1).to(values.dtype)
        mixed = weights[..., :rows] @ values
        for number, step_values in enumerate(past.values[1:]):
            mixed = mixed + weights[..., rows + number, None] * step_values[:, :, None, :rows]
        return mixed.flatten(1, 2)

    def own_scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Scores of each row against the same row of a later step, [batch, groups, per_group, rows, 1]."""
        return torch.as_tensor((query * keys).float().sum(-1, keepdim=True) * self.head_dim**-0.5)

    def split(self, x: Tensor) -> Tensor:
        """Splits [batch, rows, heads * head_dim] into [batch, heads, rows, head_dim]."""
        batch, rows, size = x.shape
        return x.view(batch, rows, size // self.head_dim, self.head_dim).transpose(1, 2)


def is_blockwise(query: Tensor) -> bool:
    """Whether torch's kernel for CPUs computes it."""
    return query.device.type == "cpu"


class Tables(nn.Module):
    """Cosines and sines of the positions a head needs; not part of its checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)


def make_norm(config: NetConfig) -> RMSNormModule:
    """An RMSNormModule over the hidden size of `config`."""
    return RMSNormModule(config.hidden_size, config.norm_eps)
