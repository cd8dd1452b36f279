"""TritonKernels: the op contract on one NVIDIA GPU, or under Triton's interpreter on CPU tensors.

Knows: which module has which op, and where packed matrices go. Does not know: arithmetic, models. No op waits for the
device or asks it anything, so that a forward may be captured in a graph.
"""

from __future__ import annotations

import copy

import torch
import triton
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.device import to_device
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import (
    OPS,
    Kernels,
    LayerKV,
    NoiseKeys,
    PackedHeads,
    PackedLinear,
)
from forerun.kernels.recurrent_ops import DeltaHeads, Walk
from forerun.kernels.tree_walk import walk_trees
from forerun.kernels.triton import (
    attention,
    experts,
    latent,
    linear,
    moves,
    norms,
    recurrent,
    rope,
    sampling,
    tree_growth,
)
from forerun.kernels.triton.grouped import grouped_linear, grouped_rows
from forerun.kernels.triton.grouped_layout import TritonGrouped, pack_grouped
from forerun.kernels.triton.linear import TritonLinear


def is_interpreted() -> bool:
    """Whether Triton interprets kernels (TRITON_INTERPRET=1), which it does on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


class TritonKernels(Kernels):
    """Every op in Triton, on tensors of one device."""

    name = "triton"
    float_activations = False
    _num_rows: int | None = None  # of the matrices that are packed; None: those that are given
    rms_norm, add_rms_norm = staticmethod(norms.rms_norm), staticmethod(norms.add_rms_norm)
    gated_act, scaled = staticmethod(norms.gated_act), staticmethod(norms.scaled)
    rope_and_cache, attention = staticmethod(rope.rope_and_cache), staticmethod(attention.attention)
    latent_rope_and_cache = staticmethod(rope.latent_rope_and_cache)
    latent_attention = staticmethod(latent.latent_attention)
    route, pack_experts = staticmethod(experts.route), staticmethod(experts.pack_experts)
    experts = staticmethod(experts.apply_experts)
    grow_trees, keep_trees = staticmethod(tree_growth.grow_trees), staticmethod(tree_growth.keep_trees)
    walk_trees = walk_trees

    def __init__(self, device: torch.device) -> None:
        """Raises KernelError for a device that Triton does not compile for."""
        if device.type != "cuda" and not is_interpreted():
            raise KernelError(f"Triton's kernels run on CUDA devices, not on {device.type!r}: choose device 'cuda'")
        self.device = device
        self._tables, self._walks = moves.PoolTables(), recurrent.LastWalk()

    def describe(self) -> dict[str, str]:
        """Every op runs on the device."""
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            return dict.fromkeys(OPS, f"triton sm_{major}{minor}")
        return dict.fromkeys(OPS, "triton's interpreter")

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        return linear.pack_linear(weight, self.device, self._num_rows)

    def part_of(self, num_rows: int | None) -> TritonKernels:
        """See `quant.rows.KnowsWhole`."""
        if self._num_rows == linear.UNSPLIT:
            return self
        other = copy.copy(self)
        other._num_rows = linear.UNSPLIT if num_rows is None else num_rows
        return other

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        """See `Kernels.pack_grouped`."""
        return pack_grouped(matrix, self.device)

    def pack_coded(self, matrix: CodedMatrix) -> PackedLinear:
        """Raises KernelError: there are no such products yet."""
        raise KernelError(
            f"a matrix {list(matrix.shape)} of FP8 or of a table of floats: forerun multiplies with these on CPUs only "
            "(device 'cpu'); on a GPU take a GGUF, GPTQ, AWQ or bfloat16 checkpoint of the model"
        )

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
        ids = to_device(token_ids, self.device)
        return grouped_rows(ids, table) if isinstance(table, TritonGrouped) else linear.embedding(ids, table)

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """See `Kernels.pack_heads`."""
        return linear.pack_heads(weight, self.device)

    def linear_heads(self, x: Tensor, weight: PackedHeads) -> Tensor:
        """See `Kernels.linear_heads`."""
        return linear.linear_heads(x.contiguous(), weight)

    def move_rows(self, kvs: list[LayerKV], sources: Tensor, targets: Tensor) -> None:
        """See `Kernels.move_rows`."""
        moves.move_rows(kvs, to_device(sources, self.device), to_device(targets, self.device), self._tables)

    def causal_conv(
        self, x: Tensor, weight: Tensor, tails: Tensor, walk: Walk, silu: bool, bias: Tensor | None = None
    ) -> Tensor:
        """See `RecurrentOps.causal_conv`; walks may come from the host."""
        return recurrent.causal_conv(x, weight, tails, self._walks.plan(walk, self.device), silu, bias)

    def gated_delta(
        self, qkv: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, memory: Tensor, walk: Walk
    ) -> Tensor:
        """See `RecurrentOps.gated_delta`."""
        return recurrent.advance(
            qkv, gates, heads, decay, bias, None, memory, self._walks.plan(walk, self.device)
        )  # fmt: skip

    def mamba2(
        self, rows: Tensor, steps: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, skip: Tensor, memory: Tensor,
        walk: Walk,
    ) -> Tensor:  # fmt: skip
        """See `RecurrentOps.mamba2`."""
        return recurrent.advance(rows, steps, heads, decay, bias, skip, memory, self._walks.plan(walk, self.device))

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
