"""From a checkpoint's tensors to the blocks that only some families have: experts, latent attention.

Knows: which tensors make up such a block. Does not know: storage formats, files, the rest of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.kernels.ops import Routing
from forerun.kernels.reference import ReferenceKernels
from forerun.layers.linear import HeadLinear, Linear
from forerun.layers.mla import LatentAttention, LatentShape, LatentWeights, LowRank
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import ExpertsBesideDense, LatentSpace, MixtureOfExperts, NormsBesideDense, SharedExpert
from forerun.layers.norm import RMSNorm
from forerun.layers.per_layer import PerLayerBlock, PerLayerInputs
from forerun.layers.rotary import RopeSpec, rope_table
from forerun.models.blocks import ExpertsShape, LatentDims, LayerShape, PerLayerSizes
from forerun.models.shares import even, rows_of
from forerun.quant.base import RowPart
from forerun.quant.dense import DenseFormat
from forerun.quant.gguf import GgufFormat, read_floats
from forerun.quant.rows import only_rows, packs_part
from forerun.quant.stacked import is_stacked, read_stacked

if TYPE_CHECKING:
    from forerun.models.build import Builder

LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, whatever config.json says of the others (transformers)
ONE_GATED = Routing(num_experts=1, top_k=1, sigmoid=True, normalize=False)  # a lone expert weighed by a sigmoid


def mixture_of_experts(builder: Builder, shape: ExpertsShape, prefix: str, layer: LayerShape) -> MixtureOfExperts:
    """The feed-forward part of the layer `prefix`, which is of the shape `layer`; raises CheckpointError."""
    names, routing = builder.family.names.experts, shape.routing
    part = RowPart(f"{prefix}.{names.router}", routing.num_experts)
    router = builder.linear([part], builder.config.hidden_size, shape.biases)
    stacked = is_stacked(builder.source, f"{prefix}.{names.stacked}.{names.stacked_down}")
    read_experts = _stacked_experts if stacked else _single_experts
    experts = read_experts(_of_experts(builder), shape, prefix, layer.experts_bound)
    correction = f"{prefix}.{names.correction}"
    return MixtureOfExperts(
        builder.kernels,
        routing,
        router,
        experts,
        builder.vector(correction, routing.num_experts) if shape.correction else None,
        _shared_expert(builder, shape, prefix, layer.bound),
        shape.scales_inputs,
        _factors(builder, shape, prefix),
        shape.num_zero,
        _latent_space(builder, shape, prefix),
        builder.ranks,
    )


def _of_experts(builder: Builder) -> Builder:
    """For matrices of experts: multiplied one by one, as several ranks do, they give what all give together."""
    return replace(builder, kernels=packs_part(builder.kernels, None))


def experts_beside_dense(
    builder: Builder, shape: ExpertsShape, prefix: str, dense: GatedMLP, layer: LayerShape
) -> ExpertsBesideDense:  # fmt: skip
    """The feed-forward part of a layer with experts and a dense part; raises CheckpointError."""
    names, size = builder.family.names, builder.config.hidden_size
    own = names.experts
    scale = builder.vector(f"{prefix}.{own.router_scale}", size) * size**-0.5
    norms = NormsBesideDense(
        before_dense=builder.norm(f"{prefix}.{names.mlp_norm}", size),
        after_dense=builder.norm(f"{prefix}.{own.after_dense}", size),
        router=RMSNorm(builder.kernels, scale, builder.config.norm_eps),
        before_experts=builder.norm(f"{prefix}.{own.before}", size),
        after_experts=builder.norm(f"{prefix}.{own.after}", size),
    )
    return ExpertsBesideDense(dense, mixture_of_experts(builder, shape, prefix, layer), norms)


def _factors(builder: Builder, shape: ExpertsShape, prefix: str) -> Tensor | None:
    """What each expert's weights are multiplied by [E], if anything."""
    if not shape.beside_dense:
        return None
    return builder.vector(f"{prefix}.{builder.family.names.experts.factors}", shape.routing.num_experts)


def _latent_space(builder: Builder, shape: ExpertsShape, prefix: str) -> LatentSpace | None:
    """The way into the space of another size that experts compute in, and out of it, if there is one."""
    names, size, hidden = builder.family.names.experts, shape.latent_size, builder.config.hidden_size
    if not size:
        return None
    down = builder.linear([RowPart(f"{prefix}.{names.latent_down}", size)], hidden)
    return LatentSpace(down, builder.linear([RowPart(f"{prefix}.{names.latent_up}", hidden)], size))


