"""DraftHead: a small decoder that reads a target's hidden states beside the tokens.

Knows: the order of ops, of which only the entrance differs between EAGLE-1, EAGLE-3 and MTP. Does not know: files,
layouts, requests, or which positions its rows stand for (but those of heads that read the target's own KV).

A row is a token and a *feature*: the target's hidden state of the token before, or, while drafting, what the head
itself gave there. It gives logits for the next token, and the feature that a child's row is fed.
Formulas: EAGLE-1 (arXiv 2401.15077), EAGLE-3 (2503.01840), DeepSeek-V3 section 2.2 (2412.19437).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.layers.embedding import Embedding, TableEmbedding
from forerun.layers.linear import GatheredLinear, Linear
from forerun.layers.norm import RMSNorm
from forerun.models.base import BlockPasses, BlockShape, LayerSpec, Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import DecoderLayer, RowFunction, add_norm, run_layers
from forerun.models.heads.clusters import ClusteredOutput
from forerun.models.heads.vocabulary import DraftVocabulary

POSITION_SHIFT = -1  # rows stand at the position of the state they are fed, which is that of the token before


class Entrance(Protocol):
    """How embedding and feature become the input of the first layer."""

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Both [M, H] -> what the first attention reads, and the residual stream [M, H], which may be written to."""


@dataclass(frozen=True, slots=True)
class PairEntrance:
    """Embedding and state, as a rule normed, side by side through one matrix; then the layer's first norm."""

    token_norm: RMSNorm | None
    state_norm: RMSNorm | None
    projection: Linear
    attention_norm: RMSNorm
    state_first: bool

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See `Entrance`."""
        token = embedded if self.token_norm is None else self.token_norm(embedded)
        state = feature if self.state_norm is None else self.state_norm(feature)
        pair = [state, token] if self.state_first else [token, state]
        residual = self.projection(torch.cat(pair, dim=1))  # [M, H]
        return self.attention_norm(residual), residual


class Fusion(Protocol):
    """How hidden states of the target become a feature."""

    def __call__(self, states: Tensor) -> Tensor:
        """states [M, sum of the widths] -> [M, H]."""


@dataclass(frozen=True, slots=True)
class Exit:
    """From the residual stream to logits and the next feature."""

    norm: RMSNorm | None  # before the output layer; None: that reads the feature itself
    lm_head: Linear | ClusteredOutput
    after_head: RowFunction | None  # what becomes of logits, as in the target whose output layer this is
    vocabulary: DraftVocabulary | None  # None: the output layer's rows are the target's tokens
    feeds_normed: bool  # the next feature is the normed state
    back: Linear | None = None  # or what this makes of it

    def __call__(self, x: Tensor, state: Tensor) -> PassOutput:
        """x [R, H] the last addend, state [R, H] the residual stream, which is added to in place."""
        normed, fed = self.states(x, state)
        return PassOutput(self.logits(normed), features=fed)

    def states(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x and state as above -> what `logits` reads, and the next feature, both [R, H]."""
        normed = add_norm(self.norm, x, state)
        fed = normed if self.feeds_normed else state
        return normed, fed if self.back is None else self.back(fed)

    def logits(self, normed: Tensor) -> Tensor:
        """normed [R, H] -> [R, V]."""
        logits = self.lm_head(normed)  # [R, draft vocabulary]
        logits = logits if self.after_head is None else self.after_head(logits)
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)


@dataclass(frozen=True, slots=True)
class HeadParts:
    """Everything a head is made of."""

    embedding: Embedding
    entrance: Entrance
    layers: tuple[DecoderLayer, ...]  # the entrance takes the place of the first attention norm
    exit: Exit
    fuse: Fusion
    hidden_layers: tuple[int, ...]  # of the target, in the order their states are laid side by side
    masks_start: bool  # embeddings at position 0 are zero
    kv_specs: tuple[LayerSpec, ...]
    state_size: int  # sum of their widths
    weight_bytes: int  # of tensors it does not share with the target
    kv_places: tuple[int, ...] | None = None  # of the target's KV, which each layer reads; None: layers have their own
    block: BlockShape | None = None  # it guesses a block at once (P-EAGLE), None: token by token
    blank: Tensor | None = None  # [state_size]: what stands for the target's states in a block's empty slots


