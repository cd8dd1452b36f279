"""From a checkpoint's tensors to recurrent layers.

Knows: which tensors make up such a layer. Does not know: storage formats, files, the rest of a layer.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.kernels.recurrent_ops import DeltaHeads
from forerun.layers.delta import DeltaWeights, GatedDeltaNet, LowRankGates
from forerun.layers.linear import Linear
from forerun.layers.mamba import Mamba2, MambaNorm, MambaWeights
from forerun.layers.recurrent import Recurrent
from forerun.layers.short_conv import ShortConv
from forerun.models.recurrent_dims import ConvDims, DeltaDims, MambaDims, RecurrentDims
from forerun.models.shares import Piece, even, of_things, rows_of, share_delta_heads, whole
from forerun.quant.base import RowPart, Weight
from forerun.quant.joined import JoinedWeight

if TYPE_CHECKING:
    from forerun.models.build import Builder


def recurrent_layer(builder: Builder, dims: RecurrentDims, prefix: str) -> Recurrent:
    """The recurrent part of the layer `prefix`; raises CheckpointError."""
    if isinstance(dims, MambaDims):
        return _mamba(builder, dims, prefix)
    return _short_conv(builder, dims, prefix) if isinstance(dims, ConvDims) else _gated_delta_net(builder, dims, prefix)


def _mamba(builder: Builder, dims: MambaDims, prefix: str) -> Mamba2:
    """Its convolution is stored by c, b and x."""
    names, hidden, heads = builder.family.names.mamba, builder.config.hidden_size, dims.heads
    own, of_keys, of_values = share_delta_heads(builder.ranks, heads)
    values = of_things(of_values, heads.num_values, heads.value_dim)
    keys = of_things(of_keys, heads.num_keys, heads.key_dim)
    made = [values, values, keys, keys, of_things(of_values, heads.num_values, 1)]  # gate, x, b, c, steps
    x, b, c = torch.split(rows_of(made[1:4]), [own.values_size, *[own.num_keys * own.key_dim] * 2])
    order = torch.cat([c, b, x])
    project = [RowPart(f"{prefix}.{names.project}", sum(piece.rows for piece in made))]
    factors = torch.tensor(dims.factors).repeat_interleave(torch.tensor([piece.rows for piece in made]))[rows_of(made)]
    conv = _taps(builder, f"{prefix}.{names.conv}.weight", heads.row_size, dims.taps)[:, order].contiguous()
    norm = _mamba_norm(builder, dims, f"{prefix}.{names.norm}", values)
    out, widths = RowPart(f"{prefix}.{names.out}", hidden), [own.values_size] * builder.ranks.size

    def read(name: str) -> Tensor:
        return builder.vector(f"{prefix}.{name}", heads.num_values)[of_values].clone()

    weights = MambaWeights(
        project=builder.own(project, made, hidden),
        factors=None if set(dims.factors) == {1} else factors.to(builder.kernels.device),
        conv=conv,
        conv_bias=builder.vector(f"{prefix}.{names.conv}.bias", heads.row_size)[order] if dims.conv_bias else None,
        decay=_decay(builder, f"{prefix}.{names.decay}", heads.num_values)[of_values].clone(),
        bias=read(names.bias),
        skip=read(names.skip),
        norm=norm,
        out=builder.gathered([out], heads.values_size, read=() if norm is not None and norm.ranks.size > 1 else widths),
    )
    return Mamba2(builder.kernels, own, weights, dims.out_factor)


def _mamba_norm(builder: Builder, dims: MambaDims, name: str, values: Piece) -> MambaNorm | None:
    if not dims.norm:
        return None
    heads, before, eps = dims.heads, dims.norm == "before_gate", builder.config.norm_eps
    weight, size = builder.vector(name, heads.values_size), heads.values_size // heads.num_keys
    if heads.num_keys % builder.ranks.size:  # ranks have heads of the same group
        return MambaNorm(weight, eps, before, size, builder.ranks)
    return MambaNorm(weight[values.own].clone(), eps, before, size)


def _decay(builder: Builder, name: str, size: int) -> Tensor:
    stored = builder.vector(name, size)
    return -stored.exp() if builder.family.log_decay else stored


def _short_conv(builder: Builder, dims: ConvDims, prefix: str) -> ShortConv:
    names, hidden = builder.family.names.conv, builder.config.hidden_size
    channels = even(builder.ranks, hidden)
    project = builder.own([RowPart(f"{prefix}.{names.project}", 3 * hidden)], [channels] * 3, hidden)
    out = builder.gathered([RowPart(f"{prefix}.{names.out}", hidden)], hidden, read=builder.ranks.shares(hidden))
    taps = _taps(builder, f"{prefix}.{names.conv}", hidden, dims.taps)[:, channels.own].contiguous()
    return ShortConv(builder.kernels, project, taps, out)


def _taps(builder: Builder, name: str, channels: int, taps: int) -> Tensor:
    """The weights of a convolution -> [taps, channels] float32."""
    stored = builder.source.tensor(name, (channels, 1, taps)).float()
    return stored[:, 0].T.contiguous().to(builder.kernels.device)


def _gated_delta_net(builder: Builder, dims: DeltaDims, prefix: str) -> GatedDeltaNet:
    """The gated delta net of the layer `prefix`."""
    names, hidden, heads, ranks = builder.family.names.delta, builder.config.hidden_size, dims.heads, builder.ranks
    own, of_keys, of_values = share_delta_heads(ranks, heads)
    is_tiled = names.is_tiled and heads.num_keys != heads.num_values
    rows = _delta_rows(dims, len(names.project))
    parts = [RowPart(f"{prefix}.{name}", count) for name, count in zip(names.project, rows, strict=True)]
    keys = of_things(of_keys, heads.num_keys, heads.key_dim)
    qkv = [keys, keys, of_things(of_values, heads.num_values, heads.value_dim)]
    row_ids, columns = _delta_places(dims, qkv, of_values, is_fused=len(names.project) == 2)
    per_head = dims.num_decays // heads.num_values
    decays = of_things(of_values, heads.num_values, per_head)
    decay = _decay(builder, f"{prefix}.{names.decay}", heads.num_values)[of_values]
    tiles = _tiles(heads).to(builder.kernels.device) if is_tiled else None
    widths = [count * heads.value_dim for count in ranks.shares(heads.num_values)]
    out = [RowPart(f"{prefix}.{names.out}", hidden)]
    weights = DeltaWeights(
        project=_by_formats(builder, parts, hidden, None if ranks.size == 1 else row_ids),
        columns=None if columns is None else columns.to(builder.kernels.device),
        conv=_joined_taps(builder, dims, prefix)[:, rows_of(qkv)].contiguous(),
        decay=decay.repeat_interleave(per_head),
        bias=builder.vector(f"{prefix}.{names.bias}", dims.num_decays)[decays.own].clone(),
        norm=builder.vector(f"{prefix}.{names.norm}", heads.value_dim),
        out=builder.gathered(out, heads.values_size, read=widths, order=tiles),
        order=tiles if ranks.size == 1 else None,  # `out` reads the values of all ranks in this order
        low_rank=_low_rank_gates(builder, dims, prefix, qkv[2], decays) if dims.gate_rank else None,
        activation="sigmoid" if dims.gate_rank else "silu",
    )
    return GatedDeltaNet(builder.kernels, own, weights, builder.config.norm_eps)


def _delta_places(
    dims: DeltaDims, qkv: list[Piece], of_values: slice, is_fused: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """This rank's rows of the projection, ascending, and where among them what the layer reads is; None: in order.

    is_fused: each head of keys has its own rows together.
    """
    num, rank = dims.heads.num_values, dims.gate_rank
    gates = of_things(of_values, num, 1)
    if rank:
        return rows_of([*qkv, whole(rank), gates, whole(rank)]), None
    row_ids = rows_of([*qkv, qkv[2], gates, gates])
    if not is_fused:
        return row_ids, None
    stored = _delta_columns(dims.heads)[row_ids]
    order = stored.argsort()
    return stored[order], order.argsort()


def _delta_rows(dims: DeltaDims, num_modules: int) -> tuple[int, ...]:
    """Rows of the modules that `names.delta.project` has so many of."""
    heads, rank = dims.heads, dims.gate_rank
    if rank:
        keys = heads.num_keys * heads.key_dim
        return keys, keys, heads.values_size, rank, heads.num_values, rank
    sizes = heads.row_size, heads.values_size, heads.num_values, heads.num_values
    return {2: (sum(sizes[:2]), sum(sizes[2:])), 3: (*sizes[:2], sum(sizes[2:])), 4: sizes}[num_modules]


def _joined_taps(builder: Builder, dims: DeltaDims, prefix: str) -> Tensor:
    """The weights of the convolution, of queries, keys and values together or of each -> [taps, row_size] float32."""
    names, heads = builder.family.names.delta.conv, dims.heads
    keys = heads.num_keys * heads.key_dim
    channels = (heads.row_size,) if len(names) == 1 else (keys, keys, heads.values_size)
    parts = zip(names, channels, strict=True)
    return torch.cat([_taps(builder, f"{prefix}.{name}", size, dims.taps) for name, size in parts], dim=1)


def _low_rank_gates(
    builder: Builder, dims: DeltaDims, prefix: str, values: Piece, decays: Piece
) -> LowRankGates:  # fmt: skip
    names, rank = builder.family.names.delta, dims.gate_rank
    gate = builder.own([RowPart(f"{prefix}.{names.gate}", values.rows)], [values], rank)
    return LowRankGates(gate, builder.own([RowPart(f"{prefix}.{names.forget}", decays.rows)], [decays], rank))


def _by_formats(builder: Builder, parts: list[RowPart], columns: int, row_ids: Tensor | None) -> Linear:
    """The modules as one matrix; quantized checkpoints leave b and a as they were. row_ids: as of `Builder.linear`."""
    groups = [list(group) for _, group in groupby(parts, lambda part: builder.format_of(part).name)]
    weights, first = list[Weight](), 0
    for group in groups:
        end = first + sum(part.rows for part in group)
        own = None if row_ids is None else row_ids[(row_ids >= first) & (row_ids < end)] - first
        weights.append(builder.linear(group, columns, row_ids=own).weight)
        first = end
    joined = weights[0] if len(weights) == 1 else JoinedWeight(weights)
    return Linear(joined, modules=parts, row_ids=row_ids)


def _tiles(heads: DeltaHeads) -> Tensor:
    """Values in the order that the first head of every head of keys comes first -> [values_size] int64."""
    values = torch.arange(heads.values_size).view(heads.num_keys, -1, heads.value_dim)
    return values.transpose(0, 1).flatten()


def _delta_columns(heads: DeltaHeads) -> Tensor:
    """Where queries, keys, values, gate, b and a are where each head of keys has its own, b and a behind the others."""
    share = heads.num_values // heads.num_keys
    sizes = [heads.key_dim, heads.key_dim, share * heads.value_dim, share * heads.value_dim]
    wide = torch.arange(heads.num_keys * sum(sizes)).view(heads.num_keys, -1)
    narrow = torch.arange(2 * heads.num_values).view(heads.num_keys, -1) + wide.numel()
    pieces = (*torch.split(wide, sizes, dim=1), *torch.split(narrow, share, dim=1))
    return torch.cat([piece.flatten() for piece in pieces])
