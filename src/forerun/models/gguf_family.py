"""Families as GGUF files have them: norms by their GGUF names and with whole weights, decays that are no logarithms.

Knows: what llama.cpp's converter names and stores alike in all families, and names of recurrent layers' tensors. Does
not know: the other names, which `weights.gguf_names` translates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.models.family import (
    SQUARED_RELU,
    ConvNames,
    DeltaNames,
    Family,
    MambaNames,
    TensorNames,
    no_recurrence,
)

_NORMS = {
    "attention_norm": "attn_norm",
    "after_attention": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "after_mlp": "post_ffw_norm",
}
_SSM = {"decay": "ssm_a", "bias": "ssm_dt.bias", "norm": "ssm_norm.weight", "out": "ssm_out"}


def as_in_gguf(family: Family) -> Family:
    """The family, with "longrope": a file of any may hold a divisor for each rope frequency."""
    names = family.names if family.recurrent is no_recurrence else _recurrent_names(family)
    norms: dict[str, Any] = {field: own if getattr(family.names, field) else "" for field, own in _NORMS.items()}
    return replace(
        family,
        names=replace(names, **norms),
        norm_offset=0.0,
        log_decay=False,
        rope_kinds=(*family.rope_kinds, "longrope"),
    )


def _recurrent_names(family: Family) -> TensorNames:
    """The same for all families, whatever names their published checkpoints have."""
    is_fused = len(family.names.delta.project) == 2
    gates = ("ssm_ba",) if is_fused else ("ssm_beta", "ssm_alpha")
    project = ("attn_qkv", "attn_gate", *gates)
    return TensorNames(
        final_norm="token_embd_norm" if family.model_type.startswith("lfm2") else "model.norm",
        gate_up=("mlp.up_proj",) if family.gate == SQUARED_RELU else TensorNames().gate_up,
        delta=DeltaNames(project, conv="ssm_conv1d.weight", is_tiled=not is_fused, **_SSM),
        conv=ConvNames("shortconv.in_proj", "shortconv.conv.weight", "shortconv.out_proj"),
        mamba=MambaNames("ssm_in", conv="ssm_conv1d", skip="ssm_d", **_SSM),
    )
