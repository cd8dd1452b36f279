"""What the ops of recurrent layers mean, in torch.

Knows: the arithmetic of `recurrent_ops`. Does not know: speed. A row's arithmetic is the same calls on fresh tensors of
the same shapes, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from forerun.kernels.recurrent_ops import DeltaHeads, Walk, check_decays

_EPS = 1e-6

Step = Callable[[int, Tensor], Tensor]  # row, the state it continues from -> the state after it


def causal_conv(
    x: Tensor, weight: Tensor, tails: Tensor, walk: Walk, silu: bool, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """See `RecurrentOps.causal_conv`."""
    out = torch.empty_like(x)

    def step(row: int, tail: Tensor) -> Tensor:
        window = torch.cat([tail, x[row, None]])  # [taps, C]
        total = window[0] * weight[0] if bias is None else torch.addcmul(bias, window[0], weight[0])
        for tap in range(1, len(window)):
            total = torch.addcmul(total, window[tap], weight[tap])
        out[row] = functional.silu(total) if silu else total
        return window[1:]

    _walk(walk, tails, step)
    return out


def gated_delta(
    qkv: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, memory: Tensor, walk: Walk
) -> Tensor:
    """See `RecurrentOps.gated_delta`."""
    check_decays(len(decay), heads)
    out = torch.empty(qkv.shape[0], heads.values_size)

    def step(row: int, state: Tensor) -> Tensor:
        query, key, value = _cut(qkv[row].clone(), heads)
        query, key = _normalised(query) * heads.key_dim**-0.5, _normalised(key)
        write, forget = torch.split(gates[row].clone(), [heads.num_values, len(decay)])
        left = torch.exp(decay * functional.softplus(forget + bias)).view(heads.num_values, -1, 1)
        state = state * left  # [heads, key, value]
        found = (state * key[:, :, None]).sum(1)  # [heads, value_dim]
        state = state + key[:, :, None] * (torch.sigmoid(write)[:, None] * (value - found))[:, None]
        out[row] = (state * query[:, :, None]).sum(1).view(-1)
        return state

    _walk(walk, memory, step)
    return out


def mamba2(
    rows: Tensor, steps: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, skip: Tensor, memory: Tensor,
    walk: Walk,
) -> Tensor:  # fmt: skip
    """See `RecurrentOps.mamba2`."""
    out = torch.empty(rows.shape[0], heads.values_size)

    def step(row: int, state: Tensor) -> Tensor:
        query, key, value = _cut(rows[row].clone(), heads)
        size = functional.softplus(steps[row].clone() + bias)  # [heads]
        added = key[:, :, None] * (size[:, None] * value)[:, None]  # [heads, key, value]
        state = state * torch.exp(decay * size)[:, None, None] + added
        out[row] = ((state * query[:, :, None]).sum(1) + skip[:, None] * value).view(-1)
        return state

    _walk(walk, memory, step)
    return out


def _walk(walk: Walk, slots: Tensor, step: Step) -> None:
    """Take every row's step, parents first; leave the state after a sequence's last known row in its slot."""
    firsts, parents = walk.firsts.tolist(), walk.parents.tolist()
    for index, (slot, num_known) in enumerate(zip(walk.slots.tolist(), walk.num_known.tolist(), strict=True)):
        first, before = firsts[index], slots[slot].clone()
        after = dict[int, Tensor]()
        for row in range(first, firsts[index + 1]):
            after[row] = step(row, before if parents[row] < 0 else after[parents[row]])
        slots[slot] = after[first + num_known - 1]


def _cut(row: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys for every head of values [num_values, key_dim]; values [num_values, value_dim]."""
    size = heads.num_keys * heads.key_dim
    query, key = (part.view(heads.num_keys, heads.key_dim) for part in (row[:size], row[size : 2 * size]))
    share = heads.num_values // heads.num_keys
    query, key = (part.repeat_interleave(share, dim=0) for part in (query, key))
    return query, key, row[2 * size :].view(heads.num_values, heads.value_dim)


def _normalised(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + _EPS)
