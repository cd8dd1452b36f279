"""AutoRound's own section of config.json, restated as that of the layout its tensors have.

Knows: `quant_method` "auto-round", and which layout each `packing_format` is: GPTQ's, AWQ's, that of FP8 checkpoints,
or compressed-tensors' for MXFP4, MXFP8 and NVFP4. Does not know: how any of these is read.

`extra_config` names modules with settings of their own. In GPTQ's layout the shapes of their tensors tell these; in
AWQ's only unquantized modules may be named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError

METHOD = "auto-round"
SEARCHED = "search:"  # a target of the restated section: a pattern found anywhere in a name, unless a module has it
# Packing -> checkpoint_format of GPTQ; with zero points as they are ("gptq_v2"), or one less. AutoRound 0.16 writes the
# last two with one and the same module (`export_to_autoround/export.py`); its loader calls both "no zp" (`backend.py`).
GPTQ_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
AWQ_PACKING, FLOAT8_PACKING, FLOATS_PACKING = (
    "auto_round:auto_awq",
    "auto_round:fp8_static",
    "auto_round:llm_compressor",
)
PACKINGS = (*GPTQ_PACKINGS, AWQ_PACKING, FLOAT8_PACKING, FLOATS_PACKING)
# Other names of packings, as in AutoRound 0.16 (`inference/convert_model.py`); one that is absent is "auto".
ALIASES = {
    "auto": "auto_round:auto_gptq",
    "auto_round:gptq": "auto_round:auto_gptq",
    "auto_round:awq": AWQ_PACKING,
}
STRATEGIES = {"mx_fp": "group", "nv_fp": "tensor_group"}  # `data_type` -> what compressed-tensors calls its groups
MOST_BITS = 8  # modules of more are not quantized


def restated(section: Any) -> Any:
    """A `quantization_config` of AutoRound's in the words of its layout; any other one as it is.

    Raises UnsupportedError for layouts and rotations that are not implemented, CheckpointError for malformed settings.
    """
    if not isinstance(section, Mapping) or section.get("quant_method") != METHOD:
        return section
    named = str(section.get("packing_format") or "auto")
    packing = ALIASES.get(named, named)
    if section.get("rotation_config"):
        raise _unsupported("rotation_config", section["rotation_config"], "none")
    exceptions = _exceptions(section)
    if packing in GPTQ_PACKINGS:
        _check_integers(section)
        others = {"checkpoint_format": GPTQ_PACKINGS[packing], "dynamic": exceptions}
        return {**section, "quant_method": "gptq", "desc_act": False, **others}
    if packing == AWQ_PACKING:
        _check_integers(section)
        _check_same(section, exceptions)
        return {**section, "quant_method": "awq", "version": "gemm"}
    if packing == FLOAT8_PACKING:
        size = section.get("group_size")
        return {**section, "quant_method": "fp8", "weight_block_size": size if isinstance(size, list) else None}
    if packing == FLOATS_PACKING:
        return {"quant_method": "compressed-tensors", "config_groups": _groups(section, exceptions)}
    raise _unsupported("packing_format", named, ", ".join((*PACKINGS, *ALIASES)))


def _exceptions(section: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """`extra_config`, whose entries are objects with whole `bits` if they have any."""
    found = section.get("extra_config") or {}
    if not isinstance(found, Mapping):
        raise _malformed("extra_config", found, "an object")
    for name, own in found.items():
        if not isinstance(own, Mapping):
            raise _malformed(f"extra_config.{name}", own, "an object")
        if "bits" in own:
            _bits(own, f"extra_config.{name}.bits")
    return dict(found)


def _bits(settings: Mapping[str, Any], place: str = "bits") -> int:
    value = settings.get("bits")
    if type(value) is not int:
        raise _malformed(place, value, "a whole number")
    return value


def _check_integers(section: Mapping[str, Any]) -> None:
    """Refuse floats where the layout has integers."""
    kind = str(section.get("data_type") or "int")
    if not kind.startswith("int"):
        raise _unsupported(f"packing_format {section.get('packing_format')!r} and data_type", kind, "int")


def _check_same(section: Mapping[str, Any], exceptions: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse quantized modules with other bits or groups than all."""
    for name, own in exceptions.items():
        changed = [key for key in ("bits", "group_size") if key in own and own[key] != section.get(key)]
        if changed and own.get("bits", 0) <= MOST_BITS:
            allowed = f"{section.get(changed[0])!r} as for all modules, or more than {MOST_BITS} bits (not quantized)"
            raise _unsupported(f"extra_config.{name}.{changed[0]}", own[changed[0]], allowed)


def _groups(section: Mapping[str, Any], exceptions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A scheme for all modules and one for each exception, which counts first where the module has just its name."""
    bits = _bits(section)
    groups = {"all": {"targets": ["Linear"], "weights": _weights(section)}}
    for name, own in exceptions.items():
        if own.get("bits", bits) <= MOST_BITS:
            targets = [f"re:{re.escape(name)}$", f"{SEARCHED}{name}"]
            groups[f"extra_config.{name}"] = {"targets": targets, "weights": _weights({**section, **own})}
    return groups


def _weights(section: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(section.get("data_type"))
    if kind not in STRATEGIES:
        raise _unsupported("data_type", kind, ", ".join(STRATEGIES))
    names = {"num_bits": section.get("bits"), "group_size": section.get("group_size")}
    return {"type": "float", "strategy": STRATEGIES[kind], **names}


def _malformed(place: str, value: Any, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config.{place} must be {wanted}, got {value!r}; copy the file again"
    )


def _unsupported(name: str, value: Any, allowed: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json: quantization_config of {METHOD} has {name} {value!r}; supported: {allowed}; take another "
        "checkpoint of the model"
    )
