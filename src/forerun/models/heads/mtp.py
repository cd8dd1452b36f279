"""MTP modules: DeepSeek-V3's, stored behind the layers of the target, Qwen3-Next's and MiMo's, stored apart.

Knows: their tensor names, the order of concatenation, which state of the target they read and what they are fed when
one module drafts several tokens. Does not know: how drafts grow.

DeepSeek    h' = eh_proj [enorm embed(x); hnorm h]; a layer of the target's kind; logits = shared_head. Stored as
            `model.layers.{num_hidden_layers}`. The embedding at position 0 is zero. h is the state after the final
            norm and shared_head.norm(y) is fed back, as engines that measured it do (vLLM 45895, ROCm/ATOM 1764).
            GLM-4.5 to 4.7 have the same, in GGUF files, too.
Step-3.5    As DeepSeek, with `transformer.shared_head`, a layer that is no mixture and nothing zero at position 0. h is
            the state before the final norm and y is fed back. Three modules, one behind the other (`heads.chained`).
Qwen3-Next  h' = fc [pre_fc_norm_embedding embed(x); pre_fc_norm_hidden h]; a layer of the target's kind that attends;
            logits = the target's lm_head of norm(y), which is fed back. Stored as `mtp`. h is the state after the final
            norm. Qwen3.5 and 3.6 have the same.
Ernie 4.5   As Qwen3-Next, but the layer has no experts and norm is the target's own, as its makers compute it; other
            engines leave it out. Stored as `model.mtp_emb_norm.0`, `mtp_hidden_norm`, `mtp_linear_proj`, `mtp_block`.
Gemma 4     Has an assistant, a checkpoint of its own: see `heads.assistant`.
MiMo-V2     As Qwen3-Next, with a layer in a window and without experts. Three modules, one behind the other, stored as
            `model.mtp.layers.0` and so on.
LongCat     As Qwen3-Next, with one attention and one dense part. Stored as `model.mtp`.
Nemotron-H  As Qwen3-Next with DeepSeek's names, final_layernorm for norm. Attention and feed-forward part are layers of
            their own, as in the target, stored as `mtp.layers.0` and `mtp.layers.1`.
MiMo        h' = input_proj [hidden_layernorm h; token_layernorm embed(x)], the other way round; a Llama-like layer;
            logits = the target's lm_head of final_layernorm(y). Stored as `model.mtp_layers.0`. h is the state before
            the final norm and y is fed back.
Sources: DeepSeek-V3 (2412.19437) and its README_WEIGHTS.md; vLLM models/deepseek_mtp.py, glm4_moe_mtp.py,
step3p5_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py, mimo_v2_mtp.py, longcat_flash_mtp.py, nemotron_h_mtp.py, mimo.py and
mimo_mtp.py; FastDeploy models/ernie4_5_mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.config import HeadWeights
from forerun.errors import ModelError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.layers.attention import Attention
from forerun.layers.rotary import RopeSpec
from forerun.models.build import Builder
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, DecoderLayer
from forerun.models.families import FAMILIES
from forerun.models.families.nemotron_h import module_kinds
from forerun.models.family import same_names
from forerun.models.fields import Fields, words
from forerun.models.heads.assistant import ASSISTANTS, read_assistant
from forerun.models.heads.chained import ChainedHeads
from forerun.models.heads.eagle import as_it_is
from forerun.models.heads.head import DraftHead, HeadParts, PairEntrance
from forerun.models.heads.mtp_layouts import ERNIE, QWEN, MtpLayout, Source, chain_of, layouts
from forerun.models.heads.reading import (
    SKIP_SLOT_ZERO,
    HeadReader,
    check_hidden_size,
    num_bytes,
    num_layers,
    own_output,
)
from forerun.models.loader import gguf_family, open_checkpoint
from forerun.models.trimmed import KeptTokens
from forerun.quant.rounded import ChooseFormat, choose_for
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.resolve import find_local, resolve_model

MIMO = "model.mtp_layers"
PAIR = ".eh_proj.weight"  # ends the name of a tensor that most modules have once
OWN_TABLE = "mtp_use_dedicated_embeddings"  # a field
MTP_FIELDS = words("num_nextn_predict_layers num_mtp_layers target_hidden_size")


_APART_IN_GGUF = ("step3p5", "mimo_v2_flash")  # whose GGUF files name modules as DeepSeek's, which these are not


def open_mtp(name_or_folder: str | Path) -> Source:
    """The tensors a module is among, of a folder, a GGUF file or a hub id. Raises ModelError."""
    return open_checkpoint(resolve_model(name_or_folder))


def read_mtp(
    source: Source, target: Decoder, kernels: Kernels, weights: HeadWeights = "stored", kept: KeptTokens | None = None
) -> DraftHead:
    """The MTP module of a folder, or its modules, the target's own or another; raises ModelError if it does not fit.

    kept: the tokens it is to propose; None: all.
    """
    choose_format, layout = choose_for(weights), _find_layout(source, num_layers(target))
    if isinstance(source, Checkpoint) and source.config.get("model_type") in ASSISTANTS:
        return read_assistant(source, target, kernels, choose_format, kept)
    if layout is not None:
        tables = dict[RopeSpec, Tensor]()
        read = [
            _FamilyModule(source, target, kernels, each, choose_format, kept).read(depth, tables)
            for depth, each in enumerate(chain_of(source, layout))
        ]
        return read[0] if len(read) == 1 else ChainedHeads(read)
    if isinstance(source, Checkpoint) and source.has(f"{MIMO}.0.input_proj.weight"):
        return _read_mimo(source, target, kernels, choose_format, kept)
    raise UnsupportedError(
        f"{source.folder} has no MTP module for this target: choose another drafter (ngram needs no model), or give "
        "the folder of one with --draft-model. Known are modules as DeepSeek, GLM, Step, Qwen, Ernie, MiMo, MiMo-V2, "
        "LongCat and Nemotron-H publish them, and Gemma 4's assistants"
    )


def _find_layout(source: Source, num_layers: int) -> MtpLayout | None:
    if isinstance(source, GgufCheckpoint) and source.config.get("model_type") in _APART_IN_GGUF:
        return None
    return next((layout for layout in layouts(num_layers) if layout.is_in(source)), None)


def holds_mtp(folder: Path) -> bool:
    """Whether a folder holds an MTP module. Raises ModelError if it holds no weights."""
    ends = (PAIR, *(f"{one.projection}.weight" for one in (QWEN, ERNIE)), f"{MIMO}.0.input_proj.weight")
    checkpoint = Checkpoint.open(folder)
    return checkpoint.config.get("model_type") in ASSISTANTS or any(name.endswith(ends) for name in checkpoint)


def num_modules(name_or_folder: str | Path) -> int:
    """How many modules `read_mtp` reads of a model's own checkpoint; 0 if it cannot, or the model is not here yet.

    Tensors are not read, only their names.
    """
    try:
        if find_local(str(name_or_folder)) is None:
            return 0
        source = open_mtp(name_or_folder)
    except ModelError:  # loading the model reports what is wrong
        return 0
    if source.config.get("model_type") not in FAMILIES:  # transformers gives no state after the final norm
        return 0
    layout = _find_layout(source, source.config.get("num_hidden_layers") or 0)
    if source.config.get(OWN_TABLE) or (layout is None and not source.has(f"{MIMO}.0.input_proj.weight")):
        return 0
    second = f"{MIMO}.1." if layout is None else layout.second
    if second and any(name.startswith(second) for name, *_ in source.stored()):
        return 0
    return 1 if layout is None else len(chain_of(source, layout))


# -- MiMo ----------------------------------------------------------------------------------------------------------


def _read_mimo(
    source: Checkpoint, target: Decoder, kernels: Kernels, choose_format: ChooseFormat, kept: KeptTokens | None
) -> DraftHead:
    raw, prefix = source.config, f"{MIMO}.0"
    _refuse_several(source, f"{MIMO}.1.")
    check_hidden_size(source, Fields(raw, {}), target)
    family = FAMILIES.get(str(raw.get("model_type")))
    known = MTP_FIELDS | (family.fields if family is not None else frozenset())
    reader = HeadReader.open(source, raw, known, prefix, target, kernels, choose_format, kept=kept)
    builder, size = reader.builder, reader.hidden_size
    layer = reader.layer(prefix, size, reader.rope(), None)
    entrance = PairEntrance(
        token_norm=builder.norm(f"{prefix}.token_layernorm", size),
        state_norm=builder.norm(f"{prefix}.hidden_layernorm", size),
        projection=reader.linear(f"{prefix}.input_proj", size, 2 * size),
        attention_norm=builder.norm(f"{prefix}.input_layernorm", size),
        state_first=True,
    )
    outcome = reader.exit(builder.norm(f"{prefix}.final_layernorm", size), "", feeds_normed=False)
    reader.refuse_unread(own=f"{MIMO}.")
    return DraftHead(
        HeadParts(
            embedding=target.parts.embedding,
            entrance=entrance,
            layers=(layer,),
            exit=outcome,
            fuse=as_it_is,
            hidden_layers=(num_layers(target),),
            masks_start=False,
            kv_specs=reader.kv_specs([layer]),
            state_size=target.hidden_size,
            weight_bytes=num_bytes([layer], [entrance.projection, *own_output(outcome, target)], 0),
        )
    )


def _refuse_several(source: Source, prefix: str) -> None:
    """Refuse several modules where one is trained to draft all tokens."""
    if prefix and any(name.startswith(prefix) for name, *_ in source.stored()):
        raise UnsupportedError(
            f"{source.folder} has several MTP modules ({prefix}*); supported is one, which drafts several tokens"
        )


# -- DeepSeek, GLM, Qwen, Ernie ------------------------------------------------------------------------------------


class _FamilyModule:
    """Reads a module whose layer is of the target's own family."""

    def __init__(
        self, source: Source, target: Decoder, kernels: Kernels, layout: MtpLayout, choose_format: ChooseFormat,
        kept: KeptTokens | None,
    ) -> None:  # fmt: skip
        raw = source.config
        _refuse_several(source, layout.second)
        check_hidden_size(source, Fields(raw, {}), target)
        if raw.get(OWN_TABLE):
            raise UnsupportedError(
                f"{source.folder}: config.json sets {OWN_TABLE}; supported are MTP modules that share the target's "
                "embedding; choose another drafter"
            )
        family = gguf_family(source) if isinstance(source, GgufCheckpoint) else FAMILIES.get(str(raw.get("model_type")))
        if family is None:
            raise UnsupportedError(
                f"{source.folder}: config.json names model_type {raw.get('model_type')!r}; MTP modules with a layer of "
                "the target's kind run for families that forerun runs itself (docs/models.md): choose another drafter"
            )
        names = replace(family.names, layer=layout.layer, **layout.names)
        config, family = ModelConfig.read(raw, family), replace(family, names=names, names_of=same_names)
        config = replace(config, experts=None) if layout.is_dense else config
        config = _in_two(config, raw) if layout.in_two else config
        self.source, self.target, self.layout = source, target, layout
        self.builder = Builder(config, family, source, kernels, None, target.max_position, choose_format)
        self.reader = HeadReader(source, target, self.builder, config, kept)

    def read(self, depth: int, tables: dict[RopeSpec, Tensor]) -> DraftHead:
        """Module 0, 1, ... of several; `tables`: of rotations, those of modules read before."""
        layout, size, shared = self.layout, self.target.hidden_size, self.target.parts
        layer = self._layer_in_two() if layout.in_two else self._layer(depth, tables)
        assert layer.attention_norm is not None  # the entrance's
        attention = layer.attending
        if not attention.is_latent and attention.shape.window == 0:
            attention.shape = replace(attention.shape, window=SKIP_SLOT_ZERO)
        entrance = PairEntrance(
            token_norm=self.builder.norm(layout.token_norm, size),
            state_norm=self.builder.norm(layout.state_norm, size),
            projection=self.reader.linear(layout.projection, size, 2 * size),
            attention_norm=layer.attention_norm,
            state_first=False,
        )
        embedding = self.reader.embedding(layout.embedding)
        norm = self.builder.norm(layout.final_norm, size) if layout.final_norm else shared.final_norm
        outcome = self.reader.exit(norm, layout.lm_head, feeds_normed=not layout.before_norm)
        self.reader.refuse_unread(own=layout.own)
        own = [entrance.projection, *own_output(outcome, self.target)]
        return DraftHead(
            HeadParts(
                embedding=embedding,
                entrance=entrance,
                layers=(layer,),
                exit=outcome,
                fuse=as_it_is,
                hidden_layers=(num_layers(self.target) + (not layout.before_norm),),
                masks_start=layout.masks_start,
                kv_specs=self.reader.kv_specs([layer]),
                state_size=size,
                weight_bytes=num_bytes([layer], own, 0 if embedding is shared.embedding else embedding.nbytes),
            )
        )

    def _layer(self, depth: int, tables: dict[RopeSpec, Tensor]) -> DecoderLayer:
        index = num_layers(self.target) + depth
        rope = self.builder.config.rope_of(index)
        layer = self.builder.layer(index, tables.get(rope))
        if isinstance(layer.attention, Attention):
            tables[rope] = layer.attention.rope_table
        return layer

    def _layer_in_two(self) -> DecoderLayer:
        attending, feeding = self.builder.layer(0), self.builder.layer(1)
        return replace(attending, mlp_norm=feeding.attention_norm, mlp=feeding.mlp)


def _in_two(config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a module's two layers; raises UnsupportedError for other layers than one of each part."""
    kinds = module_kinds(Fields(raw, {}))
    if kinds not in (("full_attention", "moe"), ("full_attention", "mlp")):
        raise UnsupportedError(
            f"config.json: mtp_layers_block_type or mtp_hybrid_override_pattern asks for layers {', '.join(kinds)} in "
            "the MTP module; supported is one of full_attention, then one of moe or mlp; choose another drafter"
        )
    experts = None if config.experts is None else replace(config.experts, dense=frozenset({0}))
    is_sparse = kinds[1] == "moe"
    return replace(config, num_layers=2, parts=("mixer", "mlp"), recurrent=None, experts=experts if is_sparse else None)
