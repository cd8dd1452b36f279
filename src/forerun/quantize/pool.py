"""The KV cache of one layer for one sequence, its blocks in order.

Knows: sizes. Does not know: the engine's pool, which quantizing does not need.
"""

from __future__ import annotations

import torch

from forerun.kernels.ops import LayerKV
from forerun.models.base import LayerSpec

BLOCK_SIZE = 16


def block_table(num_tokens: int) -> range:
    """The blocks of a sequence."""
    return range(-(-num_tokens // BLOCK_SIZE))


def empty_kv(spec: LayerSpec, num_blocks: int, device: torch.device | None = None) -> LayerKV:
    """Room for `num_blocks` blocks; None: on the host."""
    return LayerKV.zeros(num_blocks, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.dtype, spec.latent, device)
