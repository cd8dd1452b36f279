"""Reading the rotary part of config.json, in its old spelling (`rope_theta`, `rope_scaling`) and in that of
transformers 5 (`rope_parameters`).

Knows: the fields of every rope scaling and which of them a kind reads. Does not know: the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.layers.rotary import RopeSpec
from forerun.models.family import Family
from forerun.models.fields import THROUGH_TRANSFORMERS, Fields, words
from forerun.models.layer_types import LAYER_TYPES

ROPE_FIELDS = words("rope_theta rope_scaling rope_parameters original_max_position_embeddings partial_rotary_factor")
LOCAL_BASE = "rope_local_base_freq"
MAX_FACTOR = 10_000.0  # by which a context is stretched; beyond, float32 frequencies are too coarse
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_BEYOND_ORIGINAL = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
# finetuned says that the model was trained with the scaling, which changes nothing.
_YARN = (
    "factor original_max_position_embeddings attention_factor attn_factor mscale mscale_all_dim beta_fast beta_slow "
    "truncate finetuned"
)
_LLAMA3 = "factor original_max_position_embeddings low_freq_factor high_freq_factor"
_LONGROPE = "factor original_max_position_embeddings attention_factor short_factor long_factor"
_READ_BY_KIND: dict[str, frozenset[str]] = {
    "default": words("factor mrope_section mrope_interleaved"),  # positions of text are the same on all three axes
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": words(_YARN),
    "llama3": words(_LLAMA3),
    "longrope": words(_LONGROPE),
    "proportional": frozenset({"factor"}),
}
_OLD_NAMES = {"su": "longrope"}


def read_rope(raw: Mapping[str, Any], fields: Fields, family: Family, head_dim: int) -> RopeSpec:
    """The rope of a config, of layers without a window; raises UnsupportedError for what is not understood."""
    table = _rope_table(raw, family, "full_attention") or family.defaults.get("rope_scaling", {})
    return _read(table, fields, family, head_dim, fields.number("rope_theta", default=10000.0))


def read_window_rope(raw: Mapping[str, Any], fields: Fields, family: Family, head_dim: int) -> RopeSpec:
    """The rope of layers with a window, in families where these have their own."""
    table = _rope_table(raw, family, "sliding_attention")
    theta = fields.number(LOCAL_BASE, default=fields.number("rope_theta", default=10000.0), minimum=2.0)
    if raw.get("rope_parameters"):
        return _read(table, fields, family, head_dim, theta)
    return RopeSpec(rotary_dim=head_dim, theta=theta)


def _read(table: Mapping[str, Any], fields: Fields, family: Family, head_dim: int, theta: float) -> RopeSpec:
    kind = _kind(table, family)
    _refuse_unread(table, kind, family)
    scaling = Fields(table, {}, where="config.json's rope scaling")
    rotary_dim = head_dim if kind == "proportional" else _rotary_dim(fields, scaling, family, head_dim)
    _check_dimensions(rotary_dim, kind)
    theta = scaling.number("rope_theta", default=theta, minimum=2.0)
    return _SPECS[kind](scaling, fields, rotary_dim, theta)


def reachable_positions(rope: RopeSpec, max_position: int) -> int:
    """How many positions a checkpoint can use: what config.json says, stretched by its scaling where that says so."""
    if rope.kind == "longrope":
        return min(max_position, rope.original_max_position)
    if rope.kind in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.kind == "yarn":
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position


def _rope_table(raw: Mapping[str, Any], family: Family, layer_type: str) -> Mapping[str, Any]:
    """The object with the rope's fields, of layers of this type where they differ by type."""
    old, new = raw.get("rope_scaling"), raw.get("rope_parameters")
    if old and new and old != new:
        raise CheckpointError("config.json has rope_scaling and rope_parameters that differ; keep one of them")
    table = new or old or {}
    if not isinstance(table, Mapping):
        raise CheckpointError(f"config.json: the rope scaling must be an object, got {table!r}; correct the file")
    if family.window_rope and new:
        table = _of_type(table, layer_type)
    nested = [name for name, value in table.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedError(
            f"config.json: rope_parameters differ by layer type ({', '.join(nested)}); supported is one rope for all "
            "layers; " + THROUGH_TRANSFORMERS
        )
    return table


def _of_type(tables: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """The rope of one type of layers."""
    if set(tables) - set(LAYER_TYPES) or not all(isinstance(table or {}, Mapping) for table in tables.values()):
        raise UnsupportedError(
            f"config.json: rope_parameters must hold an object for each of {', '.join(LAYER_TYPES)}; got "
            f"{str(tables)[:80]}"
        )
    return tables.get(layer_type) or {}


def _kind(table: Mapping[str, Any], family: Family) -> str:
    kind = table.get("rope_type", table.get("type", "default"))
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in family.rope_kinds:
        raise UnsupportedError(
            f"config.json: rope scaling type {kind!r} is not supported for {family.model_type} models; supported "
            f"are {', '.join(family.rope_kinds)}; " + THROUGH_TRANSFORMERS
        )
    return str(kind)


def _refuse_unread(table: Mapping[str, Any], kind: str, family: Family) -> None:
    allowed = _READ_BY_KIND[kind] | _ALWAYS | (_BEYOND_ORIGINAL if family.within_original else frozenset())
    unread = sorted(name for name, value in table.items() if name not in allowed and value is not None)
    if unread:
        raise UnsupportedError(
            f"config.json: rope scaling of type {kind!r} has fields forerun does not know: {', '.join(unread)}; "
            f"known are {', '.join(sorted(allowed))}; {THROUGH_TRANSFORMERS}"
        )


def _rotary_dim(fields: Fields, scaling: Fields, family: Family, head_dim: int) -> int:
    natural = fields.integer("rotary_dim") / head_dim if fields.get("rotary_dim") is not None else 1.0
    share = scaling.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=natural))
    if not 0 < share <= 1 or (share != 1 and not family.partial_rotary):
        raise UnsupportedError(
            f"config.json: partial_rotary_factor is {share:g}; {family.model_type} models support "
            + ("values above 0 up to 1" if family.partial_rotary else "1 only")
        )
    return int(head_dim * share)