def _single_experts(builder: Builder, shape: ExpertsShape, prefix: str, bound: int) -> list[GatedMLP]:
    """Experts with tensors of their own."""
    names = builder.family.names.experts
    modules = (f"{prefix}.{names.expert.format(index=index)}" for index in range(shape.num_real))
    sizes = shape.ffn_size, shape.biases, bound, shape.latent_size
    return [builder.gated_mlp(module, names.gate_up, names.down, *sizes, gathers=False) for module in modules]


def _stacked_experts(builder: Builder, shape: ExpertsShape, prefix: str, bound: int) -> list[GatedMLP]:
    """Experts whose matrices are parts of two or three tensors, which every rank reads whole."""
    ranks = builder.ranks
    names, ffn, width = builder.family.names.experts, shape.ffn_size, shape.latent_size or builder.config.hidden_size
    gates = torch.arange(0, 2 * ffn, 2)
    order = torch.cat([gates, gates + 1]) if names.is_interleaved else None  # [2F]

    def read(parts: tuple[str, ...], counts: list[int], columns: int, order: Tensor | None) -> list[Linear]:
        modules, rows = [f"{prefix}.{names.stacked}.{name}" for name in parts], sum(counts)
        own = rows_of([even(ranks, count) for count in counts])
        kernels = builder.kernels if ranks.size == 1 else only_rows(builder.kernels, own, rows)
        sizes = (shape.num_real, rows, columns)
        weights = read_stacked(builder.source, modules, sizes, kernels, builder.dtype, order, names.is_transposed)
        if not shape.biases:
            return [Linear(weight) for weight in weights]
        chosen = own if order is None else order[own]
        biases = _stacked_biases(builder, f"{modules[0]}_bias", sizes[:2], chosen)
        return [Linear(*pair) for pair in zip(weights, biases, strict=True)]

    inner = read(names.stacked_gate_up, [ffn] * (1 + shape.has_gate), width, order)
    pairs = zip(inner, read((names.stacked_down,), [width], ffn, None), strict=True)
    return [GatedMLP(builder.kernels, *pair, builder.activation(bound)) for pair in pairs]


def _stacked_biases(
    builder: Builder, name: str, shape: tuple[int, int], chosen: Tensor
) -> Sequence[Tensor]:  # fmt: skip
    """The entries `chosen` of each row of the tensor `name` [E, N]."""
    return builder.source.tensor(name, shape).float()[:, chosen].to(builder.kernels.device).contiguous().unbind()


def _shared_expert(builder: Builder, shape: ExpertsShape, prefix: str, bound: int) -> SharedExpert | None:
    """The expert of every row; where it is gated, it is a mixture of one."""
    if not shape.shared_size:
        return None
    names = builder.family.names.experts
    inner = names.shared_gate_up or names.gate_up, names.shared_down or names.down
    gathers = not shape.shared_gate
    reader = builder if gathers else _of_experts(builder)
    expert = reader.gated_mlp(f"{prefix}.{names.shared}", *inner, shape.shared_size, bound=bound, gathers=gathers)
    if gathers:
        return expert
    gate = builder.linear([RowPart(f"{prefix}.{names.shared_gate}", 1)], builder.config.hidden_size)
    return MixtureOfExperts(builder.kernels, ONE_GATED, gate, [expert], ranks=builder.ranks)


def per_layer_inputs(builder: Builder, sizes: PerLayerSizes) -> PerLayerInputs:
    """What gives every layer its part of each token; raises CheckpointError.

    The two addends of a part are each divided by sqrt(2) where they are made. The projection is divided by
    sqrt(hidden_size) before its norm, which is the same as a larger epsilon.
    """
    config, names = builder.config, builder.family.names.per_layer
    num_layers, half = config.num_layers, 0.5**0.5
    columns = num_layers * sizes.size
    weight = builder.vector(f"{names.norm}.weight", sizes.size) * half
    return PerLayerInputs(
        table=builder.table(names.table, (sizes.vocab_size, columns), config.scales.per_layer * half),
        projection=builder.linear([RowPart(names.projection, columns)], config.hidden_size),
        norm=RMSNorm(builder.kernels, weight, config.norm_eps * config.hidden_size),
        num_layers=num_layers,
    )


