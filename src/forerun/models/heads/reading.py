"""Reading heads: what every layout has in common.

Knows: how a head's config.json differs from a model's, its attention and feed-forward tensors, which target it fits.
Does not know: any one layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError, VocabularyError
from forerun.kernels.ops import Kernels
from forerun.layers.attention import Attention, AttentionShape, HeadNorms
from forerun.layers.embedding import Embedding, TableEmbedding
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.layers.rotary import rope_table
from forerun.models.base import LayerSpec, Model
from forerun.models.build import INERT_TENSORS, Builder, aligned, module_parts
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, DecoderLayer
from forerun.models.family import Biases, Family
from forerun.models.fields import Fields, words
from forerun.models.heads.clusters import ClusteredOutput
from forerun.models.heads.head import Exit
from forerun.models.heads.vocabulary import DraftVocabulary
from forerun.models.trimmed import KeptTokens
from forerun.quant.base import RowPart
from forerun.quant.dense import DenseWeight
from forerun.quant.gguf import read_floats
from forerun.quant.rounded import ChooseFormat
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint

SKIP_SLOT_ZERO = -1  # an attention window: the first token has no state before it, so its slot is never written
QKV, OUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
GATE_UP, DOWN = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
# Fields of the target's own configuration that trainers copy into a head's; its one layer has no windows or experts.
COPIED_FIELDS = words(
    "sliding_window use_sliding_window max_window_layers layer_types decoder_sparse_step target_model_type "
    "num_hidden_layers attention_bias mlp_bias bias qkv_bias"
)


def native_target(model: Model) -> Decoder:
    """The target as forerun's own decoder, whose hidden states a head can read; raises UnsupportedError."""
    if not isinstance(model, Decoder):
        raise UnsupportedError(
            "EAGLE heads and MTP modules read hidden states, embedding and output layer of a target that forerun runs "
            "itself, and this one runs through transformers; choose another drafter, such as 'draft' or 'ngram'"
        )
    return model


def num_layers(target: Decoder) -> int:
    """Layers of the target."""
    return target.num_layers


