"""MTP modules: DeepSeek-V3's, stored behind the layers of the target, and MiMo's, stored apart.

Knows: their tensor names, the order of concatenation, which state of the target they read and what they are fed when
one module drafts several tokens. Does not know: how drafts grow.

DeepSeek    h' = eh_proj [enorm embed(x); hnorm h]; a layer of the target's kind; logits = shared_head. Stored as
            `model.layers.{num_hidden_layers}`. The embedding at position 0 is zero. h is the state after the final
            norm and shared_head.norm(y) is fed back, as engines that measured it do (vLLM 45895, ROCm/ATOM 1764).
MiMo        h' = input_proj [hidden_layernorm h; token_layernorm embed(x)], the other way round; a Llama-like layer;
            logits = the target's lm_head of final_layernorm(y). Stored as `model.mtp_layers.0`. h is the state before
            the final norm and y is fed back.
Sources: DeepSeek-V3 (2412.19437) and its README_WEIGHTS.md; vLLM models/deepseek_mtp.py, mimo.py and mimo_mtp.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.config import HeadWeights
from forerun.errors import ModelError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.layers.embedding import Embedding
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.build import Builder
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.families import FAMILIES
from forerun.models.fields import Fields, words
from forerun.models.heads.eagle import as_it_is
from forerun.models.heads.head import DraftHead, HeadParts
from forerun.models.heads.reading import SKIP_SLOT_ZERO, HeadReader, check_hidden_size, num_bytes, num_layers
from forerun.models.heads.source import open_head
from forerun.quant.rounded import ChooseFormat, choose_for
from forerun.weights.checkpoint import Checkpoint

MIMO = "model.mtp_layers"
MTP_FIELDS = words("num_nextn_predict_layers num_mtp_layers target_hidden_size")


@dataclass(frozen=True, slots=True)
class MtpEntrance:
    """Normed embedding and normed state, side by side, through one matrix; then the layer's first norm."""

    token_norm: RMSNorm
    state_norm: RMSNorm
    projection: Linear
    attention_norm: RMSNorm
    state_first: bool

    def __call__(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See `heads.head.Entrance`."""
        token, state = self.token_norm(embedded), self.state_norm(feature)
        pair = [state, token] if self.state_first else [token, state]
        residual = self.projection(torch.cat(pair, dim=1))  # [M, H]
        return self.attention_norm(residual), residual


def read_mtp(source: Checkpoint, target: Decoder, kernels: Kernels, weights: HeadWeights = "stored") -> DraftHead:
    """The MTP module of a folder, the target's own or another; raises ModelError if it does not fit."""
    choose_format = choose_for(weights)
    deepseek = f"model.layers.{num_layers(target)}"
    if source.has(f"{deepseek}.eh_proj.weight"):
        return _DeepSeek(source, target, kernels, deepseek, choose_format).read()
    if source.has(f"{MIMO}.0.input_proj.weight"):
        return _read_mimo(source, target, kernels, choose_format)
    raise UnsupportedError(
        f"{source.folder} has no MTP module for this target: neither {deepseek}.eh_proj.weight (DeepSeek) nor "
        f"{MIMO}.0.input_proj.weight (MiMo); give the folder of a module with --draft-model, or choose another drafter"
    )


def holds_mtp(folder: Path) -> bool:
    """Whether a folder holds an MTP module. Raises ModelError if it holds no weights."""
    stored = Checkpoint.open(folder)
    return stored.has(f"{MIMO}.0.input_proj.weight") or any(name.endswith(".eh_proj.weight") for name in stored)


def brings_mtp(name_or_folder: str | Path) -> bool:
    """Whether a model's own checkpoint holds a module that `read_mtp` reads; False if there is no such model.

    Tensors are not read, only their names.
    """
    try:
        source = open_head(name_or_folder)
    except ModelError:  # loading the model reports what is wrong
        return False
    if source.config.get("model_type") not in FAMILIES:  # transformers gives no state after the final norm
        return False
    num = source.config.get("num_hidden_layers") or 0
    deepseek = source.has(f"model.layers.{num}.eh_proj.weight")
    second = f"model.layers.{num + 1}." if deepseek else f"{MIMO}.1."
    is_one = not any(name.startswith(second) for name in source)
    return is_one and (deepseek or source.has(f"{MIMO}.0.input_proj.weight"))


# -- MiMo ----------------------------------------------------------------------------------------------------------


def _read_mimo(source: Checkpoint, target: Decoder, kernels: Kernels, choose_format: ChooseFormat) -> DraftHead:
    raw, prefix = source.config, f"{MIMO}.0"
    _refuse_several(source, f"{MIMO}.1.")
    check_hidden_size(source, Fields(raw, {}), target)
    family = FAMILIES.get(str(raw.get("model_type")))
    known = MTP_FIELDS | (family.fields if family is not None else frozenset())
    reader = HeadReader.open(source, raw, known, prefix, target, kernels, choose_format)
    builder, size = reader.builder, reader.hidden_size
    layer = reader.layer(prefix, size, reader.rope(), None)
    entrance = MtpEntrance(
        token_norm=builder.norm(f"{prefix}.token_layernorm", size),
        state_norm=builder.norm(f"{prefix}.hidden_layernorm", size),
        projection=reader.linear(f"{prefix}.input_proj", size, 2 * size),
        attention_norm=builder.norm(f"{prefix}.input_layernorm", size),
        state_first=True,
    )
    norm = builder.norm(f"{prefix}.final_layernorm", size)
    reader.refuse_unread(own=f"{MIMO}.")
    return DraftHead(
        HeadParts(
            embedding=target.parts.embedding,
            entrance=entrance,
            layers=(layer,),
            exit=reader.exit(norm, target.parts.lm_head, feeds_normed=False),
            fuse=as_it_is,
            hidden_layers=(num_layers(target),),
            masks_start=False,
            kv_specs=reader.kv_specs([layer]),
            state_size=target.hidden_size,
            weight_bytes=num_bytes([layer], [entrance.projection], 0),
        )
    )


def _refuse_several(source: Checkpoint, prefix: str) -> None:
    """Refuse several modules: one drafts all tokens here, but each of several was trained for one depth."""
    if any(name.startswith(prefix) for name in source):
        raise UnsupportedError(
            f"{source.folder} has several MTP modules ({prefix}*); supported is one, which drafts several tokens"
        )


# -- DeepSeek ------------------------------------------------------------------------------------------------------


class _DeepSeek:
    """Reads the module below `prefix`, whose layer is of the target's own family."""

    def __init__(
        self, source: Checkpoint, target: Decoder, kernels: Kernels, prefix: str, choose_format: ChooseFormat
    ) -> None:
        raw = source.config
        _refuse_several(source, f"model.layers.{num_layers(target) + 1}.")
        check_hidden_size(source, Fields(raw, {}), target)
        family = FAMILIES.get(str(raw.get("model_type")))
        if family is None:
            raise UnsupportedError(
                f"{source.folder}: config.json names model_type {raw.get('model_type')!r}; an MTP module stored behind "
                f"the target's layers is supported for {', '.join(FAMILIES)}"
            )
        config = ModelConfig.read(raw, family)
        self.source, self.target, self.prefix = source, target, prefix
        self.builder = Builder(config, family, source, kernels, None, target.max_position, choose_format)
        self.reader = HeadReader(source, target, self.builder, config)

    def read(self) -> DraftHead:
        """The module."""
        layer = self.builder.layer(num_layers(self.target))
        assert layer.attention_norm is not None  # the entrance's
        attention = layer.attending
        if not attention.is_latent and attention.shape.window == 0:
            attention.shape = replace(attention.shape, window=SKIP_SLOT_ZERO)
        size, shared = self.target.hidden_size, self.target.parts
        entrance = MtpEntrance(
            token_norm=self.builder.norm(f"{self.prefix}.enorm", size),
            state_norm=self.builder.norm(f"{self.prefix}.hnorm", size),
            projection=self.reader.linear(f"{self.prefix}.eh_proj", size, 2 * size),
            attention_norm=layer.attention_norm,
            state_first=False,
        )
        embedding, lm_head = self._embedding(), self._lm_head()
        norm = self.builder.norm(f"{self.prefix}.shared_head.norm", size)
        self.reader.refuse_unread(own=f"{self.prefix}.")
        own = [entrance.projection, *([] if lm_head is shared.lm_head else [lm_head])]
        return DraftHead(
            HeadParts(
                embedding=embedding,
                entrance=entrance,
                layers=(layer,),
                exit=self.reader.exit(norm, lm_head, feeds_normed=True),
                fuse=as_it_is,
                hidden_layers=(num_layers(self.target) + 1,),
                masks_start=True,
                kv_specs=self.reader.kv_specs([layer]),
                state_size=size,
                weight_bytes=num_bytes([layer], own, 0 if embedding is shared.embedding else embedding.nbytes),
            )
        )

    def _embedding(self) -> Embedding:
        return self.reader.embedding(f"{self.prefix}.embed_tokens")

    def _lm_head(self) -> Linear:
        module = f"{self.prefix}.shared_head.head"
        if not self.source.has(f"{module}.weight"):
            return self.target.parts.lm_head
        return self.reader.linear(module, self.target.vocab_size, self.target.hidden_size)
