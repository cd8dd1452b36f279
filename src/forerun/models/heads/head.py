"""DraftHead: a small decoder that reads a target's hidden states beside the tokens.

Knows: the order of ops, of which only the entrance differs between EAGLE-1, EAGLE-3 and MTP. Does not know: files,
layouts, requests, or which positions its rows stand for.

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
from forerun.layers.embedding import Embedding
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.base import LayerSpec, Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import DecoderLayer, RowFunction, add_norm, run_layers
from forerun.models.heads.vocabulary import DraftVocabulary

POSITION_SHIFT = -1  # rows stand at the position of the state they are fed, which is that of the token before


class Entrance(Protocol):
    """How embedding and feature become the input of the first layer."""

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Both [M, H] -> what the first attention reads, and the residual stream [M, H], which may be written to."""


class Fusion(Protocol):
    """How hidden states of the target become a feature."""

    def __call__(self, states: Tensor) -> Tensor:
        """states [M, sum of the widths] -> [M, H]."""


@dataclass(frozen=True, slots=True)
class Exit:
    """From the residual stream to logits and the next feature."""

    norm: RMSNorm | None  # before the output layer; None: that reads the feature itself
    lm_head: Linear
    after_head: RowFunction | None  # what becomes of logits, as in the target whose output layer this is
    vocabulary: DraftVocabulary | None  # None: the output layer's rows are the target's tokens
    feeds_normed: bool  # the next feature is the normed state

    def __call__(self, x: Tensor, state: Tensor) -> PassOutput:
        """x [R, H] the last addend, state [R, H] the residual stream, which is added to in place."""
        normed = add_norm(self.norm, x, state)
        logits = self.lm_head(normed)  # [R, draft vocabulary]
        logits = logits if self.after_head is None else self.after_head(logits)
        if self.vocabulary is not None:
            logits = self.vocabulary.widen(logits)
        return PassOutput(logits, features=normed if self.feeds_normed else state)


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


class DraftHead:
    """A head over the target's pool, under the target's own block tables."""

    def __init__(self, parts: HeadParts) -> None:
        self.parts = parts
        self.hidden_layers = parts.hidden_layers
        self.kv_specs = parts.kv_specs
        self.weight_bytes = parts.weight_bytes
        self.state_size = parts.state_size

    @property
    def sees_slot_zero(self) -> bool:
        """Whether the attention counts the slot of the first token, which has no state before it."""
        return any(layer.attending.shape.window >= 0 for layer in self.parts.layers)

    @property
    def hidden_size(self) -> int:
        """H, of features and of the residual stream."""
        return self.parts.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        """V, the target's."""
        out = self.parts.exit
        return out.lm_head.weight.shape[0] if out.vocabulary is None else out.vocabulary.vocab_size

    @torch.no_grad()
    def read(self, batch: ForwardBatch, states: Tensor, kvs: Sequence[LayerKV]) -> PassOutput:
        """`forward`, with features made from the target's hidden states [M, sum of their widths]."""
        return self.forward(batch, self.parts.fuse(states), kvs)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, features: Tensor, kvs: Sequence[LayerKV]) -> PassOutput:
        """Compute every row of `batch` with its feature of [M, H], writing KV; no features if nobody wants logits."""
        parts, batch = self.parts, batch.on(features.device)
        assert features.shape[0] == batch.num_rows, (features.shape[0], batch.num_rows)
        embedded = parts.embedding(batch.token_ids)  # [M, H]
        if parts.masks_start:
            embedded = embedded.masked_fill(batch.positions[:, None] == 0, 0.0)
        x, residual = parts.entrance(embedded, features)
        x, residual = run_layers(parts.layers, x, residual, batch, kvs, batch.logit_rows)
        if residual.shape[0] == 0:  # known tokens: the head itself will read no more of them than their KV
            return PassOutput(residual.new_empty(0, self.vocab_size))
        return parts.exit(x, residual)

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
            shift=POSITION_SHIFT,
            past_start=DraftHead(replace(self.parts, masks_start=False)).passes if self.parts.masks_start else None,
        )
