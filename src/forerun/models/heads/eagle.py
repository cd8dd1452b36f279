"""EAGLE heads as published by SafeAILab, SpecForge and vLLM's speculators: EAGLE-1, -2, -3, -3.1 and P-EAGLE.

Knows: the tensor names, the config fields and where each version applies its norms. Does not know: how trees grow.

x is a token, f or g the feature of the token before it, y the output of the head's last layer. Checkpoints of EAGLE-2
are those of EAGLE-1.

EAGLE-1     The first layer reads z = fc [embed(x); f], without a norm before its attention. y is the next f, and the
            target's lm_head turns it into logits. The target's own f is its hidden state after the final norm.
EAGLE-3     g = fc [low; mid; high], of hidden states of three target layers. Attention of the first layer reads
            [input_layernorm embed(x); hidden_norm g]; g is the residual. logits = lm_head norm(y) over a draft
            vocabulary; y is the next g.
Flags       norm_before_residual: the residual is hidden_norm g. norm_before_fc: one norm (input_norm) over the three
            states together. EAGLE-3.1: fc_norm, one norm for each of the three states; norm_output, the next g is
            norm(y).
P-EAGLE     An EAGLE-3 head of one or more layers that guesses several tokens at once (arXiv 2602.01469): behind the
            root's row there are rows of one mask token, with mask_hidden in place of the three states.
Sources: SafeAILab/EAGLE eagle/model/cnets1.py and cnets.py; vllm-project/speculators models/eagle3 and models/peagle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.config import MAX_TREE_NODES, HeadWeights
from forerun.errors import CheckpointError, UnsupportedError, VocabularyError
from forerun.kernels.ops import Kernels
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.base import BlockShape
from forerun.models.config import MASK_TOKENS, mask_token_field
from forerun.models.decoder import Decoder, DecoderLayer
from forerun.models.fields import MAX_SIZE, Fields, words
from forerun.models.heads.head import DraftHead, Exit, HeadParts
from forerun.models.heads.reading import HeadReader, check_hidden_size, num_bytes, num_layers, own_output
from forerun.models.heads.vocabulary import read_vocabulary
from forerun.models.trimmed import KeptTokens
from forerun.quant.rounded import ChooseFormat, choose_for
from forerun.weights.checkpoint import Checkpoint

FLAGS = words("norm_before_residual norm_before_fc fc_norm norm_output")
HEAD_FIELDS = FLAGS.union(MASK_TOKENS) | words(
    "draft_vocab_size target_hidden_size eagle_aux_hidden_state_layer_ids eagle_config embed_requires_grad "
    "enable_sp_ulysses transformer_layer_config speculators_config speculators_model_type speculators_version "
    "mask_token_id parallel_drafting"
)
KINDS = ("eagle3", "peagle")  # of `speculators_model_type`
PARALLEL_DRAFTS = 8  # of P-EAGLE, where config.json does not say
EAGLE_CONFIG = words("eagle_aux_hidden_state_layer_ids use_aux_hidden_state")
COMPUTED = {  # what NVIDIA's ModelOpt says there, and the only thing that is computed here
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
SECTION = "transformer_layer_config"
MIDLAYER = "midlayer"  # SafeAILab's name of the first layer
NUM_STATES = 3
INERT = frozenset({"t2d"})  # a mask of the target tokens that d2t lists
MAX_LAYERS = 64


def holds_eagle(folder: Path) -> bool:
    """Whether a folder holds an EAGLE head. Raises ModelError if it holds no weights."""
    source = Checkpoint.open(folder)
    return source.has("fc.weight") and not source.has("hidden_norm.weight")  # of DFlash


def read_eagle(
    source: Checkpoint, target: Decoder, kernels: Kernels, weights: HeadWeights = "stored",
    kept: KeptTokens | None = None,
) -> DraftHead:  # fmt: skip
    """The EAGLE head in a folder, of any version. Raises ModelError if it does not fit the target.

    kept: the tokens it is to propose; None: all it knows. Raises UnsupportedError if it has a vocabulary of its own.
    """
    choose_format = choose_for(weights)
    if source.config.get("speculators_model_type", KINDS[0]) not in KINDS:
        raise UnsupportedError(
            f"{source.folder} holds a speculator of type {source.config['speculators_model_type']!r}; the eagle "
            f"drafter reads types {' and '.join(KINDS)}; choose another drafter, or a head of these"
        )
    for prefix in (MIDLAYER, "layers.0"):
        if source.has(f"{prefix}.hidden_norm.weight"):
            return _Eagle3(source, target, kernels, prefix, choose_format, kept).read()
    if source.has("fc.weight") and source.has("layers.0.post_attention_layernorm.weight"):
        return _read_eagle1(source, target, kernels, choose_format, kept)
    raise UnsupportedError(
        f"{source.folder} is not an EAGLE head of a known layout: it has neither midlayer.hidden_norm.weight nor "
        "layers.0.hidden_norm.weight (EAGLE-3), nor fc.weight with layers.0.post_attention_layernorm.weight (EAGLE-1 "
        f"and -2); found are {', '.join(sorted(source)[:4]) or 'no tensors'}"
    )


# -- EAGLE-1 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Eagle1Entrance:
    """z = fc [embed; f] is both the input of the attention, without a norm, and the residual."""

    fc: Linear

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See `heads.head.Entrance`."""
        z = self.fc(torch.cat([embedded, feature], dim=1))  # [M, H]
        return z, z.clone()