def per_layer_block(builder: Builder, sizes: PerLayerSizes, index: int, prefix: str) -> PerLayerBlock:
    """How the layer `prefix` takes its part in; raises CheckpointError."""
    config, names = builder.config, builder.family.names.per_layer
    gate = builder.linear([RowPart(f"{prefix}.{names.gate}", sizes.size)], config.hidden_size)
    out = builder.linear([RowPart(f"{prefix}.{names.out}", config.hidden_size)], sizes.size)
    norm = builder.norm(f"{prefix}.{names.after}", config.hidden_size)
    return PerLayerBlock(builder.kernels, index, gate, out, norm, config.activation)


def latent_attention(builder: Builder, dims: LatentDims, prefix: str, rope: Tensor) -> LatentAttention:
    """The attention of the layer `prefix` in absorbed form; rope [P, rope_dim], or [P, 0]. Raises CheckpointError."""
    config, names = builder.config, builder.family.names
    rope = rope if rope.shape[1] else rope_table(RopeSpec(rotary_dim=dims.rope_dim), 1).to(rope.device)
    num_heads, hidden, ranks = config.heads.num_q, config.hidden_size, builder.ranks
    own, counts = ranks.share(num_heads), ranks.shares(num_heads)
    shape = LatentShape(dims.layout(counts[ranks.rank]), config.attention_scale, LATENT_NORM_EPS)
    down = RowPart(f"{prefix}.{names.latents.down}", dims.rank + dims.rope_dim)
    out = RowPart(f"{prefix}.{names.out}", hidden)
    absorb, expand = (heads[own] for heads in _head_matrices(builder, dims, prefix))
    values = [count * dims.value_dim for count in counts]
    weights = LatentWeights(
        query=_query(builder, dims, prefix),
        down=builder.linear([down], hidden, config.biases.qkv),
        norm=builder.vector(f"{prefix}.{names.latents.norm}.weight", dims.rank) * dims.scale,
        absorb=HeadLinear(builder.kernels, absorb),
        expand=HeadLinear(builder.kernels, expand),
        out=builder.gathered([out], sum(values), config.biases.out, values),
    )
    return LatentAttention(builder.kernels, shape, weights, rope)


def _query(builder: Builder, dims: LatentDims, prefix: str) -> Linear | LowRank:
    config, names = builder.config, builder.family.names.latents
    num_heads, hidden, rank = config.heads.num_q, config.hidden_size, dims.query_rank
    piece = even(builder.ranks, num_heads, dims.nope_dim + dims.rope_dim)
    if not rank:
        return builder.own([RowPart(f"{prefix}.{names.query}", piece.rows)], [piece], hidden)
    norm = builder.vector(f"{prefix}.{names.query_norm}.weight", rank) * dims.query_scale
    return LowRank(
        builder.linear([RowPart(f"{prefix}.{names.query_down}", rank)], hidden, config.biases.qkv),
        RMSNorm(builder.kernels, norm, LATENT_NORM_EPS),
        builder.own([RowPart(f"{prefix}.{names.query_up}", piece.rows)], [piece], rank),
    )


def _head_matrices(builder: Builder, dims: LatentDims, prefix: str) -> tuple[Tensor, Tensor]:
    """The matrices into the latent space, for queries [Q, rank, nope], and out of it [Q, value, rank]."""
    names, num_heads, rank = builder.family.names.latents, builder.config.heads.num_q, dims.rank
    apart = f"{prefix}.{names.up_keys}", f"{prefix}.{names.up_values}"
    if builder.choose_format(builder.source, apart[0]) is not None:
        keys = _floats(builder, RowPart(apart[0], num_heads * rank), dims.nope_dim)
        values = _floats(builder, RowPart(apart[1], num_heads * dims.value_dim), rank)
        return keys.view(num_heads, rank, -1), values.view(num_heads, -1, rank)
    rows = num_heads * (dims.nope_dim + dims.value_dim)
    joined = _floats(builder, RowPart(f"{prefix}.{names.up}", rows), rank)
    heads = joined.view(num_heads, -1, rank)  # [Q, nope + value, rank]
    return heads[:, : dims.nope_dim].transpose(1, 2), heads[:, dims.nope_dim :]


def _floats(builder: Builder, part: RowPart, columns: int) -> Tensor:
    """The matrix a module stands for -> [rows, columns], as stored or, from integers, float32.

    One of its parts is used transposed, where integers with scales along the rows cannot be kept as they are.
    """
    form = builder.format_of(part)
    if isinstance(form, DenseFormat | GgufFormat):
        return read_floats(builder.source, f"{part.prefix}.weight", (part.rows, columns), builder.dtype)
    weight: Tensor = form.read(builder.source, [part], columns, ReferenceKernels(), torch.float32).dequantize()
    return weight
