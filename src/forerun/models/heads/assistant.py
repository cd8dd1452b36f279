"""Gemma 4's assistant: a small decoder that drafts on the target's own keys and values.

Knows: its fields and tensor names, whose keys and values each of its layers reads. Does not know: how drafts grow.

A checkpoint of its own (`gemma4_assistant`, the 12B's `gemma4_unified_assistant`), whose `text_config` describes four
layers like the target's but narrower, with queries alone: each reads the keys and values of the target's last layer
with keys that has a window, or has none, as it does. Its input is pre_projection [embed(x); h] with the target's table
and its state after the final norm, its logits are those of its own tied table, or of the tokens in the best clusters
(`use_ordered_embeddings`), and post_projection of its normed state is fed back. It was trained to stand where the root
does, however much it drafts, and sees the tokens before the root, of which a window shows sliding_window + 1.
Sources: transformers modeling_gemma4_assistant.py, generation/candidate_generator.py; llama.cpp gemma4-assistant.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.ops import HeadLayout, Kernels
from forerun.layers.attention import Attention
from forerun.layers.norm import RMSNorm
from forerun.models.build import Builder, aligned
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, DecoderLayer
from forerun.models.families.gemma4 import GEMMA4_TEXT
from forerun.models.fields import Fields
from forerun.models.heads.clusters import ClusteredOutput
from forerun.models.heads.eagle import as_it_is
from forerun.models.heads.head import DraftHead, Exit, HeadParts, PairEntrance
from forerun.models.heads.reading import HeadReader, check_vocabulary, check_width, num_bytes, num_layers
from forerun.models.trimmed import KeptTokens
from forerun.quant.base import RowPart
from forerun.quant.gguf import read_floats
from forerun.quant.rounded import ChooseFormat
from forerun.weights.checkpoint import Checkpoint

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # model types
PRE, POST = "pre_projection", "post_projection"
TABLE, LM_HEAD = "model.embed_tokens", "lm_head"
CENTROIDS, ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
DEFAULTS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
NO_KEYS = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")  # which layers without keys may have


def read_assistant(
    source: Checkpoint, target: Decoder, kernels: Kernels, choose_format: ChooseFormat, kept: KeptTokens | None = None
) -> DraftHead:
    """The assistant in a checkpoint; raises ModelError if it is damaged or was made for another target."""
    return _Assistant(source, target, kernels, choose_format, kept).read()


class _Assistant:
    def __init__(
        self, source: Checkpoint, target: Decoder, kernels: Kernels, choose_format: ChooseFormat,
        kept: KeptTokens | None,
    ) -> None:  # fmt: skip
        self.source, self.target, self.kernels = source, target, kernels
        self.fields = Fields(source.config, DEFAULTS)
        self.config = ModelConfig.read(_text_config(source), GEMMA4_TEXT)
        check_width(source, "backbone_hidden_size", self.fields.integer("backbone_hidden_size"), target)
        check_vocabulary(source, self.config, target)
        self.builder = Builder(self.config, GEMMA4_TEXT, source, kernels, None, target.max_position, choose_format)
        self.reader = HeadReader(source, target, self.builder, self.config, kept)

    def read(self) -> DraftHead:
        config, reader, size = self.config, self.reader, self.config.hidden_size
        given = self.target.hidden_size
        pre = reader.linear(PRE, size, 2 * given)
        back, norm = reader.linear(POST, given, size), self.builder.norm(GEMMA4_TEXT.names.final_norm, size)
        read = [self._layer(index) for index in range(config.num_layers)]
        layers, places = tuple(layer for layer, _ in read), tuple(place for _, place in read)
        first = layers[0].attention_norm
        assert first is not None  # the family has one
        outcome = replace(self._exit(norm), back=back)
        reader.refuse_unread(inert=self._not_needed())
        return DraftHead(
            HeadParts(
                embedding=self.target.parts.embedding,
                entrance=PairEntrance(None, None, pre, first, state_first=False),
                layers=layers,
                exit=outcome,
                fuse=as_it_is,
                hidden_layers=(num_layers(self.target) + 1,),
                masks_start=False,
                kv_specs=(),
                state_size=given,
                weight_bytes=num_bytes(layers, [pre, back, outcome.lm_head], 0),
                kv_places=places,
            )
        )

    def _layer(self, index: int) -> tuple[DecoderLayer, int]:
        """A layer, and where the target's keys and values lie that it reads."""
        owner, place = self._owner(index)
        layer = self.builder.layer(index, source=owner)
        attention = layer.attending
        assert isinstance(attention, Attention)  # as the family's are
        if attention.shape.window:
            attention.shape = replace(attention.shape, window=attention.shape.window + 1)
        return layer, place

    def _owner(self, index: int) -> tuple[Attention, int]:
        """Whose keys and values a layer reads, and where these lie."""
        has_window, shape = bool(self.config.window(index)), _kv_shape(self.config.shape(index).heads)
        given = zip(self.target.parts.layers, self.target.kv_places, strict=True)
        own = [(layer.attention, place) for layer, place in given if layer.stores and place is not None]
        alike = [
            (attention, place)
            for attention, place in own
            if isinstance(attention, Attention) and bool(attention.shape.window) == has_window
        ]
        found = [_kv_shape(attention.shape.heads) for attention, _ in alike[-1:]]
        if found != [shape]:
            raise UnsupportedError(
                f"layer {index} of the assistant in {self.source.folder} reads keys of {shape[0]} heads and {shape[1]} "
                f"entries from the target's last layer {'with' if has_window else 'without'} a window, which "
                f"{f'has {found[0][0]} and {found[0][1]}' if found else 'is not there'}; give the assistant that was "
                "made for this target"
            )
        return alike[-1]

    def _exit(self, norm: RMSNorm) -> Exit:
        module = LM_HEAD if self.source.has(f"{LM_HEAD}.weight") else TABLE
        if not self.fields.flag("use_ordered_embeddings"):
            self.builder.format_of(RowPart(module, self.config.vocab_size))  # the target's has another size
            return self.reader.exit(norm, module, feeds_normed=True)
        if self.reader.kept is not None:
            raise UnsupportedError(
                f"the assistant in {self.source.folder} gives logits for a few clusters of tokens already "
                "(use_ordered_embeddings): leave draft_vocabulary out"
            )
        return Exit(norm, self._clusters(module), None, None, feeds_normed=True)

    def _clusters(self, module: str) -> ClusteredOutput:
        size, vocab_size = self.config.hidden_size, self.config.vocab_size
        num_clusters = self.fields.integer("num_centroids", maximum=vocab_size)
        top_k = self.fields.integer("centroid_intermediate_top_k", maximum=num_clusters)
        token_ids = self.source.integers(ORDERING, (vocab_size,)).long()
        if vocab_size % num_clusters or not torch.equal(token_ids.sort().values, torch.arange(vocab_size)):
            raise CheckpointError(
                f"{self.source.folder}: {ORDERING} does not hold every one of {vocab_size} tokens once, in "
                f"{num_clusters} clusters of one size (num_centroids); copy the checkpoint again"
            )
        centroids = self.reader.linear(CENTROIDS, num_clusters, size)
        table = read_floats(self.source, f"{module}.weight", (vocab_size, size))
        held = aligned(table.float() if table.dtype is torch.float16 else table).to(self.kernels.device)
        clusters = token_ids.view(num_clusters, -1).to(self.kernels.device)
        return ClusteredOutput(self.kernels, centroids, held, clusters, top_k)

    def _not_needed(self) -> frozenset[str]:
        """Tensors that files may hold and nobody reads: keys and values, a copy of the table, clusters not used."""
        unread = [name for name in self.source.unread if any(part in name for part in NO_KEYS)]
        return frozenset({*unread, f"{TABLE}.weight", f"{CENTROIDS}.weight", ORDERING})


def _kv_shape(heads: HeadLayout) -> tuple[int, int]:
    return heads.num_kv, heads.head_dim


def _text_config(source: Checkpoint) -> dict[str, Any]:
    """What describes the layers, as if they had keys; raises CheckpointError and UnsupportedError."""
    raw = source.config
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{source.folder}: config.json of an assistant has no text_config; copy it again")
    given = cast("Mapping[str, Any]", text)
    num_shared, num = given.get("num_kv_shared_layers"), given.get("num_hidden_layers")
    if num_shared not in (None, 0, num):
        raise UnsupportedError(
            f"{source.folder}: num_kv_shared_layers of the assistant is {num_shared!r}, not its {num!r} layers; "
            "supported are assistants whose layers all read the target's keys and values"
        )
    for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if given.get(name):
            raise UnsupportedError(
                f"{source.folder}: the assistant's text_config sets {name}; supported are assistants without it"
            )
    plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "model_type": GEMMA4_TEXT.model_type}
    return {**given, **plain}