@dataclass(frozen=True, slots=True)
class HeadReader:
    """Reads the tensors of one head for one target."""

    source: Checkpoint | GgufCheckpoint
    target: Decoder
    builder: Builder
    config: ModelConfig
    kept: KeptTokens | None = None  # None: all tokens

    @staticmethod
    def open(
        source: Checkpoint, raw: Mapping[str, Any], known: frozenset[str], layer: str, target: Decoder,
        kernels: Kernels, choose_format: ChooseFormat, may_slide: bool = False, kept: KeptTokens | None = None,
    ) -> HeadReader:  # fmt: skip
        """`raw` describes the layers; `known` fields are read elsewhere; `layer` is where the first one's tensors are.

        Biases and head norms are there where the checkpoint has such tensors. may_slide: the caller reads the windows
        of the layers; else there may be none.
        """
        if not may_slide:
            _refuse_windows(raw)
        family = _family(source, layer, known)
        config = ModelConfig.read(_layer_fields(raw), family)
        check_vocabulary(source, config, target)
        builder = Builder(config, family, source, kernels, None, target.max_position, choose_format)
        return HeadReader(source, target, builder, config, kept)

    @property
    def hidden_size(self) -> int:
        """H of the head."""
        return self.config.hidden_size

    def rope(self) -> Tensor:
        """The rope table of the head's layers, for all positions of the target -> [P, rotary_dim]."""
        return rope_table(self.config.rope, self.target.max_position).to(self.builder.kernels.device)

    def attention(
        self, prefix: str, columns: int, rope: Tensor, window: int = SKIP_SLOT_ZERO, kind: type[Attention] = Attention
    ) -> Attention:
        """The attention below `prefix`, whose q, k and v have `columns` inputs."""
        config, heads = self.config, self.config.heads
        rows = tuple(count * heads.head_dim for count in (heads.num_q, heads.num_kv, heads.num_kv))
        qkv = self.builder.linear(module_parts(prefix, QKV, rows), columns, config.biases.qkv)
        out = self.builder.linear(module_parts(prefix, (OUT,), (config.hidden_size,)), rows[0], config.biases.out)
        shape = AttentionShape(heads, config.attention_scale, window, config.norm_eps)
        return kind(self.builder.kernels, shape, qkv, out, rope, self._head_norms(prefix))

    def _head_norms(self, prefix: str) -> HeadNorms | None:
        if not self.config.qk_norm:
            return None
        read = partial(self.builder.vector, size=self.config.heads.head_dim)
        return HeadNorms(read(f"{prefix}.self_attn.q_norm.weight"), read(f"{prefix}.self_attn.k_norm.weight"))

    def layer(
        self, prefix: str, columns: int, rope: Tensor, norm: str | None, window: int = SKIP_SLOT_ZERO,
        kind: type[Attention] = Attention,
    ) -> DecoderLayer:  # fmt: skip
        """A Llama-like layer below `prefix`; `norm` names the norm before attention; None if the entrance has it.

        `window` and `kind`: of its attention.
        """
        builder, size = self.builder, self.hidden_size
        return DecoderLayer(
            attention_norm=None if norm is None else builder.norm(f"{prefix}.{norm}", size),
            attention=self.attention(prefix, columns, rope, window, kind),
            mlp_norm=builder.norm(f"{prefix}.post_attention_layernorm", size),
            mlp=builder.gated_mlp(prefix, GATE_UP, DOWN, self.config.ffn_size, self.config.biases.mlp),
        )

    def linear(self, module: str, rows: int, columns: int) -> Linear:
        """A matrix, with the bias the checkpoint has beside it."""
        return self.builder.linear([RowPart(module, rows)], columns, has_bias=self.source.has(f"{module}.bias"))

    def embedding(self, module: str) -> Embedding:
        """The head's own table, or the target's where it brings none."""
        name = f"{module}.weight"
        if not self.source.has(name):
            self.must_be_as_wide_as_target("embedding", name)
            return self.target.parts.embedding
        table = read_floats(self.source, name, (self.target.vocab_size, self.hidden_size))  # [V, H]
        kernels = self.builder.kernels
        stored = aligned(table.float() if table.dtype is torch.float16 else table)
        return TableEmbedding(kernels, stored.to(kernels.device))

    def exit(
        self, norm: RMSNorm | None, module: str, feeds_normed: bool, vocabulary: DraftVocabulary | None = None
    ) -> Exit:
        """The end of a head, whose output layer is `module`, or the target's where there is no such module.

        Logits of the target's output layer are scaled and capped as the target's are. `vocabulary`: that of a head
        which was trained for some tokens alone; raises UnsupportedError if others are to be kept.
        """
        is_short = vocabulary is not None and len(vocabulary.token_ids) < self.target.vocab_size
        is_own = bool(module) and (is_short or self.source.has(f"{module}.weight"))
        if vocabulary is not None and self.kept is not None:
            raise UnsupportedError(
                f"the head in {self.source.folder} was trained with a draft vocabulary of its own (d2t, "
                f"{len(vocabulary.token_ids)} tokens): leave draft_vocabulary out"
            )
        if not is_own:
            self.must_be_as_wide_as_target("output layer", f"{module}.weight")
        device, kept = self.builder.kernels.device, self.kept
        known = vocabulary if kept is None else kept.vocabulary
        after_head = None if is_own else self.target.parts.after_head
        lm_head = self._own_output(module, vocabulary) if is_own else self._target_output()
        return Exit(norm, lm_head, after_head, None if known is None else known.on(device), feeds_normed)

    def _own_output(self, module: str, vocabulary: DraftVocabulary | None) -> Linear:
        if self.kept is None:
            rows = self.target.vocab_size if vocabulary is None else len(vocabulary.token_ids)
            return self.linear(module, rows, self.hidden_size)
        part, has_bias = RowPart(module, self.target.vocab_size), self.source.has(f"{module}.bias")
        return self.builder.linear([part], self.hidden_size, has_bias, self.kept.token_ids)

    def _target_output(self) -> Linear:
        return self.target.parts.lm_head if self.kept is None else self.kept.target_rows(self.builder.kernels)

    def must_be_as_wide_as_target(self, part: str, missing: str) -> None:
        """Raise CheckpointError unless the target's own `part` can stand in for the tensor `missing`."""
        if self.hidden_size != self.target.hidden_size:
            raise CheckpointError(
                f"{self.source.folder} has no tensor {missing}, and the target's {part} has hidden size "
                f"{self.target.hidden_size} where the head has {self.hidden_size}; the checkpoint is incomplete"
            )

    def kv_specs(self, layers: Sequence[DecoderLayer]) -> tuple[LayerSpec, ...]:
        """What the pool keeps of each layer: bfloat16 beside bfloat16 and quantized matrices, else float32."""
        specs = []
        for layer in layers:
            weight = layer.attending.out.weight
            stored = weight.dtype if isinstance(weight, DenseWeight) else torch.bfloat16
            dtype = torch.bfloat16 if stored == torch.bfloat16 else torch.float32
            heads = layer.attending.shape.heads
            specs.append(LayerSpec(heads.num_kv, heads.head_dim, dtype, layer.attending.is_latent))
        return tuple(specs)

    def refuse_unread(self, own: str = "", inert: frozenset[str] = frozenset()) -> None:
        """Raise UnsupportedError if tensors below `own` were not used: the head computes something else."""
        unread = [n for n in self.source.unread if n.startswith(own) and n not in inert]
        unread = [n for n in unread if not n.endswith(INERT_TENSORS)]
        needless = self.builder.family.names.unread  # in a module of the target's kind as in its layers
        unread = [n for n in unread if not needless or needless not in n]
        if unread:
            raise UnsupportedError(
                f"{self.source.folder} has {len(unread)} tensors that this layout does not ask for, e.g. "
                f"{', '.join(unread[:3])}; weights and config.json do not belong together, or the head is of a kind "
                "forerun does not know"
            )


