"""The torch reference: what every op means, computed plainly.

Knows: the arithmetic of the contract in `ops`. Does not know: speed. Every row is computed by itself from a fresh
copy, so its arithmetic is literally the same calls whatever else is in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels import philox
from forerun.kernels.attention import Seen, attend, first_counted, places, rotate_tail, soft_cap, stored
from forerun.kernels.chances import rival_log_chances
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.experts import ReferenceExperts, check_routing, expert_sum, reference_experts, route_row
from forerun.kernels.gates import GATES, inner_size
from forerun.kernels.grouped import GroupedMatrix, ReferenceGrouped, multiply_grouped, pack_reference
from forerun.kernels.ops import (
    ACTIVATIONS,
    NUM_RIVALS,
    WEIGHT_DTYPES,
    AttentionRows,
    ExpertBiases,
    HeadLayout,
    Kernels,
    LatentLayout,
    LayerKV,
    NoiseKeys,
    PackedExperts,
    PackedHeads,
    PackedLinear,
    Routing,
)
from forerun.kernels.recurrent_reference import causal_conv, gated_delta, mamba2
from forerun.kernels.tree_growth import grow_trees, keep_trees
from forerun.kernels.tree_walk import walk_trees

_CHUNK = 512


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """A weight matrix widened to float32, which is exact."""

    weight: Tensor  # [N, K] float32

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class ReferenceHeads:
    """A matrix a head, widened to float32."""

    weight: Tensor  # [Q, N, K] float32

    @property
    def shape(self) -> tuple[int, int, int]:
        """(Q, N, K)."""
        return self.weight.shape[0], self.weight.shape[1], self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes


class ReferenceKernels(Kernels):
    """Every op of `forerun.kernels.ops.Kernels` in torch."""

    name = "reference"
    device = torch.device("cpu")
    float_activations = False

    def pack_linear(self, weight: Tensor) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        check_weight(weight)
        return ReferenceLinear(weight.float().contiguous())

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        """See `Kernels.pack_grouped`."""
        return ReferenceLinear(matrix.dequantize()) if self.float_activations else pack_reference(matrix)

    def pack_coded(self, matrix: CodedMatrix) -> PackedLinear:
        """See `Kernels.pack_coded`."""
        return ReferenceLinear(matrix.dequantize())

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        if isinstance(weight, ReferenceGrouped):
            out = _by_row(lambda row: multiply_grouped(weight, row), x, weight.shape[0])
        elif isinstance(weight, ReferenceLinear):
            out = _by_row(lambda row: _multiply(weight.weight, row), x, weight.shape[0])
        else:
            raise KernelError(f"weights packed by {type(weight).__name__} given to the reference kernels")
        return out if bias is None else out + bias

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear) -> Tensor:
        """See `Kernels.embedding`."""
        if isinstance(table, ReferenceGrouped):
            return table.matrix.rows(token_ids).dequantize()
        if isinstance(table, ReferenceLinear):
            table = table.weight
        if not isinstance(table, Tensor):
            raise KernelError(f"an embedding table packed by {type(table).__name__} given to the reference kernels")
        return table[token_ids].float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
        """See `Kernels.rms_norm`."""
        return _by_row(lambda row: _rms_norm(row - row.mean() if centered else row, weight, eps), x, x.shape[1])

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps, centered)

    def scaled(self, x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
        """See `Kernels.scaled`."""
        return _by_row(lambda row: soft_cap(row * factor, cap) if cap else row * factor, x, x.shape[1])

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels.gated_act`."""
        check_activation(activation)
        size = inner_size(gate_up.shape[1], activation)
        return _by_row(lambda row: GATES[activation](row[:size], row[size:]), gate_up, size)

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
        num_q, num_kv = heads.num_q, heads.num_kv
        for row, position, slot in zip(qkv, positions.tolist(), slots.tolist(), strict=True):
            parts = row.view(num_q + 2 * num_kv, heads.head_dim)
            block, offset = divmod(slot, kv.block_size)
            for index in range(num_q + num_kv):
                head, size = _head_norm(parts[index], q_norm if index < num_q else k_norm, eps), heads.rotary_dim
                turned = rotate_tail(head[:size], rope_table[position], heads.interleaved)
                parts[index] = torch.cat([turned, head[size:]])
            if num_kv == 0:
                continue
            kv.keys[block, :, :, offset] = stored(parts[num_q : num_q + num_kv], kv.key_scales, block, offset, kv)
            kv.values[block, :, offset, :] = stored(parts[num_q + num_kv :], kv.value_scales, block, offset, kv)

    def attention(
        self, qkv: Tensor, heads: HeadLayout, kv: LayerKV, rows: AttentionRows, scale: float, window: int = 0,
        chunk: int = 0, sinks: Tensor | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """See `Kernels.attention`."""
        out = torch.empty(qkv.shape[0], heads.num_q * heads.head_dim)
        for row in range(qkv.shape[0]):
            blocks, offsets = places(rows, row, kv.block_size)  # [L] each
            first = first_counted(len(blocks), window, chunk)
            keys = kv.keys[blocks, :, :, offsets].float()  # [L, G, D]
            values = kv.values[blocks, :, offsets].float()  # [L, G, D]
            query = qkv[row, : heads.num_q * heads.head_dim].clone().view(heads.num_kv, -1, heads.head_dim)
            key_scales, value_scales = (
                torch.ones(keys.shape[:2]) if scales is None else scales[blocks, :, offsets]  # [L, G]
                for scales in (kv.key_scales, kv.value_scales)
            )  # factors of 1 change no bit
            seen = [
                Seen(keys[:, g].contiguous(), values[:, g].contiguous(), key_scales[:, g], value_scales[:, g])
                for g in range(heads.num_kv)
            ]
            own = [None] * heads.num_kv if sinks is None else sinks.view(heads.num_kv, -1, 1)  # [G, Hg, 1]
            mixed = [attend(query[g], seen[g], scale, first, own[g], cap) for g in range(heads.num_kv)]
            out[row] = torch.cat([of_group.view(-1) for of_group in mixed])
        return out

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """See `Kernels.pack_heads`."""
        check_heads(weight)
        return ReferenceHeads(weight.float().contiguous())

    def linear_heads(self, x: Tensor, weight: PackedHeads) -> Tensor:
        """See `Kernels.linear_heads`."""
        if not isinstance(weight, ReferenceHeads):
            raise KernelError(f"heads packed by {type(weight).__name__} given to the reference kernels")
        num_heads, num_outputs, num_inputs = weight.shape
        passed = check_head_width(x.shape[1], weight.shape)

        def multiply(row: Tensor) -> Tensor:
            heads = row.view(num_heads, num_inputs + passed)
            inputs = heads[:, :num_inputs].contiguous()[:, :, None]  # [Q, K, 1]
            return torch.cat([torch.bmm(weight.weight, inputs)[:, :, 0], heads[:, num_inputs:]], dim=1).view(-1)

        return _by_row(multiply, x, num_heads * (num_outputs + passed))

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
        rank = layout.rank
        for row, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
            angles = rope_table[position]
            for head in queries[row].view(layout.num_heads, layout.key_dim):
                head[rank:] = rotate_tail(head[rank:], angles, layout.interleaved)
            latents[row, :rank] = _rms_norm(latents[row, :rank].clone(), norm, eps)
            latents[row, rank:] = rotate_tail(latents[row, rank:], angles, layout.interleaved)
            block, offset = divmod(slot, kv.block_size)
            kv.values[block, 0, offset] = latents[row].to(kv.values.dtype)

    def latent_attention(
        self, queries: Tensor, layout: LatentLayout, kv: LayerKV, rows: AttentionRows, scale: float
    ) -> Tensor:
        """See `Kernels.latent_attention`."""
        out = torch.empty(queries.shape[0], layout.num_heads * layout.rank)
        for row in range(queries.shape[0]):
            blocks, offsets = places(rows, row, kv.block_size)
            keys = kv.values[blocks, 0, offsets].float()  # [L, key_dim]
            query = queries[row].clone().view(layout.num_heads, layout.key_dim)
            ones = torch.ones(len(keys))  # factors of 1 change no bit
            out[row] = attend(query, Seen(keys, keys[:, : layout.rank], ones, ones), scale, 0).view(-1)
        return out

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
        """See `Kernels.route`."""
        check_routing(routing, logits.shape[1])
        return _by_row(lambda row: route_row(row, correction, routing), logits, logits.shape[1])

    def pack_experts(
        self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str,
        biases: ExpertBiases | None = None, scales_inputs: bool = False,
    ) -> PackedExperts:  # fmt: skip
        """See `Kernels.pack_experts`."""
        check_activation(activation)
        return ReferenceExperts(tuple(gate_up), tuple(down), activation, biases, scales_inputs)

    def experts(self, x: Tensor, weights: Tensor, experts: PackedExperts, base: Tensor | None = None) -> Tensor:
        """See `Kernels.experts`."""
        packed = reference_experts(experts)

        def compute(index: int, row: Tensor) -> Tensor:
            inner, outer = (None, None) if packed.biases is None else (added[index] for added in packed.biases)
            gated = self.gated_act(self.linear(row[None], packed.gate_up[index], inner), packed.activation)
            return self.linear(gated, packed.down[index], outer)[0]

        out = torch.zeros_like(x) if base is None else base.clone()
        for row in range(x.shape[0]):
            out[row] = expert_sum(x[row], weights[row], out[row], compute, packed.scales_inputs)
        return out

    def move_rows(self, kvs: list[LayerKV], sources: Tensor, targets: Tensor) -> None:
        """See `Kernels.move_rows`."""
        for kv in kvs:
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                (block, offset), (to_block, to_offset) = divmod(source, kv.block_size), divmod(target, kv.block_size)
                kv.keys[to_block, :, :, to_offset] = kv.keys[block, :, :, offset]
                kv.values[to_block, :, to_offset] = kv.values[block, :, offset]
                for scales in (kv.key_scales, kv.value_scales):
                    if scales is not None:
                        scales[to_block, :, to_offset] = scales[block, :, offset]

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> Tensor:
        """See `Kernels.gumbel_argmax`."""
        return self.gumbel_topk(logits, temperatures, keys, 1)[0][:, 0].contiguous()

    def gumbel_topk(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.gumbel_topk`."""
        ids = torch.full((logits.shape[0], k), -1, dtype=torch.int64)
        scores = torch.full((logits.shape[0], k), -torch.inf, dtype=torch.float64)
        for row in range(logits.shape[0]):
            row_scores = _gumbel_scores(logits[row].numpy(), float(temperatures[row]), keys, row)
            best = np.argsort(-row_scores, kind="stable")[:k]  # stable: ties to the lower id
            best = best[row_scores[best] > -np.inf]
            ids[row, : len(best)] = torch.from_numpy(best)
            scores[row, : len(best)] = torch.from_numpy(row_scores[best])
        return ids, scores

    def gumbel_chances(
        self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, width: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.gumbel_chances`."""
        num_ranks = min(max(width, NUM_RIVALS), logits.shape[1])
        ids, scores = self.gumbel_topk(logits, temperatures, keys, num_ranks)
        chances = rival_log_chances(scores)
        return ids[:, :width], chances.masked_fill(ids < 0, float("-inf"))[:, :width]

    causal_conv, gated_delta, mamba2 = staticmethod(causal_conv), staticmethod(gated_delta), staticmethod(mamba2)
    grow_trees, keep_trees, walk_trees = staticmethod(grow_trees), staticmethod(keep_trees), walk_trees


def check_weight(weight: Tensor) -> None:
    """Refuse what no backend packs."""
    if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
        raise KernelError(f"linear weights are [N, K] of {WEIGHT_DTYPES}, not {list(weight.shape)} of {weight.dtype}")


def check_heads(weight: Tensor) -> None:
    """Refuse what no backend packs."""
    if weight.dim() != 3 or weight.dtype not in WEIGHT_DTYPES:
        raise KernelError(f"weights of heads are [Q, N, K] of {WEIGHT_DTYPES}, not {list(weight.shape)} {weight.dtype}")


def check_head_width(width: int, shape: tuple[int, int, int]) -> int:
    """How many entries of each head are passed on, in rows of `width`."""
    num_heads, _, num_inputs = shape
    size, rest = divmod(width, num_heads)
    if rest or size < num_inputs:
        raise KernelError(f"linear_heads: x has {width} columns for {num_heads} heads of at least {num_inputs}")
    return size - num_inputs


def check_activation(activation: str) -> None:
    """Refuse an unknown activation."""
    if activation not in ACTIVATIONS:
        raise KernelError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    out = torch.empty(x.shape[0], width)
    for row in range(x.shape[0]):
        out[row] = function(x[row].clone())  # a copy, so that alignment is always the allocator's
    return out


def _multiply(weight: Tensor, row: Tensor) -> Tensor:
    """Matrix times vector in chunks of inputs: one long sum of a plain gemv would be several times less exact."""
    starts = range(0, len(row), _CHUNK)
    parts = (torch.mv(weight[:, start : start + _CHUNK], row[start : start + _CHUNK]) for start in starts)
    return functools.reduce(torch.add, parts)


def _rms_norm(row: Tensor, weight: Tensor, eps: float) -> Tensor:
    return row * torch.rsqrt(row.square().mean() + eps) * weight


def _head_norm(head: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return head if weight is None else _rms_norm(head.clone(), weight, eps)


def _gumbel_scores(
    logits: npt.NDArray[np.float32], temperature: float, keys: NoiseKeys, row: int
) -> npt.NDArray[np.float64]:
    """Scores of one row; all -inf for a row that has no answer -> [V] float64."""
    if not np.all(logits < np.inf):  # NaN or +inf
        return np.full(logits.shape, -np.inf)
    scores = logits.astype(np.float64)
    if not temperature > 0.0:
        return scores
    seed = int(keys.seeds[row]) & 0xFFFFFFFFFFFFFFFF
    noise = philox.gumbel(seed, int(keys.positions[row]), int(keys.streams[row]), len(logits))
    with np.errstate(over="ignore"):
        return scores / temperature + noise
