"""Cross-entropy with a distribution, from the rows before the output layer, a block of rows at a time.

Knows the output layer, a soft cap of its logits, the sum over a vocabulary and the gradients of all three, which it
computes in the same pass: all logits of a step take dozens of megabytes, and every separate operation on them would go
through memory (as in Liger Kernel's fused linear cross-entropy, arXiv 2410.10989). Knows nothing of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK_ROWS = 128  # times a vocabulary of a few thousand float32: fits into a cache
Block = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), as models with a soft cap of their logits compute them; the logits where cap is 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


def block_of_rows(logits: Tensor, aims: Tensor, weights: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """The weighted cross-entropy of capped logits, and its gradient by the logits before that.

    logits and aims [rows, vocab], weights [rows, 1].
    """
    bounded = capped(logits.float(), cap)
    given = bounded.log_softmax(-1)
    aimed = aims.float()
    # sum(aims) is one up to rounding, which matters where aims are kept in bfloat16
    gradient = weights * (given.exp() * aimed.sum(-1, keepdim=True) - aimed)
    if cap:
        gradient = gradient * (1 - (bounded / cap).square())
    return -(weights * (aimed * given).sum(-1, keepdim=True)).sum(), gradient.to(logits.dtype)


class FusedCrossEntropy(torch.autograd.Function):
    """See `weighted_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        table: Tensor,
        aims: Tensor,
        places: Tensor,
        weights: Tensor,
        cap: float,
        block: Block,
        dtype: torch.dtype,
    ) -> Tensor:
        """dtype: of the matrix products; the gradients are summed and kept in float32."""
        total = torch.zeros((), device=rows.device)
        for_rows = torch.empty_like(rows)
        for_table = torch.zeros_like(table) if ctx.needs_input_grad[1] else None
        inputs, matrix = rows.to(dtype), table.to(dtype)
        for first in range(0, len(rows), BLOCK_ROWS):
            part = slice(first, first + BLOCK_ROWS)
            loss, gradient = block(inputs[part] @ matrix.T, aims[places[part]], weights[part, None], cap)
            total += loss
            for_rows[part] = gradient @ matrix
            if for_table is not None:
                for_table += gradient.T @ inputs[part]
        ctx.save_for_backward(for_rows, *(() if for_table is None else (for_table,)))
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        """The gradients that the forward pass kept."""
        for_rows, *for_table = ctx.saved_tensors
        return for_rows * outputs[0], (for_table[0] * outputs[0]) if for_table else None, *([None] * 6)


def weighted_cross_entropy(
    rows: Tensor, table: Tensor, aims: Tensor, places: Tensor, weights: Tensor, cap: float = 0.0,
    block: Block = block_of_rows,
) -> Tensor:  # fmt: skip
    """-sum_i weight_i sum_v aim_iv log softmax(rows_i table^T)_v; sums are in float32, products as autocast says.

    rows [n, hidden], table [vocab, hidden], weights [n]; the aim of row i is aims[places_i], [vocab], and takes no
    gradient. cap: of the logits rows_i table^T, see `capped`. block computes `block_of_rows`, perhaps compiled.
    """
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    return torch.as_tensor(
        FusedCrossEntropy.apply(rows, table, aims, places, weights, cap, block, dtype)  # type: ignore[no-untyped-call]
    )