def as_it_is(states: Tensor) -> Tensor:
    """The fusion of EAGLE-1, whose feature is one hidden state."""
    return states


def _read_eagle1(
    source: Checkpoint, target: Decoder, kernels: Kernels, choose_format: ChooseFormat, kept: KeptTokens | None
) -> DraftHead:
    raw = source.config
    check_hidden_size(source, Fields(raw, {}), target)
    reader = HeadReader.open(source, raw, HEAD_FIELDS, "layers.0", target, kernels, choose_format, kept=kept)
    size, rope = reader.hidden_size, reader.rope()
    fc = reader.linear("fc", size, 2 * size)
    layers = tuple(
        reader.layer(f"layers.{index}", size, rope, "input_layernorm" if index else None)
        for index in range(_num_layers(raw))
    )
    embedding = reader.embedding("embed_tokens")
    outcome = reader.exit(None, "lm_head", feeds_normed=True)
    reader.refuse_unread()
    own_bytes = 0 if embedding is target.parts.embedding else embedding.nbytes
    return DraftHead(
        HeadParts(
            embedding=embedding,
            entrance=Eagle1Entrance(fc),
            layers=layers,
            exit=outcome,
            fuse=as_it_is,
            hidden_layers=(num_layers(target) + 1,),
            masks_start=False,
            kv_specs=reader.kv_specs(layers),
            state_size=target.hidden_size,
            weight_bytes=num_bytes(layers, [fc, *own_output(outcome, target)], own_bytes),
        )
    )


def _num_layers(raw: Mapping[str, Any]) -> int:
    return Fields(raw, {}).integer("num_hidden_layers", default=1, maximum=MAX_LAYERS)


def _num_stored(source: Checkpoint) -> int:
    """Layers in a file whose first one has another name than the others."""
    num = 1
    while source.has(f"layers.{num}.post_attention_layernorm.weight"):
        num += 1
    return num


