"""From a checkpoint's tensors to a decoder.

Knows: which tensors a family has, that q, k, v (and gate, up) become one matrix. Does not know: storage formats
(quant.formats picks one by the tensors that exist), files, or memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.kernels.ops import SQUARED_RELU, HeadLayout, Kernels
from forerun.kernels.ranks import ALONE, Ranks
from forerun.layers.attention import Attention, AttentionShape, HeadNorms, NarrowValues, NormedProjections, NormedValues
from forerun.layers.embedding import Embedding, TableEmbedding
from forerun.layers.linear import GatheredLinear, Linear
from forerun.layers.mla import LatentAttention
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm
from forerun.layers.recurrent import Recurrent
from forerun.layers.rotary import RopeSpec, rope_table
from forerun.layers.scaled import Scaled
from forerun.models.blocks import LayerShape
from forerun.models.build_blocks import (
    experts_beside_dense,
    latent_attention,
    mixture_of_experts,
    per_layer_block,
    per_layer_inputs,
)
from forerun.models.build_recurrent import recurrent_layer
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, DecoderLayer, DecoderParts, FeedForward
from forerun.models.family import Family, same_names
from forerun.models.shares import HeadShare, Piece, even, of_things, rows_of, share_heads
from forerun.models.stages import MatrixElsewhere, PipelineStage, decoder_of
from forerun.models.storage import cache_dtype
from forerun.quant.base import RowPart, TensorSource, Weight, WeightFormat
from forerun.quant.dense import DenseWeight
from forerun.quant.formats import find_format
from forerun.quant.gguf import keeps_blocks, read_floats
from forerun.quant.joined import JoinedWeight
from forerun.quant.rows import read_rows, split_rows

# Suffixes of tensors that change nothing here; activations are not rounded to FP8 or FP4, nor are keys and values.
INERT_TENSORS = (
    ".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".masked_bias", ".input_scale",
    ".input_scale_ub", ".activation_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale",
)  # fmt: skip
Progress = Callable[[int, int], None]  # (layers done, layers in all)


@dataclass(frozen=True, slots=True)
class Builder:
    """What every piece of a model is read with."""

    config: ModelConfig
    family: Family
    source: TensorSource
    kernels: Kernels
    dtype: torch.dtype | None  # None: as stored
    max_position: int
    choose_format: Callable[[TensorSource, str], WeightFormat | None] = find_format
    ranks: Ranks = ALONE  # who share the model; this one's rows are read
    stage: PipelineStage | None = None  # which layers; None: all

    def decoder(self, progress: Progress | None = None) -> Decoder:
        """Read everything; raises CheckpointError for missing or misshapen tensors."""
        per_layer = None if self.config.per_layer is None else per_layer_inputs(self, self.config.per_layer)
        parts = replace(self._ends(), layers=self._layers(progress), per_layer=per_layer)
        return decoder_of(parts, self.config, self.stage, self.max_position, self._kv_dtype(parts))

    def ends(self) -> Decoder:
        """The model without its layers: embedding, final norm and output layer, which draft heads read."""
        parts = self._ends()
        return decoder_of(parts, self.config, None, self.max_position, self._kv_dtype(parts))

    def _ends(self) -> DecoderParts:
        head = self._lm_head()
        return DecoderParts(
            embedding=self._embedding(head),
            layers=(),
            final_norm=self.norm(self.family.names.final_norm, self.config.hidden_size),
            lm_head=head,
            tie_embeddings=self.config.tie_embeddings,
            after_head=self._scale(self.config.scales.logits, self.config.scales.logits_cap),
        )

    def layer(self, index: int, rope: Tensor | None = None, source: Attention | None = None) -> DecoderLayer:
        """Read one layer. It may be one after the last: that is where checkpoints keep their MTP modules.

        rope: the table [P, rotary_dim] of another layer to share; None makes one. source: whose keys and values it
        reads; None: it has its own. Raises CheckpointError.
        """
        return self._layer_with(index, self._table(self.config.rope_of(index)) if rope is None else rope, source)

    def rope_table(self) -> Tensor:
        """The rotations of all positions, of layers without a window -> [P, rotary_dim]."""
        return self._table(self.config.rope)

    def _table(self, rope: RopeSpec) -> Tensor:
        return rope_table(rope, self.max_position).to(self.kernels.device)  # [P, rotary_dim]

    def _layers(self, progress: Progress | None) -> tuple[DecoderLayer, ...]:
        tables = {rope: self._table(rope) for rope in set(self.config.layer_ropes)}  # shared by layers
        first, end = (0, self.config.num_layers) if self.stage is None else (self.stage.first, self.stage.end)
        layers = list[DecoderLayer]()
        for index in range(first, end):
            kv_layer = self.config.shape(index).kv_layer
            source = None if kv_layer is None else layers[kv_layer - first].attending
            layers.append(self._layer_with(index, tables[self.config.rope_of(index)], source))
            if progress is not None:
                progress(len(layers), end - first)
        return tuple(layers)

    def _layer_with(self, index: int, rope: Tensor, source: Attention | LatentAttention | None = None) -> DecoderLayer:
        names, per_layer = self.family.names_of(self.family.names, index), self.config.per_layer
        if names is not self.family.names:
            own = replace(self.family, names=names, names_of=same_names)
            return replace(self, family=own)._layer_with(index, rope, source)
        prefix = names.layer.format(index=index)
        scales, experts = self.config.scales, self.config.experts
        norms_inside = experts is not None and experts.beside_dense
        return DecoderLayer(
            attention_norm=self._layer_norm(prefix, names.attention_norm),
            attention=self._attention(index, prefix, rope, source) if self.config.has_mixer(index) else None,
            mlp_norm=None if norms_inside else self._layer_norm(prefix, names.mlp_norm),
            mlp=self._feed_forward(index, prefix) if self.config.has_mlp(index) else None,
            after_attention=self._layer_norm(prefix, names.after_attention) or self._scale(scales.of_attention),
            after_mlp=self._layer_norm(prefix, names.after_mlp) or self._scale(scales.of_mlp),
            parallel=self.family.parallel,
            beside=self._beside(index, prefix),
            per_layer=None if per_layer is None else per_layer_block(self, per_layer, index, prefix),
            shortcut=self._shortcut(index, prefix),
            at_end=self._scale(float(self.vector(f"{prefix}.{names.scale}", 1))) if names.scale else None,
        )

    def _layer_norm(self, prefix: str, name: str) -> RMSNorm | None:
        return self.norm(f"{prefix}.{name}", self.config.hidden_size) if name else None

    def _scale(self, factor: float, cap: float = 0.0) -> Scaled | None:
        return None if (factor, cap) == (1, 0) else Scaled(self.kernels, factor, cap)

    def _attention(
        self, index: int, prefix: str, rope: Tensor, source: Attention | LatentAttention | None
    ) -> Attention | LatentAttention | Recurrent:  # fmt: skip
        config, names = self.config, self.family.names
        if config.recurrent is not None and config.is_recurrent(index):
            return recurrent_layer(self, config.recurrent, prefix)
        if self.config.latents is not None:
            return latent_attention(self, self.config.latents, prefix, rope)
        own, hidden, ranks = config.shape(index), config.hidden_size, self.ranks
        share, num_q = share_heads(ranks, own.heads), own.heads.num_q
        heads, width = share.heads._replace(rotary_dim=rope.shape[1]), own.value_dim or own.heads.head_dim
        limits = config.window(index), config.norm_eps, config.chunk(index), config.scales.attention_cap
        shape = AttentionShape(heads, config.attention_scale, *limits, config.gated_attention, own.value_dim)
        parts = module_parts(prefix, (names.out,), (hidden,))
        out = self.gathered(parts, num_q * width, config.biases.out, [n * width for n in ranks.shares(num_q)])
        sinks = self.vector(f"{prefix}.{names.sinks}", num_q)[share.queries].clone() if own.has_sinks else None
        norms = self._head_norms(prefix, rope, heads.head_dim, source is None)
        rows = of_things(share.queries, num_q, 1)
        gate = self._part(prefix, names.head_gate, rows, has_bias=False) if config.head_gates else None
        qkv = self._qkv(prefix, own, share, shape, source is None)
        assert source is None or isinstance(source, Attention)
        return Attention(self.kernels, shape, qkv, out, rope, norms, sinks, source, gate)

    def _qkv(
        self, prefix: str, own: LayerShape, share: HeadShare, shape: AttentionShape, has_keys: bool
    ) -> Linear | NormedProjections | NormedValues | NarrowValues:  # fmt: skip
        """What makes queries, and keys and values unless these are another layer's."""
        config, names, heads = self.config, self.family.names, own.heads
        keys = of_things(share.keys, heads.num_kv, heads.head_dim)
        values = of_things(share.keys, heads.num_kv, own.value_dim or heads.head_dim)
        rows = (of_things(share.queries, heads.num_q, heads.head_dim * (1 + shape.gated)), keys, values)
        if not has_keys:
            return self._part(prefix, names.qkv[0], rows[0])
        if config.value_norms:
            return self._normed_values(prefix, shape.heads, rows, own.keys_are_values)
        if config.qk_norm == "row":
            return self._normed_projections(prefix, rows)
        if own.value_dim:
            query, key, value = (self._part(prefix, *part) for part in zip(names.qkv, rows, strict=True))
            return NarrowValues(query, key, value, shape, self.kernels.device)
        parts = module_parts(prefix, names.qkv, tuple(piece.rows for piece in rows))
        return self.own(parts, rows, config.hidden_size, config.biases.qkv)

    def _part(self, prefix: str, name: str, piece: Piece, has_bias: bool | None = None) -> Linear:
        biased = self.config.biases.qkv if has_bias is None else has_bias
        return self.own([RowPart(f"{prefix}.{name}", piece.rows)], [piece], self.config.hidden_size, biased)

    def _normed_values(
        self, prefix: str, heads: HeadLayout, rows: tuple[Piece, ...], keys_are_values: bool
    ) -> NormedValues:  # fmt: skip
        query, key, value = zip(self.family.names.qkv, rows, strict=True)
        norm = RMSNorm(self.kernels, torch.ones(heads.head_dim, device=self.kernels.device), self.config.norm_eps)
        own = None if keys_are_values else self._part(prefix, *value)
        return NormedValues(self._part(prefix, *query), self._part(prefix, *key), own, norm, heads.num_kv)

    def _beside(self, index: int, prefix: str) -> Recurrent | None:
        dims = self.config.recurrent if self.config.has_beside(index) else None
        return None if dims is None else recurrent_layer(self, dims, prefix)

    def _normed_projections(self, prefix: str, rows: tuple[Piece, ...]) -> NormedProjections:
        """Norms are over the heads of all ranks, so what makes queries and keys gives those of all."""
        names, config, (queries, keys, values) = self.family.names, self.config, rows
        parts = [RowPart(f"{prefix}.{name}", piece.rows) for name, piece in zip(names.qkv, rows, strict=True)]
        query, key = (self.gathered([part], config.hidden_size, config.biases.qkv) for part in parts[:2])
        value = self._part(prefix, names.qkv[2], values)
        query_norm = self.norm(f"{prefix}.{names.query_norm}", queries.rows)
        key_norm = self.norm(f"{prefix}.{names.key_norm}", keys.rows)
        own = (queries.own, keys.own) if self.ranks.size > 1 else None
        return NormedProjections(query, key, value, query_norm, key_norm, own)

    def _head_norms(self, prefix: str, rope: Tensor, head_dim: int, has_keys: bool) -> HeadNorms | None:
        if self.config.qk_norm == "unit" and rope.shape[1]:
            ones = torch.ones(head_dim, device=self.kernels.device)
            return HeadNorms(ones, ones, is_unit=True)
        if self.config.qk_norm != "head":
            return None
        read = partial(self._norm_weight, size=head_dim)
        names = self.family.names
        key = read(f"{prefix}.{names.key_norm}") if has_keys else None
        return HeadNorms(read(f"{prefix}.{names.query_norm}"), key)

    def _feed_forward(self, index: int, prefix: str) -> FeedForward:
        config = self.config
        experts = config.experts if config.has_experts(index) else None
        if experts is not None and not experts.beside_dense and not experts.shortcut:
            return mixture_of_experts(self, experts, prefix, config.shape(index))
        shape = config.shape(index)
        gate_up, down = self._dense_names(prefix)
        dense = self.gated_mlp(prefix, gate_up, down, shape.ffn_size, config.biases.mlp, shape.bound)
        if experts is None or experts.shortcut:
            return dense
        return experts_beside_dense(self, experts, prefix, dense, shape)

    def _shortcut(self, index: int, prefix: str) -> FeedForward | None:
        experts = self.config.experts if self.config.has_experts(index) else None
        if experts is None or not experts.shortcut:
            return None
        return mixture_of_experts(self, experts, prefix, self.config.shape(index))

    def _dense_names(self, prefix: str) -> tuple[tuple[str, ...], str]:
        """The modules of a dense part as this file has them."""
        names = self.family.names
        *gate_up, down = (name.replace("mlp.", names.saved_mlp, 1) for name in (*names.gate_up, names.down))
        is_saved = names.saved_mlp and self.choose_format(self.source, f"{prefix}.{down}") is not None
        return (tuple(gate_up), down) if is_saved else (names.gate_up, names.down)

    def gated_mlp(
        self, prefix: str, gate_up: tuple[str, ...], down: str, ffn: int, has_bias: bool = False, bound: int = 0,
        width: int = 0, gathers: bool = True,
    ) -> GatedMLP:  # fmt: skip
        """A feed-forward layer of `ffn` inner entries from the modules of these names below `prefix`.

        bound: see `LayerShape`. width: of what it reads and gives, 0 for the hidden size. gathers: it gives what all
        ranks give; else both matrices are this rank's rows, as `MixtureOfExperts` takes them.
        """
        width = width or self.config.hidden_size
        rows = (ffn,) if self.config.activation == SQUARED_RELU else (ffn, ffn)
        joined = self.own(module_parts(prefix, gate_up, rows), [even(self.ranks, ffn)] * len(rows), width, has_bias)
        last = module_parts(prefix, (down,), (width,))
        if gathers:
            narrow = self.gathered(last, ffn, has_bias, self.ranks.shares(ffn))
        else:
            narrow = self.own(last, [even(self.ranks, width)], ffn, has_bias)
        return GatedMLP(self.kernels, joined, narrow, self.activation(bound), self.config.scales.gate)

    def activation(self, bound: int) -> str:
        """The activation of a gate whose values are bounded so; 0: they are not."""
        return f"{self.config.activation}_within_{bound}" if bound else self.config.activation

    def own(self, parts: list[RowPart], pieces: Sequence[Piece], columns: int, has_bias: bool = False) -> Linear:
        """`linear` of those rows that this rank has of `pieces`, which are the rows of all `parts`."""
        return self.linear(parts, columns, has_bias, None if self.ranks.size == 1 else rows_of(pieces))

    def gathered(
        self, parts: list[RowPart], columns: int, has_bias: bool = False, read: Sequence[int] = (),
        order: Tensor | None = None,
    ) -> Linear:  # fmt: skip
        """`linear` of whose rows each rank has an even share, and that gives those of all; see `GatheredLinear`.

        A process by itself does not take `order` into account.
        """
        if self.ranks.size == 1:
            return self.linear(parts, columns, has_bias)
        rows = even(self.ranks, sum(part.rows for part in parts))
        own = self.own(parts, [rows], columns, has_bias)
        return GatheredLinear(own, self.ranks, self.ranks.shares(rows.rows), read, order)

    def linear(
        self, parts: list[RowPart], columns: int, has_bias: bool = False, row_ids: Tensor | None = None
    ) -> Linear:  # fmt: skip
        """The modules `parts`, of `columns` inputs, as one matrix; raises CheckpointError if they are not there.

        row_ids [R] int64: rows of it, ascending if there are several modules; None: all.
        """
        forms = [self.format_of(part) for part in parts]
        weight: Weight
        if all(form is forms[0] for form in forms):
            weight = self._weight(forms[0], parts, columns, row_ids)
        else:  # some modules of a quantized checkpoint may not be
            own = [None] * len(parts) if row_ids is None else split_rows(parts, row_ids)
            each = zip(forms, parts, own, strict=True)
            weight = JoinedWeight([self._weight(form, [part], columns, ids) for form, part, ids in each])
        bias = self._bias(parts) if has_bias else None
        if bias is not None and row_ids is not None:
            bias = bias[row_ids.to(bias.device)]
        return Linear(weight, bias, parts, row_ids)

    def _weight(self, form: WeightFormat, parts: list[RowPart], columns: int, row_ids: Tensor | None) -> Weight:
        if row_ids is None:
            return form.read(self.source, parts, columns, self.kernels, self.dtype)
        return read_rows(form, self.source, parts, columns, self.kernels, self.dtype, row_ids, self.ranks.size > 1)

    def format_of(self, part: RowPart) -> WeightFormat:
        """How a module is stored; raises CheckpointError if it is not there."""
        form = self.choose_format(self.source, part.prefix)
        if form is None:
            self.source.shape(f"{part.prefix}.weight")  # which says that the tensor is missing, and where from
            raise CheckpointError(f"there is no tensor {part.prefix}.weight; the checkpoint is incomplete")
        return form

    def _bias(self, parts: list[RowPart]) -> Tensor:
        return torch.cat([self.vector(f"{part.prefix}.bias", part.rows) for part in parts])  # [N]

    def norm(self, name: str, size: int) -> RMSNorm:
        """The norm whose weight is NAME.weight [size]."""
        weight = self._norm_weight(name, size)
        return RMSNorm(self.kernels, weight, self.config.norm_eps, self.family.centered_norms)

    def _norm_weight(self, name: str, size: int) -> Tensor:
        stored = self.vector(f"{name}.weight", size)
        return stored + self.family.norm_offset if self.family.norm_offset else stored

    def vector(self, name: str, size: int) -> Tensor:
        """The tensor `name`, stored as [size] or with sides of 1, as float32 where the kernels run -> [size]."""
        stored = self.source.shape(name) if self.source.has(name) else ()
        shape = stored if max(stored, default=0) == math.prod(stored) == size else (size,)
        return aligned(self.source.tensor(name, shape).flatten().float()).to(self.kernels.device)

    def _embedding(self, head: Linear) -> Embedding:
        """The table; if it is tied to the output layer and rows can be read from that one's matrix, that matrix."""
        module, scale = self.family.names.embedding, self.config.scales.embedding
        if self.stage is not None and not self.stage.is_first:
            return MatrixElsewhere((self.config.vocab_size, self.config.hidden_size))
        in_blocks = self.dtype is None and keeps_blocks(self.source, f"{module}.weight")
        packed = head.weight.packed  # None: another stage has the matrix
        if packed is not None and self.config.tie_embeddings and (in_blocks or isinstance(head.weight, DenseWeight)):
            return TableEmbedding(self.kernels, packed, True, scale, self.ranks, self.config.vocab_size)
        return self.table(module, (self.config.vocab_size, self.config.hidden_size), scale)

    def table(self, module: str, shape: tuple[int, int], scale: float) -> Embedding:
        """A table of floats, or of blocks as a file has them; raises CheckpointError."""
        name = f"{module}.weight"
        if self.dtype is None and keeps_blocks(self.source, name):
            weight = self.own([RowPart(module, shape[0])], [even(self.ranks, shape[0])], shape[1]).weight
            assert weight.packed is not None
            return TableEmbedding(self.kernels, weight.packed, False, scale, self.ranks, shape[0])
        table = read_floats(self.source, name, shape, rows=self._table_rows(shape[0]))
        dtype = self.dtype or (torch.float32 if table.dtype == torch.float16 else table.dtype)
        table = aligned(table.to(dtype)).to(self.kernels.device)
        return TableEmbedding(self.kernels, table, False, scale, self.ranks, shape[0])

    def _table_rows(self, num_rows: int) -> Tensor | None:
        return None if self.ranks.size == 1 else rows_of([even(self.ranks, num_rows)])

    def _kv_dtype(self, parts: DecoderParts) -> torch.dtype:
        """float32 beside float32 and float16 matrices, bfloat16 beside others; see `cache_dtype`."""
        outs = [mixer.out for layer in parts.layers[:1] for mixer in layer.mixers]
        weight = outs[0].weight if outs else parts.lm_head.weight
        dtype = self.dtype or (weight.dtype if isinstance(weight, DenseWeight) else torch.bfloat16)
        return cache_dtype(self.source.config, self.config, dtype)

    def _lm_head(self) -> Linear:
        names = self.family.names
        if self.stage is not None and not self.stage.is_last:
            return Linear(MatrixElsewhere((self.config.vocab_size, self.config.hidden_size)))
        return self._table_module(names.embedding if self.config.tie_embeddings else names.lm_head)

    def _table_module(self, module: str) -> Linear:
        return self.gathered([RowPart(module, self.config.vocab_size)], self.config.hidden_size)


def aligned(tensor: Tensor) -> Tensor:
    """A copy in torch's own memory: a mapped file's tensors may lie at any address, which can change how sums round."""
    return tensor.clone(memory_format=torch.contiguous_format)


def module_parts(prefix: str, names: tuple[str, ...], rows: tuple[int, ...]) -> list[RowPart]:
    """The modules below `prefix`; a single name is a module that holds the rows of all."""
    if len(names) == 1:
        rows = (sum(rows),)
    return [RowPart(f"{prefix}.{name}", count) for name, count in zip(names, rows, strict=True)]