class DraftHead:
    """A head over the target's pool, under the target's own block tables."""

    def __init__(self, parts: HeadParts) -> None:
        self.parts = parts
        self.hidden_layers = parts.hidden_layers
        self.kv_specs = parts.kv_specs
        self.weight_bytes = parts.weight_bytes
        self.state_size = parts.state_size
        self.kv_places = parts.kv_places

    @property
    def sees_slot_zero(self) -> bool:
        """Whether the attention counts the slot of the first token, which has no state before it."""
        return any(layer.attending.shape.window >= 0 for layer in self.parts.layers)

    @property
    def hidden_size(self) -> int:
        """H, of embeddings and features."""
        return self.parts.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        """V, the target's."""
        out = self.parts.exit
        if out.vocabulary is not None:
            return out.vocabulary.vocab_size
        return out.lm_head.num_outputs if isinstance(out.lm_head, Linear) else out.lm_head.weight.shape[0]

    @torch.no_grad()
    def read(self, batch: ForwardBatch, states: Tensor, kvs: Sequence[LayerKV]) -> PassOutput:
        """`forward`, with features made from the target's hidden states [M, sum of their widths]."""
        return self.forward(batch, self.parts.fuse(states), kvs)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, features: Tensor, kvs: Sequence[LayerKV]) -> PassOutput:
        """Compute every row of `batch` with its feature of [M, H], writing KV; no features if nobody wants logits."""
        batch = batch.on(features.device)
        x, residual = self.stream(batch, features, kvs, batch.logit_rows)
        if residual.shape[0] == 0:  # known tokens: the head itself will read no more of them than their KV
            return PassOutput(residual.new_empty(0, self.vocab_size))
        return self.parts.exit(x, residual)

    def stream(
        self, batch: ForwardBatch, features: Tensor, kvs: Sequence[LayerKV], wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All layers -> the last addend and the residual stream of the rows `wanted` [R], None: of all; KV is written.

        The batch is on the device of the features [M, H].
        """
        parts = self.parts
        assert features.shape[0] == batch.num_rows, (features.shape[0], batch.num_rows)
        batch = batch if parts.kv_places is None else _at_roots(batch)
        embedded = parts.embedding(batch.token_ids)  # [M, H]
        if parts.masks_start:
            embedded = embedded.masked_fill(batch.positions[:, None] == 0, 0.0)
        x, residual = parts.entrance(embedded, features)
        return run_layers(parts.layers, x, residual, batch, kvs, wanted)

    @property
    def blocks(self) -> BlockPasses | None:
        """The pass over blocks, of a head that guesses these: the roots' pass, with empty slots behind each root."""
        parts = self.parts
        return None if parts.block is None else BlockPasses(self.passes, parts.block, blank=parts.blank)

    @property
    def passes(self) -> Passes:
        """The roots' pass reads the target's states, the passes below read the head's own features."""

        def first(batch: ForwardBatch, states: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
            assert states is not None
            return self.read(batch, states, kvs)

        def below(batch: ForwardBatch, features: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
            assert features is not None
            return self.forward(batch, features, kvs)

        return Passes(
            first,
            below,
            vocab_size=self.vocab_size,
            feature_size=self.state_size,
            fed_size=self.hidden_size,
            shift=POSITION_SHIFT if self.kv_places is None else 0,
            past_start=DraftHead(replace(self.parts, masks_start=False)).passes if self.parts.masks_start else None,
            exchanges=_exchanges(self.parts),
        )


def _exchanges(parts: HeadParts) -> bool:
    """Whether the target's table or output layer, which it computes with, is shared by several ranks."""
    shares_table = isinstance(parts.embedding, TableEmbedding) and parts.embedding.exchanges
    return shares_table or isinstance(parts.exit.lm_head, GatheredLinear)


def _at_roots(batch: ForwardBatch) -> ForwardBatch:
    """The batch with every row at the position of its tree's root; it sees the tokens before that, and no draft."""
    before = batch.rows.prefix_lens  # of a node's row: the root's position
    unseen = torch.zeros(before.shape[0], dtype=torch.int64, device=before.device)  # [M]
    return replace(batch, positions=before, rows=replace(batch.rows, tree_masks=unseen))