# -- EAGLE-3 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Eagle3Entrance:
    """The attention reads the normalized embedding and feature; the residual is the feature, normalized or not."""

    input_norm: RMSNorm
    hidden_norm: RMSNorm
    norm_before_residual: bool

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See `heads.head.Entrance`."""
        normed = self.hidden_norm(feature)  # [M, H]
        both = torch.cat([self.input_norm(embedded), normed], dim=1)  # [M, 2 H]
        return both, normed if self.norm_before_residual else feature.clone()


@dataclass(frozen=True, slots=True)
class Eagle3Fusion:
    """g = fc [low; mid; high]; a norm may come before fc, for each state (fc_norm) or all three (norm_before_fc)."""

    fc: Linear
    each: tuple[RMSNorm, ...]
    over_all: RMSNorm | None

    def __call__(self, states: Tensor) -> Tensor:
        """See `heads.head.Fusion`."""
        if self.each:
            parts = states.chunk(len(self.each), dim=1)
            states = torch.cat([norm(part.contiguous()) for norm, part in zip(self.each, parts, strict=True)], dim=1)
        if self.over_all is not None:
            states = self.over_all(states)
        return self.fc(states)


class _Eagle3:
    """Reads one EAGLE-3 checkpoint. `prefix`: of the tensor names of its first layer."""

    def __init__(
        self, source: Checkpoint, target: Decoder, kernels: Kernels, prefix: str, choose_format: ChooseFormat,
        kept: KeptTokens | None,
    ) -> None:  # fmt: skip
        raw = source.config
        section = raw.get(SECTION)
        if section is not None and not isinstance(section, Mapping):
            raise CheckpointError(f"{source.folder}: {SECTION} in config.json must be an object; copy the file again")
        layers_raw = raw if section is None else section
        self.source, self.target, self.prefix = source, target, prefix
        self.fields = Fields({**layers_raw, **raw}, {})
        # SafeAILab's files may state the target's layers: what they hold counts.
        self.num_layers = _num_stored(source) if prefix == MIDLAYER else _num_layers(layers_raw)
        check_hidden_size(source, self.fields, target)
        self.reader = HeadReader.open(
            source, layers_raw, HEAD_FIELDS, prefix, target, kernels, choose_format, kept=kept
        )

    def read(self) -> DraftHead:
        """The head."""
        fusion, layers, outcome, (block, blank) = self._fusion(), self._layers(), self._exit(), self._block()
        embedding = self.reader.embedding("embed_tokens")
        entrance = Eagle3Entrance(
            self._norm(f"{self.prefix}.input_layernorm"),
            self._norm(f"{self.prefix}.hidden_norm"),
            self.fields.flag("norm_before_residual"),
        )
        self.reader.refuse_unread(inert=INERT)
        shared = self.target.parts
        own = [fusion.fc, *own_output(outcome, self.target)]
        own_bytes = 0 if embedding is shared.embedding else embedding.nbytes
        return DraftHead(
            HeadParts(
                embedding=embedding,
                entrance=entrance,
                layers=layers,
                exit=outcome,
                fuse=fusion,
                hidden_layers=self._hidden_layers(),
                masks_start=False,
                kv_specs=self.reader.kv_specs(layers),
                state_size=NUM_STATES * self.target.hidden_size,
                weight_bytes=num_bytes(layers, own, own_bytes),
                block=block,
                blank=blank,
            )
        )

    def _block(self) -> tuple[BlockShape | None, Tensor | None]:
        """What P-EAGLE guesses at once, and the states of its empty slots; of other heads None."""
        if not self.source.has("mask_hidden"):
            return None, None
        name = mask_token_field(self.fields, "mask_token_id") or "mask_token_id"  # AWS has the names of PARD
        mask = self.fields.integer(name, minimum=0)
        if mask >= self.target.vocab_size:
            raise VocabularyError(
                f"the head in {self.source.folder} has {name} {mask} in its config.json, this target has "
                f"{self.target.vocab_size} tokens; give a head that was trained for this target"
            )
        wanted = _num_parallel(self.source.config.get("speculators_config"))
        stored, size = self.source.tensor("mask_hidden"), NUM_STATES * self.target.hidden_size
        if stored.numel() != size:  # [size], [1, size] or [1, 1, size]
            raise CheckpointError(
                f"{self.source.folder}: mask_hidden has shape {list(stored.shape)}, not {size} numbers for "
                f"{NUM_STATES} states of the target; weights and config.json do not belong together, copy both again"
            )
        shape = BlockShape(min(wanted, MAX_TREE_NODES - 1), mask, first_slot=0, is_causal=True)
        return shape, stored.flatten().float().to(self.target.device)

    def _norm(self, name: str) -> RMSNorm:
        return self.reader.builder.norm(name, self.reader.hidden_size)

    def _fusion(self) -> Eagle3Fusion:
        width, builder = self.target.hidden_size, self.reader.builder
        each, over_all = self.fields.flag("fc_norm"), self.fields.flag("norm_before_fc")
        return Eagle3Fusion(
            fc=self.reader.linear("fc", self.reader.hidden_size, NUM_STATES * width),
            each=tuple(builder.norm(f"fc_norm.{i}", width) for i in range(NUM_STATES)) if each else (),
            over_all=builder.norm("input_norm", NUM_STATES * width) if over_all else None,
        )

    def _layers(self) -> tuple[DecoderLayer, ...]:
        reader, rope, size = self.reader, self.reader.rope(), self.reader.hidden_size
        first = reader.layer(self.prefix, 2 * size, rope, None)
        others = (reader.layer(f"layers.{i}", size, rope, "input_layernorm") for i in range(1, self.num_layers))
        return (first, *others)

    def _exit(self) -> Exit:
        vocab_size = self.target.vocab_size
        size = self.fields.integer("draft_vocab_size", default=vocab_size, maximum=MAX_SIZE)
        if size > vocab_size:
            raise CheckpointError(
                f"{self.source.folder}: draft_vocab_size {size} is above the target's {vocab_size} tokens; the head "
                "was trained for another target"
            )
        has_map = size < vocab_size or self.source.has("d2t")
        vocabulary = read_vocabulary(self.source, size, vocab_size) if has_map else None
        return self.reader.exit(self._norm("norm"), "lm_head", self.fields.flag("norm_output"), vocabulary)

    def _hidden_layers(self) -> tuple[int, ...]:
        """The target's hidden states that are fused, where state i is the output of layer i - 1.

        At the top level of config.json (speculators, vLLM) `eagle_aux_hidden_state_layer_ids` lists states; inside
        `eagle_config` (SpecForge, SGLang) it lists layers, and the output of layer i is state i + 1. An empty list
        (ModelOpt) is none.
        """
        nested = self.fields.get("eagle_config") or {}
        if (
            not isinstance(nested, Mapping)
            or set(nested) - EAGLE_CONFIG - set(COMPUTED)
            or not nested.get("use_aux_hidden_state", True)
        ):
            raise UnsupportedError(
                f"{self.source.folder}: eagle_config in config.json is {str(nested)[:80]}; supported is an object of "
                f"{', '.join(sorted(EAGLE_CONFIG.union(COMPUTED)))}, and only heads that use the three states"
            )
        for name, value in COMPUTED.items():
            if nested.get(name) not in (None, value):
                raise UnsupportedError(
                    f"{self.source.folder}: {name} is {nested[name]!r} in config.json's eagle_config; supported are "
                    f"heads with {value!r}"
                )
        name, total = "eagle_aux_hidden_state_layer_ids", num_layers(self.target)
        if self.fields.given(name) and self.fields.get(name) != []:
            return self._checked(self.fields.get(name), 0)
        if nested.get(name) not in (None, []):
            return self._checked(nested[name], 1)
        return self._checked([2, total // 2, total - 3], 0)

    def _checked(self, ids: Any, offset: int) -> tuple[int, ...]:
        total = num_layers(self.target)
        whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not whole or len(ids) != NUM_STATES or len(set(ids)) < NUM_STATES or not _in_range(ids, offset, total):
            raise UnsupportedError(
                f"{self.source.folder}: the head reads the target's hidden states {ids} "
                f"(eagle_aux_hidden_state_layer_ids), which must be {NUM_STATES} different numbers from {-offset} to "
                f"{total - offset} for a target of {total} layers; give a head that was trained for this target"
            )
        return tuple(i + offset for i in ids)


def _num_parallel(section: Any) -> int:
    """Drafts that a P-EAGLE head was trained to guess at once, from its `speculators_config`."""
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    fields = Fields(first if isinstance(first, Mapping) else {}, {}, where="config.json's proposal_methods")
    return fields.integer("speculative_tokens", default=PARALLEL_DRAFTS)


def _in_range(ids: Sequence[int], offset: int, total: int) -> bool:
    return all(0 <= i + offset <= total for i in ids)
