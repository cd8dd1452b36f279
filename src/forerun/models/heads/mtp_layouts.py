"""Where MTP modules have their tensors whose layer is of the target's family.

Knows: tensor names, and what else differs (`heads.mtp` has the formulas). Does not know: how modules are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint

MTP = "mtp"  # before the names of several families' modules
Source = Checkpoint | GgufCheckpoint


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Where a module has its tensors whose layer is of the target's family."""

    own: str  # before all its names
    layer: str
    token_norm: str
    state_norm: str
    projection: str
    final_norm: str = ""  # "": the target's
    lm_head: str = ""  # its own; "": it has none
    embedding: str = ""
    second: str = ""  # before the names of a second module, which is refused; "": see `at_depth`
    at_depth: Callable[[int], MtpLayout] | None = None  # the layout of module 1, 2, ... of several; None: there is one
    before_norm: bool = False  # reads the target's state before its final norm, and is fed its own before it
    masks_start: bool = False
    is_dense: bool = False  # the layer has no experts, whatever the target's have
    in_two: bool = False  # its two parts are layers of their own, as in Nemotron-H
    names: Mapping[str, Any] = field(default_factory=dict)  # of its layer, where they differ from the target's layers
    told_by_norm: bool = False  # by `final_norm`: another layout has a projection of the same name

    def is_in(self, source: Source) -> bool:
        """Whether the checkpoint has a module with this layout."""
        return source.has(f"{self.final_norm if self.told_by_norm else self.projection}.weight")


def _deepseek(num_layers: int) -> MtpLayout:
    prefix = f"model.layers.{num_layers}"
    return MtpLayout(
        own=f"{prefix}.",
        second=f"model.layers.{num_layers + 1}.",
        layer=prefix,
        token_norm=f"{prefix}.enorm",
        state_norm=f"{prefix}.hnorm",
        projection=f"{prefix}.eh_proj",
        final_norm=f"{prefix}.shared_head.norm",
        lm_head=f"{prefix}.shared_head.head",
        embedding=f"{prefix}.embed_tokens",
        masks_start=True,
    )


def _step(num_layers: int, depth: int = 0) -> MtpLayout:
    prefix = f"model.layers.{num_layers + depth}"
    return MtpLayout(
        at_depth=partial(_step, num_layers),
        own=f"{prefix}.",
        layer=prefix,
        token_norm=f"{prefix}.enorm",
        state_norm=f"{prefix}.hnorm",
        projection=f"{prefix}.eh_proj",
        final_norm=f"{prefix}.transformer.shared_head.norm",
        lm_head=f"{prefix}.transformer.shared_head.output",
        before_norm=True,
        told_by_norm=True,
    )


QWEN = MtpLayout(
    own=f"{MTP}.",
    second=f"{MTP}.layers.1.",
    layer=f"{MTP}.layers.0",
    token_norm=f"{MTP}.pre_fc_norm_embedding",
    state_norm=f"{MTP}.pre_fc_norm_hidden",
    projection=f"{MTP}.fc",
    final_norm=f"{MTP}.norm",
)


ERNIE = MtpLayout(
    own="model.mtp_",
    second="model.mtp_block.1.",
    layer="model.mtp_block.0",
    token_norm="model.mtp_emb_norm.0",
    state_norm="model.mtp_hidden_norm.0",
    projection="model.mtp_linear_proj.0",
    is_dense=True,
)


def _mimo_v2(depth: int = 0) -> MtpLayout:
    prefix = f"model.mtp.layers.{depth}"
    return MtpLayout(
        at_depth=_mimo_v2,
        own=f"{prefix}.",
        layer=prefix,
        token_norm=f"{prefix}.enorm",
        state_norm=f"{prefix}.hnorm",
        projection=f"{prefix}.eh_proj",
        final_norm=f"{prefix}.final_layernorm",
        is_dense=True,
        names={"mlp_norm": "pre_mlp_layernorm"},
        told_by_norm=True,
    )


_LONGCAT = MtpLayout(
    own="model.mtp.",
    layer="model.mtp.layers.0",
    token_norm="model.mtp.layers.0.enorm.m",
    state_norm="model.mtp.layers.0.hnorm.m",
    projection="model.mtp.layers.0.eh_proj",
    final_norm="model.mtp.norm",
    embedding="model.mtp.embed_tokens",
    is_dense=True,
    names={
        "gate_up": ("transformer_layer.mlp.gate_proj", "transformer_layer.mlp.up_proj"),
        "down": "transformer_layer.mlp.down_proj",
    },
    told_by_norm=True,
)


_NEMOTRON = MtpLayout(
    own=f"{MTP}.",
    second=f"{MTP}.layers.2.",
    layer=f"{MTP}.layers.{{index}}",
    token_norm=f"{MTP}.layers.0.enorm",
    state_norm=f"{MTP}.layers.0.hnorm",
    projection=f"{MTP}.layers.0.eh_proj",
    final_norm=f"{MTP}.layers.1.final_layernorm",
    in_two=True,
)


def layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    """Those of modules whose layer is of the target's family, which has `num_layers`."""
    return _step(num_layers), _deepseek(num_layers), QWEN, ERNIE, _mimo_v2(), _LONGCAT, _NEMOTRON


def chain_of(source: Source, layout: MtpLayout) -> list[MtpLayout]:
    """The layouts of a checkpoint's modules, of which this is the first."""
    found, names = [layout], [name for name, *_ in source.stored()]
    while layout.at_depth is not None:
        further = layout.at_depth(len(found))
        if not any(name.startswith(further.own) for name in names):
            break
        found.append(further)
    return found
