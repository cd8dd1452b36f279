"""AutoRound's own section of config.json, restated as that of the layout its tensors have.

Knows: `quant_method` "auto-round", and which layout each `packing_format` is: GPTQ's, AWQ's, that of FP8 checkpoints,
or compressed-tensors' for MXFP4, MXFP8 and NVFP4. Does not know: how any of these is read.

`extra_config` names modules with settings of their own. In GPTQ's layout the shapes of their tensors tell these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.errors import UnsupportedError

METHOD = "auto-round"
# Packing -> checkpoint_format of GPTQ; with zero points as they are ("gptq_v2"), or one less.
GPTQ_PACKINGS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
AWQ_PACKING, FLOAT8_PACKING, FLOATS_PACKING = (
    "auto_round:auto_awq",
    "auto_round:fp8_static",
    "auto_round:llm_compressor",
)
PACKINGS = (*GPTQ_PACKINGS, AWQ_PACKING, FLOAT8_PACKING, FLOATS_PACKING)
STRATEGIES = {"mx_fp": "group", "nv_fp": "tensor_group"}  # `data_type` -> what compressed-tensors calls its groups


def restated(section: Any) -> Any:
    """A `quantization_config` of AutoRound's in the words of its layout; any other one as it is.

    Raises UnsupportedError for layouts and rotations that are not implemented.
    """
    if not isinstance(section, Mapping) or section.get("quant_method") != METHOD:
        return section
    packing = section.get("packing_format")
    if section.get("rotation_config"):
        raise _unsupported("rotation_config", section["rotation_config"], "none")
    if packing in GPTQ_PACKINGS:
        others = {"checkpoint_format": GPTQ_PACKINGS[packing], "dynamic": section.get("extra_config")}
        return {**section, "quant_method": "gptq", "desc_act": False, **others}
    if packing == AWQ_PACKING:
        return {**section, "quant_method": "awq", "version": "gemm"}
    if packing == FLOAT8_PACKING:
        size = section.get("group_size")
        return {**section, "quant_method": "fp8", "weight_block_size": size if isinstance(size, list) else None}
    if packing == FLOATS_PACKING:
        return {"quant_method": "compressed-tensors", "config_groups": _groups(section)}
    raise _unsupported("packing_format", packing, ", ".join(PACKINGS))


def _groups(section: Mapping[str, Any]) -> dict[str, Any]:
    """A scheme for all modules and one for each exception, which count first as their names are more precise."""
    groups = {"all": {"targets": ["Linear"], "weights": _weights(section)}}
    for name, own in (section.get("extra_config") or {}).items():
        if own.get("bits", section.get("bits")) <= 8:  # others are not quantized
            groups[name] = {"targets": [name, f"re:{name}"], "weights": _weights({**section, **own})}
    return groups


def _weights(section: Mapping[str, Any]) -> dict[str, Any]:
    kind = section.get("data_type")
    if kind not in STRATEGIES:
        raise _unsupported("data_type", kind, ", ".join(STRATEGIES))
    names = {"num_bits": section.get("bits"), "group_size": section.get("group_size")}
    return {"type": "float", "strategy": STRATEGIES[kind], **names}


def _unsupported(name: str, value: Any, allowed: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json: quantization_config of {METHOD} has {name} {value!r}; supported: {allowed}; take another "
        "checkpoint of the model"
    )
