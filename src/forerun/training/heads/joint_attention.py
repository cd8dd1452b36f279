"""Causal attention with a few extra keys for every row, in one softmax, without a table of all scores.

Knows how torch's blockwise kernel for CPUs is combined with the extra keys: the two softmaxes are merged by their
log-sums, and the kernel's backward pass, given the merged output and log-sum, computes the gradients of its share of
the joint softmax (as in ring attention, arXiv 2310.01889). Knows nothing of heads' layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class JointAttention(torch.autograd.Function):
    """See `joint_attention`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Any:
        """own: the extra keys, then their values."""
        scale = query.shape[-1] ** -0.5
        mixed, log_sum = flash(query, keys, values, 0.0, True, scale=scale)
        half = len(own) // 2
        own_keys, own_values = own[:half], own[half:]
        scores = [(query.float() * key.float()).sum(-1) * scale for key in own_keys]  # each [batch, heads, rows]
        joint = torch.stack([log_sum, *scores]).logsumexp(0)  # [batch, heads, rows]
        total = (log_sum - joint).exp()[..., None] * mixed
        for score, value in zip(scores, own_values, strict=True):
            total = total + (score - joint).exp()[..., None] * value
        total = total.to(query.dtype)
        ctx.save_for_backward(query, keys, values, total, joint, *scores, *own)
        ctx.half = half
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        """Gradients of the joint softmax: dS = P (dP - sum(dO O)), for the kernel's keys and for the others."""
        query, keys, values, total, joint, *rest = ctx.saved_tensors
        half, scale = ctx.half, query.shape[-1] ** -0.5
        scores, own_keys, own_values = rest[:half], rest[half : 2 * half], rest[2 * half :]
        gradient = outputs[0].contiguous()
        for_query, for_keys, for_values = flash_backward(
            gradient, query, keys, values, total, joint, 0.0, True, scale=scale
        )
        shared = (gradient.float() * total.float()).sum(-1)  # [batch, heads, rows]
        own_key_gradients, own_value_gradients = [], []
        for score, key, value in zip(scores, own_keys, own_values, strict=True):
            share = (score - joint).exp()  # [batch, heads, rows]
            change = (share * ((gradient.float() * value.float()).sum(-1) - shared) * scale)[..., None]
            for_query = for_query + (change * key).to(for_query.dtype)
            own_key_gradients.append((change * query).to(key.dtype))
            own_value_gradients.append((share[..., None] * gradient).to(value.dtype))
        return (for_query, for_keys, for_values, *own_key_gradients, *own_value_gradients)


def joint_attention(query: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Row t sees keys 0 .. t, and key t of each pair in `own`; inputs and output [batch, heads, rows, head_dim]."""
    further = (*(key for key, _ in own), *(value for _, value in own))
    return torch.as_tensor(JointAttention.apply(query, keys, values, *further))  # type: ignore[no-untyped-call]