def num_bytes(
    layers: Sequence[DecoderLayer], linears: Sequence[Linear | ClusteredOutput], embedding_bytes: int
) -> int:  # fmt: skip
    """Bytes of matrices and tables (norms are too small to count)."""
    parts = [part for layer in layers for part in (layer.attention, layer.mlp) if part is not None]
    inner = sum(linear.nbytes for part in parts for linear in part.linears)
    return inner + sum(linear.nbytes for linear in linears) + embedding_bytes


def own_output(end: Exit, target: Decoder) -> list[Linear | ClusteredOutput]:
    """A head's output layer, if it is not the target's."""
    return [] if end.lm_head is target.parts.lm_head else [end.lm_head]


def _family(source: Checkpoint, layer: str, known: frozenset[str]) -> Family:
    biases = Biases(
        qkv=source.has(f"{layer}.self_attn.q_proj.bias"),
        out=source.has(f"{layer}.self_attn.o_proj.bias"),
        mlp=source.has(f"{layer}.mlp.gate_proj.bias"),
    )
    return Family(
        model_type="draft head",
        defaults={"rms_norm_eps": 1e-6},
        fields=known | COPIED_FIELDS,
        biases=lambda _: biases,
        qk_norm="head" if source.has(f"{layer}.self_attn.q_norm.weight") else "",
    )


def _layer_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config with one layer if it says nothing about that: some heads copy the target's number of layers."""
    return {"num_hidden_layers": 1, **raw}


def _refuse_windows(raw: Mapping[str, Any]) -> None:
    types = cast("list[str]", raw.get("layer_types") or [])
    if raw.get("use_sliding_window") is True or "sliding_attention" in types:
        raise UnsupportedError(
            "config.json asks for sliding windows in a draft head (use_sliding_window or layer_types); supported are "
            "heads whose layers see everything"
        )


def check_hidden_size(source: Checkpoint | GgufCheckpoint, fields: Fields, target: Decoder) -> None:
    """Raise UnsupportedError if the head was trained for a target of another hidden size."""
    own = fields.integer("hidden_size")
    field = "target_hidden_size" if fields.given("target_hidden_size") else "hidden_size"
    check_width(source, field, fields.integer("target_hidden_size", default=own), target)


def check_width(source: Checkpoint | GgufCheckpoint, field: str, wanted: int, target: Decoder) -> None:
    """Raise UnsupportedError if the target's hidden size is not what the `field` of config.json says."""
    if wanted != target.hidden_size:
        raise UnsupportedError(
            f"the head in {source.folder} was trained for a target of hidden size {wanted} ({field} in its "
            f"config.json), this target has {target.hidden_size}; give a head that was trained for this target"
        )


def check_vocabulary(source: Checkpoint | GgufCheckpoint, config: ModelConfig, target: Decoder) -> None:
    """Raise VocabularyError if the head was trained for another number of tokens."""
    if config.vocab_size != target.vocab_size:
        raise VocabularyError(
            f"the head in {source.folder} was trained for {config.vocab_size} tokens (vocab_size in its "
            f"config.json), the target has {target.vocab_size}; give a head that was trained for this target"
        )
