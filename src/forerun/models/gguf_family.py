"""Families as GGUF files have them: norms by their GGUF names and with whole weights, decays that are no logarithms.

Knows: what llama.cpp's converter names and stores alike in all families, and names of recurrent layers' tensors. Does
not know: the other names, which `weights.gguf_names` translates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.kernels.ops import SQUARED_RELU
from forerun.models.family import (
    ConvNames,
    DeltaNames,
    ExpertNames,
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
_EXPERTS = ("mlp.experts.{index}", "block_sparse_moe.experts.{index}")  # which `weights.gguf_names` translates
_DENSE = {"gate_up": TensorNames().gate_up, "down": TensorNames().down}  # which it translates, too
_LATENTS = ExpertNames(latent_down="ffn_latent_down", latent_up="ffn_latent_up")
_SSM = {"decay": "ssm_a", "bias": "ssm_dt.bias", "norm": "ssm_norm.weight", "out": "ssm_out"}


def as_in_gguf(family: Family) -> Family:
    """The family, with "longrope": a file of any may hold a divisor for each rope frequency."""
    names = family.names if family.recurrent is no_recurrence else _recurrent_names(family)
    norms: dict[str, Any] = {field: own if getattr(family.names, field) else "" for field, own in _NORMS.items()}
    experts = names.experts if names.experts.expert in _EXPERTS else ExpertNames()
    dense: dict[str, Any] = {} if names.down != "feed_forward.down_proj" else _DENSE
    return replace(
        family,
        names=replace(names, experts=experts, sinks=TensorNames().sinks, **norms, **dense),
        norm_offset=0.0,
        log_decay=False,
        rope_kinds=(*family.rope_kinds, "longrope"),
    )


def _recurrent_names(family: Family) -> TensorNames:
    """The same for all families, whatever names their published checkpoints have."""
    has_gates = family.gate != SQUARED_RELU
    return TensorNames(
        final_norm="token_embd_norm" if family.model_type.startswith("lfm2") else "model.norm",
        gate_up=TensorNames().gate_up if has_gates else ("mlp.up_proj",),
        experts=_LATENTS if has_gates else replace(_LATENTS, gate_up=("up_proj",)),
        delta=_delta_names(len(family.names.delta.project)),
        conv=ConvNames("shortconv.in_proj", "shortconv.conv.weight", "shortconv.out_proj"),
        mamba=MambaNames("ssm_in", conv="ssm_conv1d", skip="ssm_d", **_SSM),
    )


def _delta_names(num_modules: int) -> DeltaNames:
    """Those of a gated delta net whose published checkpoints project by so many modules."""
    if num_modules == 6:
        attention = TensorNames()
        conv = tuple(f"ssm_conv1d_{part}.weight" for part in "qkv")
        project = (*attention.qkv, "ssm_g_a", "ssm_beta", "ssm_f_a")
        return DeltaNames(project, "ssm_g_b", "ssm_f_b", conv, is_tiled=False, **{**_SSM, "out": attention.out})
    is_fused = num_modules == 2
    gates = ("ssm_ba",) if is_fused else ("ssm_beta", "ssm_alpha")
    project = ("attn_qkv", "attn_gate", *gates)
    return DeltaNames(project, conv=("ssm_conv1d.weight",), is_tiled=not is_fused, **_SSM)