def _check_dimensions(rotary_dim: int, kind: str) -> None:
    least = 4 if kind == "dynamic" else 2
    if rotary_dim % 2 or rotary_dim < least:
        raise UnsupportedError(
            f"config.json: {rotary_dim} entries of every head are rotated; it must be an even number of at least "
            f"{least} (head_dim times partial_rotary_factor)"
        )


def _default(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    return RopeSpec(rotary_dim=rotary_dim, theta=theta)


def _linear(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    return RopeSpec(
        kind="linear",
        rotary_dim=rotary_dim,
        theta=theta,
        factor=scaling.number("factor", minimum=1.0, maximum=MAX_FACTOR),
    )


def _dynamic(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    return RopeSpec(
        kind="dynamic",
        rotary_dim=rotary_dim,
        theta=theta,
        factor=scaling.number("factor", minimum=1.0, maximum=MAX_FACTOR),
        original_max_position=fields.integer("max_position_embeddings"),
    )


def _original(scaling: Fields, fields: Fields) -> int:
    """Positions of the first training: the top-level field wins, as in transformers."""
    fallback = scaling.integer("original_max_position_embeddings", default=fields.integer("max_position_embeddings"))
    return fields.integer("original_max_position_embeddings", default=fallback, minimum=2)


def _stretch(scaling: Fields, fields: Fields) -> float:
    """`factor`, else the ratio of the two context lengths."""
    ratio = fields.integer("max_position_embeddings") / _original(scaling, fields)
    return scaling.number("factor", default=ratio, minimum=1e-6, maximum=MAX_FACTOR)


def _optional(scaling: Fields, name: str) -> float | None:
    return scaling.number(name, maximum=MAX_FACTOR) if scaling.given(name) else None


def _yarn(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    spec = RopeSpec(
        kind="yarn",
        rotary_dim=rotary_dim,
        theta=theta,
        factor=_stretch(scaling, fields),
        original_max_position=_original(scaling, fields),
        attention_factor=_optional(scaling, "attention_factor"),
        mscale=_optional(scaling, "mscale"),
        mscale_all_dim=_optional(scaling, "mscale_all_dim"),
        beta_fast=scaling.number("beta_fast", default=32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", default=1.0) or 1.0,
        truncate=scaling.flag("truncate", default=True),
    )
    if spec.attention_factor is not None or not scaling.given("attn_factor"):
        return spec
    # YaRN's own code multiplies the amplitude by it. So did vLLM when DeepSeek published R1-0528-Qwen3-8B, whose value
    # cancels the amplitude; transformers does not read the field.
    return replace(spec, attention_factor=scaling.number("attn_factor", maximum=MAX_FACTOR) * spec.amplitude)


def _llama3(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if not 0 < low <= high:
        raise CheckpointError(
            f"config.json: llama3 rope needs 0 < low_freq_factor <= high_freq_factor, got {low:g} and {high:g}; "
            "correct the file"
        )
    return RopeSpec(
        kind="llama3",
        rotary_dim=rotary_dim,
        theta=theta,
        factor=scaling.number("factor", minimum=1.0, maximum=MAX_FACTOR),
        original_max_position=_original(scaling, fields),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _longrope(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    return RopeSpec(
        kind="longrope",
        rotary_dim=rotary_dim,
        theta=theta,
        factor=_stretch(scaling, fields),
        original_max_position=_original(scaling, fields),
        attention_factor=_optional(scaling, "attention_factor"),
        short_factors=scaling.numbers("short_factor", rotary_dim // 2),
    )


def _proportional(scaling: Fields, fields: Fields, rotary_dim: int, theta: float) -> RopeSpec:
    """The frequencies are those of a whole head, of which the first ones are used."""
    share = scaling.number("partial_rotary_factor", default=1.0, maximum=1.0)
    return RopeSpec(
        kind="proportional",
        rotary_dim=rotary_dim,
        theta=theta,
        factor=scaling.number("factor", default=1.0, minimum=1.0, maximum=MAX_FACTOR),
        num_turned=int(share * rotary_dim // 2),
    )


_SPECS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
