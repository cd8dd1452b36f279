"""From a checkpoint's tensors to recurrent layers.

Knows: which tensors make up such a layer. Does not know: storage formats, files, the rest of a layer.
"""

from __future__ import annotations

from functools import partial
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
from forerun.quant.base import RowPart
from forerun.quant.joined import JoinedWeight

if TYPE_CHECKING:
    from forerun.models.build import Builder


def recurrent_layer(builder: Builder, dims: RecurrentDims, prefix: str) -> Recurrent:
    """The recurrent part of the layer `prefix`; raises CheckpointError."""
    if isinstance(dims, MambaDims):
        return _mamba(builder, dims, prefix)
    return _short_conv(builder, dims, prefix) if isinstance(dims, ConvDims) else _gated_delta_net(builder, dims, prefix)


def _mamba(builder: Builder, dims: MambaDims, prefix: str) -> Mamba2:
    names, hidden, heads = builder.family.names.mamba, builder.config.hidden_size, dims.heads
    size, keys, num = heads.values_size, heads.num_keys * heads.key_dim, heads.num_values
    x, b, c = torch.split(torch.arange(heads.row_size), [size, keys, keys])
    order = torch.cat([c, b, x])
    project = RowPart(f"{prefix}.{names.project}", size + heads.row_size + num)
    factors = torch.tensor(dims.factors).repeat_interleave(torch.tensor([size, size, keys, keys, num]))
    conv = _taps(builder, f"{prefix}.{names.conv}.weight", heads.row_size, dims.taps)[:, order].contiguous()
    read = partial(builder.vector, size=num)
    weights = MambaWeights(
        project=builder.linear([project], hidden),
        factors=None if set(dims.factors) == {1} else factors.to(builder.kernels.device),
        conv=conv,
        conv_bias=builder.vector(f"{prefix}.{names.conv}.bias", heads.row_size)[order] if dims.conv_bias else None,
        decay=_decay(builder, f"{prefix}.{names.decay}", num),
        bias=read(f"{prefix}.{names.bias}"),
        skip=read(f"{prefix}.{names.skip}"),
        norm=_mamba_norm(builder, dims, f"{prefix}.{names.norm}"),
        out=builder.linear([RowPart(f"{prefix}.{names.out}", hidden)], size),
    )
    return Mamba2(builder.kernels, heads, weights, dims.out_factor)


def _mamba_norm(builder: Builder, dims: MambaDims, name: str) -> MambaNorm | None:
    if not dims.norm:
        return None
    weight = builder.vector(name, dims.heads.values_size)
    return MambaNorm(weight, builder.config.norm_eps, dims.norm == "before_gate")


def _decay(builder: Builder, name: str, size: int) -> Tensor:
    stored = builder.vector(name, size)
    return -stored.exp() if builder.family.log_decay else stored


def _short_conv(builder: Builder, dims: ConvDims, prefix: str) -> ShortConv:
    names, hidden = builder.family.names.conv, builder.config.hidden_size
    project = builder.linear([RowPart(f"{prefix}.{names.project}", 3 * hidden)], hidden)
    out = builder.linear([RowPart(f"{prefix}.{names.out}", hidden)], hidden)
    return ShortConv(builder.kernels, project, _taps(builder, f"{prefix}.{names.conv}", hidden, dims.taps), out)


def _taps(builder: Builder, name: str, channels: int, taps: int) -> Tensor:
    """The weights of a convolution -> [taps, channels] float32."""
    stored = builder.source.tensor(name, (channels, 1, taps)).float()
    return stored[:, 0].T.contiguous().to(builder.kernels.device)


def _gated_delta_net(builder: Builder, dims: DeltaDims, prefix: str) -> GatedDeltaNet:
    """The gated delta net of the layer `prefix`."""
    names, hidden, heads = builder.family.names.delta, builder.config.hidden_size, dims.heads
    is_fused = len(names.project) == 2  # by heads of keys
    is_tiled = names.is_tiled and heads.num_keys != heads.num_values
    rows = _delta_rows(dims, len(names.project))
    parts = [RowPart(f"{prefix}.{name}", count) for name, count in zip(names.project, rows, strict=True)]
    decay = _decay(builder, f"{prefix}.{names.decay}", heads.num_values)
    weights = DeltaWeights(
        project=_by_formats(builder, parts, hidden),
        columns=_delta_columns(heads).to(builder.kernels.device) if is_fused else None,
        conv=_joined_taps(builder, dims, prefix),
        decay=decay.repeat_interleave(dims.num_decays // heads.num_values),
        bias=builder.vector(f"{prefix}.{names.bias}", dims.num_decays),
        norm=builder.vector(f"{prefix}.{names.norm}", heads.value_dim),
        out=builder.linear([RowPart(f"{prefix}.{names.out}", hidden)], heads.values_size),
        order=_tiles(heads).to(builder.kernels.device) if is_tiled else None,
        low_rank=_low_rank_gates(builder, dims, prefix) if dims.gate_rank else None,
        activation="sigmoid" if dims.gate_rank else "silu",
    )
    return GatedDeltaNet(builder.kernels, heads, weights, builder.config.norm_eps)


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


def _low_rank_gates(builder: Builder, dims: DeltaDims, prefix: str) -> LowRankGates:
    names, rank = builder.family.names.delta, dims.gate_rank
    gate = builder.linear([RowPart(f"{prefix}.{names.gate}", dims.heads.values_size)], rank)
    return LowRankGates(gate, builder.linear([RowPart(f"{prefix}.{names.forget}", dims.num_decays)], rank))


def _by_formats(builder: Builder, parts: list[RowPart], columns: int) -> Linear:
    """The modules as one matrix; quantized checkpoints leave b and a as they were."""
    groups = groupby(parts, lambda part: builder.format_of(part).name)
    weights = [builder.linear(list(group), columns).weight for _, group in groups]
    return Linear(weights[0] if len(weights) == 1 else JoinedWeight(weights), modules=parts)


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
