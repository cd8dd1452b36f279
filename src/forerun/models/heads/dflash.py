"""DFlash and DFlash-2 heads as published by z-lab, and as vLLM's speculators saves them.

Knows: the tensor names and the config fields. Does not know: what a block computes (`heads.block`), how trees grow.

c = hidden_norm fc [states of several target layers] stands for a known token: the keys and values of layer n are its
k_proj c and v_proj c. A block is [embed(root), embed(mask), ...]; layers are Qwen3's, its logits lm_head norm(y) with
the target's own tables. Slot i gives logits for the i-th token behind the root; where the head samples from the anchor
(`sample_from_anchor`), slot i - 1 does.

Layers without a window see the whole block. Sliding layers see no slot behind their own unless `is_causal` is false or
`sliding_window_non_causal` is set; where they do see it, the window is counted from the block's last slot. NVIDIA's
ModelOpt writes `causal` for `is_causal`, and JetSpec `causal_head`.

DFlash-2 has convolutions in its layers (`heads.convolved`) and a candidate selector (`heads.selector`); other heads
build on the same layers, with or without convolutions (`heads.orders`).
Sources: z-lab/dflash dflash/model.py; vllm-project/speculators models/dflash and models/dflash2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.config import MAX_TREE_NODES, HeadWeights
from forerun.errors import CheckpointError, UnsupportedError, VocabularyError
from forerun.kernels.ops import Kernels
from forerun.layers.attention import Attention
from forerun.layers.embedding import Embedding
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.layers.scaled import Scaled
from forerun.models.base import BlockShape, SlotOrder
from forerun.models.decoder import Decoder, DecoderLayer, DecoderParts, RowFunction
from forerun.models.fields import MAX_SIZE, Fields, words
from forerun.models.heads.block import BlockHead, OrderedAttention
from forerun.models.heads.convolved import BlockConvolution, Convolutions, ConvolvedLayer
from forerun.models.heads.lattice import read_lattice
from forerun.models.heads.orders import FIELDS as ORDER_FIELDS
from forerun.models.heads.orders import KINDS as ORDER_KINDS
from forerun.models.heads.orders import check_kind, find_kind
from forerun.models.heads.reading import HeadReader, check_width, num_bytes, num_layers
from forerun.models.heads.selector import CandidateSelector
from forerun.models.heads.vocabulary import DraftVocabulary, read_vocabulary
from forerun.models.layer_types import read_layer_types
from forerun.models.trimmed import WidenedLogits
from forerun.quant.rounded import ChooseFormat, choose_for
from forerun.weights.checkpoint import Checkpoint

SECTION = "transformer_layer_config"  # where speculators describes the layers
NESTED = "dflash_config"  # where z-lab puts what is DFlash's own
OWN_FIELDS = words(
    "block_size mask_token_id target_layer_ids is_causal causal causal_head input_embedding_scale output_multiplier "
    "final_logit_softcapping conv_kernel_size conv_group_size selector_rank selector_top_k"
)
HALVES = ("is_neox_style", "rope_is_neox_style")  # whether the rotation pairs numbers of the two halves of a head
OWN_FIELDS |= ORDER_FIELDS.union(HALVES)
HEAD_FIELDS = OWN_FIELDS | words(
    "dflash_config num_target_layers draft_vocab_size target_hidden_size aux_hidden_state_layer_ids "
    "sliding_window_non_causal sample_from_anchor transformer_layer_config speculators_config speculators_model_type "
    "speculators_version"
)
KINDS = ("dflash", "dflash2", *ORDER_KINDS)  # of `speculators_model_type`
SELECTOR = "candidate_selector"
OWN_TENSORS = ("fc.", "hidden_norm.", "norm.", "layers.", "lm_head.", "embed_tokens.", "d2t", "t2d", f"{SELECTOR}.")
OTHER_HEADS = {"prefix_gru": "Domino"}  # by their tensors
INERT = frozenset({"t2d"})  # a mask of the target tokens that d2t lists
QWEN3_WINDOWS_FROM = 28  # the first layer with a window where Qwen3's config.json does not say


def holds_dflash(folder: Path) -> bool:
    """Whether a folder holds a DFlash head. Raises ModelError if it holds no weights."""
    return is_dflash(Checkpoint.open(folder))


def is_dflash(source: Checkpoint) -> bool:
    """Whether these are the tensors of a DFlash head, or of one that builds on its layers."""
    return source.has("fc.weight") and source.has("hidden_norm.weight")


def read_dflash(source: Checkpoint, target: Decoder, kernels: Kernels, weights: HeadWeights = "stored") -> BlockHead:
    """The DFlash head in a folder. Raises ModelError if it does not fit the target, before weights are read."""
    _refuse_others(source)
    return _DFlash(source, target, kernels, choose_for(weights)).read()


@dataclass(frozen=True, slots=True)
class DFlashFusion:
    """c = hidden_norm fc [states]."""

    fc: Linear
    hidden_norm: RMSNorm

    def __call__(self, states: Tensor) -> Tensor:
        """See `heads.head.Fusion`."""
        return self.hidden_norm(self.fc(states))


class _DFlash:
    """Reads one checkpoint."""

    def __init__(self, source: Checkpoint, target: Decoder, kernels: Kernels, choose_format: ChooseFormat) -> None:
        raw, nested = source.config, _object(source, NESTED)
        self._layers_raw = _object(source, SECTION) or raw
        self._kind = find_kind(source)
        self._is_second = self._kind is None and source.has(f"{SELECTOR}.hidden_projection.weight")
        self._is_speculators = SECTION in raw
        if unknown := sorted(name for name, value in nested.items() if name not in OWN_FIELDS and value is not None):
            raise UnsupportedError(
                f"{source.folder}: {NESTED} in config.json has {', '.join(unknown)}, which forerun does not know for "
                f"DFlash heads and which may change what they compute; known are {', '.join(sorted(OWN_FIELDS))}"
            )
        given = {name: value for name, value in nested.items() if value is not None}
        self.source, self.target = source, target
        self.fields = Fields({**self._layers_raw, **raw, **given}, {})
        self._is_convolved = self._is_second or self.fields.integer("conv_kernel_size", default=0, minimum=0) > 0
        check_kind(source, self._kind, self.fields)
        self._check_rotation()
        self._check_target()
        self.hidden_layers, self.shape = self._hidden_layers(), self._shape()
        self.reader = HeadReader.open(
            source, self._layers_raw, HEAD_FIELDS, "layers.0", target, kernels, choose_format, may_slide=True
        )

    def read(self) -> BlockHead:
        """The head."""
        reader, size, shared = self.reader, self.reader.hidden_size, self.target.parts
        fc = reader.linear("fc", size, len(self.hidden_layers) * self.target.hidden_size)
        layers, vocabulary = self._layers(), self._vocabulary()
        own_head, own_table = self.source.has("lm_head.weight"), self.source.has("embed_tokens.weight")
        lm_head = reader.linear("lm_head", self._num_drafted, size) if own_head else shared.lm_head
        table = reader.embedding("embed_tokens")
        scale = self._embedding_scale(table)
        parts = DecoderParts(
            embedding=table if table.scale == scale else table.with_scale(scale),
            layers=layers,
            final_norm=reader.builder.norm("norm", size),
            lm_head=lm_head,
            tie_embeddings=False,
            after_head=self._after_head(vocabulary),
        )
        fuse = DFlashFusion(fc, reader.builder.norm("hidden_norm", size))
        pairs, order = self._selector() if self._is_second else None, self._order(vocabulary, table, fuse)
        reader.refuse_unread(inert=INERT | self._unused())
        own = [
            fc,
            *([lm_head] if own_head else []),
            *(matrix for layer in layers for matrix in _matrices_around(layer)),
        ]
        own_bytes = (table.nbytes if own_table else 0) + sum(part.nbytes for part in (pairs, order) if part is not None)
        return BlockHead(
            Decoder(parts, self.target.max_position, reader.kv_specs(layers)[0].dtype),
            fuse,
            self.shape,
            self.hidden_layers,
            state_size=len(self.hidden_layers) * self.target.hidden_size,
            weight_bytes=num_bytes(layers, own, own_bytes),
            pairs=pairs,
            order=order,
        )

    def _check_rotation(self) -> None:
        """Refuse a head whose rotation pairs neighbours."""
        for name in HALVES:
            if self.fields.given(name) and not self.fields.flag(name):
                raise UnsupportedError(
                    f"{self.source.folder}: {name} is false in config.json, so that the rotation pairs neighbouring "
                    "numbers; supported are DFlash heads with Qwen3's rotation (true), choose another head or drafter"
                )

    def _check_target(self) -> None:
        """Refuse a head for a target of other sizes."""
        fields, target, folder = self.fields, self.target, self.source.folder
        check_width(self.source, "hidden_size", fields.integer("hidden_size"), target)
        wanted = fields.integer("target_hidden_size", default=target.hidden_size)
        check_width(self.source, "target_hidden_size", wanted, target)
        total = num_layers(target)
        if fields.integer("num_target_layers", default=total) != total:
            raise UnsupportedError(
                f"the head in {folder} was trained for a target of {fields.get('num_target_layers')} layers "
                f"(num_target_layers in its config.json), this target has {total}; give a head that was trained for "
                "this target"
            )
        size = fields.integer("draft_vocab_size", default=target.vocab_size, maximum=MAX_SIZE)
        mask = fields.integer("mask_token_id", minimum=0)
        if max(mask, size - 1) >= target.vocab_size:
            field, value = ("mask_token_id", mask) if mask >= target.vocab_size else ("draft_vocab_size", size)
            raise VocabularyError(
                f"the head in {folder} has {field} {value} in its config.json, this target has {target.vocab_size} "
                "tokens; give a head that was trained for this target"
            )
        self._num_drafted = size

    def _hidden_layers(self) -> tuple[int, ...]:
        """The target's hidden states that are fused, where state i is the output of layer i - 1.

        `target_layer_ids` (z-lab) lists layers, and the output of layer i is state i + 1; `aux_hidden_state_layer_ids`
        (speculators) lists states.
        """
        is_zlab = self.fields.given("target_layer_ids")
        name = "target_layer_ids" if is_zlab else "aux_hidden_state_layer_ids"
        ids, total = self.fields.integers(name), num_layers(self.target)
        states = tuple(i + is_zlab for i in ids)
        if not states or len(set(states)) < len(states) or max(states) > total:
            raise UnsupportedError(
                f"{self.source.folder}: the head reads the target's hidden states {list(ids)} ({name} in its "
                f"config.json), which must be different numbers from 0 to {total - is_zlab} for a target of {total} "
                "layers; give a head that was trained for this target"
            )
        columns, needed = self._fused_columns(), len(states) * self.target.hidden_size
        if columns not in (None, needed):
            raise CheckpointError(
                f"{self.source.folder}: fc.weight has {columns} columns where {name} {list(ids)} in config.json make "
                f"{needed}; weights and config.json do not belong together, copy both again"
            )
        return states

    def _fused_columns(self) -> int | None:
        """Columns of fc, where it is stored as floats."""
        return self.source.shape("fc.weight")[1] if self.source.has("fc.weight") else None

    def _shape(self) -> BlockShape:
        is_first = self._kind is not None and self._kind.from_anchor
        first_slot = 0 if self.fields.flag("sample_from_anchor", default=is_first) else 1
        causal = self._causal()
        size = self.fields.integer("block_size", minimum=1 + first_slot)
        return BlockShape(
            num_slots=min(size, MAX_TREE_NODES),
            mask_token_id=self.fields.integer("mask_token_id", minimum=0),
            first_slot=first_slot,
            is_causal=all(causal),
        )

    def _slides(self) -> list[bool]:
        """Of each layer whether its type is that of layers with a window."""
        num = self.fields.integer("num_hidden_layers")
        types = read_layer_types(self.fields, num)
        if types is not None:
            return [kind == "sliding_attention" for kind in types]
        first = self.fields.integer("max_window_layers", default=QWEN3_WINDOWS_FROM, minimum=0)
        return [self.fields.flag("use_sliding_window") and index >= first for index in range(num)]

    def _window(self) -> int:
        """Of sliding layers; 0: Qwen3's configuration does not use one."""
        is_used = self.fields.flag("use_sliding_window", default=self._layers_raw.get("model_type") != "qwen3")
        return self.fields.integer("sliding_window", default=0, minimum=0) if is_used else 0

    def _causal(self) -> list[bool]:
        """Of each layer whether no slot sees those behind it."""
        slides = self._slides()
        for name in ("is_causal", "causal"):  # the other is ModelOpt's
            if self.fields.given(name):
                return [self.fields.flag(name)] * len(slides)
        if self.fields.flag("causal_head"):
            return [True] * len(slides)
        sees_all = self.fields.flag("sliding_window_non_causal", default=self._is_second)
        if self._is_speculators and (sees_all or not self._window()):
            return [False] * len(slides)
        return slides

    def _layers(self) -> tuple[DecoderLayer, ...]:
        reader, rope, size = self.reader, self.reader.rope(), self.reader.hidden_size
        layers, window = list[DecoderLayer](), self._window()
        for index, (slides, is_causal) in enumerate(zip(self._slides(), self._causal(), strict=True)):
            wide = self.shape.num_slots if self._is_speculators and not is_causal else 0  # beside the block
            kind = OrderedAttention if is_causal and not self.shape.is_causal else Attention
            seen = window + wide if slides and window else 0
            layer = reader.layer(f"layers.{index}", size, rope, "input_layernorm", seen, kind)
            layers.append(self._convolved(f"layers.{index}", layer) if self._is_convolved else layer)
        return tuple(layers)

    def _convolved(self, prefix: str, layer: DecoderLayer) -> ConvolvedLayer:
        """The layer with the convolutions of DFlash-2."""
        around = Convolutions(*(self._convolution(f"{prefix}.{name}_conv") for name in ("attention", "mlp")))
        return ConvolvedLayer(layer.attention_norm, layer.attention, layer.mlp_norm, layer.mlp, around=around)

    def _convolution(self, module: str) -> BlockConvolution:
        size, taps = self.reader.hidden_size, self.fields.integer("conv_kernel_size", default=2)
        group = self.fields.integer("conv_group_size", default=16)
        if size % group or taps > self.shape.num_slots:
            raise CheckpointError(
                f"{self.source.folder}: conv_group_size {group} in config.json must divide hidden_size {size}, and "
                f"conv_kernel_size {taps} be at most block_size {self.shape.num_slots}; copy the file again"
            )
        base = self.source.tensor(f"{module}.base_kernel", (2, taps, size)).float().to(self.target.device)
        return BlockConvolution(base, self.reader.linear(f"{module}.kernel_projection", 2 * taps * size // group, size))

    def _selector(self) -> CandidateSelector:
        """The candidate selector of DFlash-2."""
        rank = self.fields.integer("selector_rank", default=256)
        num = self.fields.integer("selector_top_k", default=16, maximum=self.target.vocab_size)
        self._refuse_vocabulary("a candidate selector", "DFlash-2")
        shape = self.target.vocab_size, rank
        predecessors, successors = (
            self.source.tensor(f"{SELECTOR}.{name}_codebook", shape).to(self.target.device)
            for name in ("predecessor", "successor")
        )
        projection = self.reader.linear(f"{SELECTOR}.hidden_projection", rank, self.reader.hidden_size)
        return CandidateSelector(num, predecessors, successors, projection)

    def _order(
        self, vocabulary: DraftVocabulary | None, table: Embedding, fuse: DFlashFusion
    ) -> SlotOrder | None:  # fmt: skip
        """The head beside the layers, if there is one that looks at what is drafted."""
        if self._kind is None:
            return None
        if self._kind.read is not None:
            return self._kind.read(self.reader, self.fields, self._num_drafted, vocabulary)
        self._refuse_vocabulary("a lattice of candidates", self._kind.name)
        return read_lattice(self.reader, self.fields, table, fuse)

    def _unused(self) -> frozenset[str]:
        """Tensors that are not needed here."""
        modules = tuple(f"{name}." for name in self._kind.unused) if self._kind is not None else ()
        return frozenset(name for name in self.source if modules and name.startswith(modules))

    def _refuse_vocabulary(self, part: str, kind: str) -> None:
        """Raise UnsupportedError if the head does not draft all tokens."""
        if self._num_drafted != self.target.vocab_size or self.source.has("d2t"):
            raise UnsupportedError(
                f"{self.source.folder} has {part} beside a draft vocabulary of {self._num_drafted} tokens; supported "
                f"are {kind} heads that draft all tokens of the target"
            )

    def _embedding_scale(self, table: Embedding) -> float:
        """What rows of the table are multiplied with.

        z-lab's program calls the target's own embedding, which scales what it gives for some targets (Gemma's
        sqrt(hidden_size); vLLM pull requests 40898 and 41703); speculators looks the table up as it is stored. Granite
        and Falcon-H1 multiply behind the embedding: that is applied too, as `forerun train dflash` trains so.
        """
        if self.fields.given("input_embedding_scale") or self._is_speculators or self._kind is not None:
            return self.fields.number("input_embedding_scale", default=1.0)
        return table.scale

    def _after_head(self, vocabulary: DraftVocabulary | None) -> RowFunction | None:
        """What becomes of logits: nothing, where the target's own tables are used as they are."""
        factor = self.fields.number("output_multiplier", default=1.0)
        cap = self.fields.number("final_logit_softcapping", default=0.0)
        scaled = None if (factor, cap) == (1.0, 0.0) else Scaled(self.reader.builder.kernels, factor, cap)
        return scaled if vocabulary is None else WidenedLogits(scaled, vocabulary)

    def _vocabulary(self) -> DraftVocabulary | None:
        """The tokens that are drafted; None: all of the target's."""
        if self._num_drafted == self.target.vocab_size and not self.source.has("d2t"):
            return None
        if not self.source.has("lm_head.weight"):
            raise CheckpointError(
                f"{self.source.folder} has a draft vocabulary of {self._num_drafted} tokens, but no lm_head.weight for "
                "them; copy the checkpoint again"
            )
        return read_vocabulary(self.source, self._num_drafted, self.target.vocab_size).on(self.target.device)


def _matrices_around(layer: DecoderLayer) -> tuple[Linear, ...]:
    """Those of a layer's convolutions."""
    around = layer.around if isinstance(layer, ConvolvedLayer) else None
    return () if around is None else (around.attention.projection, around.mlp.projection)


def _object(source: Checkpoint, name: str) -> Mapping[str, Any]:
    found = source.config.get(name) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source.folder}: {name} in config.json must be an object; copy the file again")
    return found


def _refuse_others(source: Checkpoint) -> None:
    """Raise UnsupportedError for heads on DFlash's layers that compute something else."""
    kind, order = source.config.get("speculators_model_type", KINDS[0]), find_kind(source)
    known = OWN_TENSORS if order is None else (*OWN_TENSORS, *(f"{module}." for module in order.modules))
    strange = sorted(name for name in source if not name.startswith(known))
    if kind not in KINDS or strange:
        named = next((name for name in strange if name.partition(".")[0] in OTHER_HEADS), None)
        found = f"of type {kind!r}" if named is None else f"of {OTHER_HEADS[named.partition('.')[0]]}"
        found += f", with tensors such as {named or strange[0]}" if strange else ""
        raise UnsupportedError(
            f"{source.folder} holds a head {found}; the dflash drafter reads those of type {' or '.join(KINDS)} alone; "
            "choose a DFlash head for this target, or another drafter"
        )
    if not is_dflash(source):
        raise UnsupportedError(
            f"{source.folder} is not a DFlash head: it lacks fc.weight or hidden_norm.weight; found are "
            f"{', '.join(sorted(source)[:4]) or 'no tensors'}"
        )
