"""TritonKernels: the op contract on one NVIDIA GPU, or under Triton's interpreter on CPU tensors.

Knows: which module has which op, and where packed matrices go. Does not know: arithmetic, models. No op waits for the
device or asks it anything, so that a forward may be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.device import to_device
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import (
    AttentionRows,
    HeadLayout,
    LatentLayout,
    LayerKV,
    NoiseKeys,
    PackedExperts,
    PackedHeads,
    PackedLinear,
    Routing,
)
from forerun.kernels.reference import OPS
from forerun.kernels.tree_growth import TreeNodes, TreeRoom, TreeRows
from forerun.kernels.triton import attention, experts, latent, linear, moves, norms, rope, sampling, tree_growth
from forerun.kernels.triton.grouped import grouped_linear
from forerun.kernels.triton.grouped_layout import TritonGrouped, pack_grouped
from forerun.kernels.triton.linear import TritonLinear


def is_interpreted() -> bool:
    """Whether Triton interprets kernels (TRITON_INTERPRET=1), which it does on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


class TritonKernels:
    """Every op in Triton, on tensors of one device."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        """Raises KernelError for a device that Triton does not compile for."""
        if device.type != "cuda" and not is_interpreted():
            raise KernelError(f"Triton's kernels run on CUDA devices, not on {device.type!r}: choose device 'cuda'")
        self.device = device
        self._tables = moves.PoolTables()

    def describe(self) -> dict[str, str]:
        """Every op runs on the device."""
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            return dict.fromkeys(OPS, f"triton sm_{major}{minor}")
        return dict.fromkeys(OPS, "triton's interpreter")

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        return linear.pack_linear(weight, self.device)

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        """See `Kernels.pack_grouped`."""
        return pack_grouped(matrix, self.device)

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        if not isinstance(weight, (TritonLinear, TritonGrouped)):
            raise KernelError(f"weights packed by {type(weight).__name__} given to the Triton kernels")
        if x.shape[1] != weight.shape[1]:
            raise KernelError(f"linear: x has {x.shape[1]} columns, the weight {weight.shape[1]} inputs")
        if isinstance(weight, TritonGrouped):
            return grouped_linear(x.contiguous(), weight, bias)
        return linear.dense_linear(x.contiguous(), weight, bias)

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear) -> Tensor:
        """See `Kernels.embedding`."""
        return linear.embedding(to_device(token_ids, self.device), table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        return norms.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.layer_norm`."""
        return norms.layer_norm(x, weight, bias, eps)

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels.gated_act`."""
        return norms.gated_act(gate_up, activation)

    def rope_and_cache(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: LayerKV,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """See `Kernels.rope_and_cache`."""
        rope.rope_and_cache(qkv, heads, rope_table, positions, slots, kv, q_norm, k_norm, eps)

    def attention(
        self, qkv: Tensor, heads: HeadLayout, kv: LayerKV, rows: AttentionRows, scale: float, window: int = 0
    ) -> Tensor:
        """See `Kernels.attention`."""
        return attention.attention(qkv, heads, kv, rows, scale, window)

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """See `Kernels.pack_heads`."""
        return linear.pack_heads(weight, self.device)

    def linear_heads(self, x: Tensor, weight: PackedHeads) -> Tensor:
        """See `Kernels.linear_heads`."""
        return linear.linear_heads(x.contiguous(), weight)

    def latent_rope_and_cache(
        self,
        queries: Tensor,
        latents: Tensor,
        layout: LatentLayout,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: LayerKV,
        norm: Tensor,
        eps: float,
    ) -> None:
        """See `Kernels.latent_rope_and_cache`."""
        rope.latent_rope_and_cache(queries, latents, layout, rope_table, positions, slots, kv, norm, eps)

    def latent_attention(
        self, queries: Tensor, layout: LatentLayout, kv: LayerKV, rows: AttentionRows, scale: float
    ) -> Tensor:
        """See `Kernels.latent_attention`."""
        return latent.latent_attention(queries, layout, kv, rows, scale)

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
        """See `Kernels.route`."""
        return experts.route(logits, correction, routing)

    def pack_experts(
        self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str
    ) -> PackedExperts:
        """See `Kernels.pack_experts`."""
        return experts.pack_experts(gate_up, down, activation)

    def experts(self, x: Tensor, weights: Tensor, experts_: PackedExperts, base: Tensor | None = None) -> Tensor:
        """See `Kernels.experts`."""
        return experts.experts(x, weights, experts_, base)

    def move_rows(self, kvs: list[LayerKV], sources: Tensor, targets: Tensor) -> None:
        """See `Kernels.move_rows`."""
        moves.move_rows(kvs, to_device(sources, self.device), to_device(targets, self.device), self._tables)

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> Tensor:
        """See `Kernels.gumbel_argmax`; temperatures and keys may come from the host."""
        return sampling.gumbel_argmax(logits.to(self.device), temperatures, keys)

    def gumbel_topk(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.gumbel_topk`; temperatures and keys may come from the host."""
        return sampling.gumbel_topk(logits.to(self.device), temperatures, keys, k)

    def gumbel_chances(
        self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, width: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.gumbel_chances`; temperatures and keys may come from the host."""
        return sampling.gumbel_chances(logits.to(self.device), temperatures, keys, width)

    def grow_trees(
        self, nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, room: TreeRoom, last: TreeRows | None
    ) -> tuple[TreeNodes, TreeRows]:
        """See `Kernels.grow_trees`."""
        return tree_growth.grow_trees(nodes, budgets, ids, log_chances, room, last)

    def keep_trees(self, nodes: TreeNodes, budgets: Tensor, ids: Tensor, log_chances: Tensor, num_nodes: int) -> Tensor:
        """See `Kernels.keep_trees`."""
        return tree_growth.keep_trees(nodes, budgets, ids, log_chances, num_nodes)
