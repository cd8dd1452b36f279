"""The kernels of recurrent layers, each with the arguments of a layer of a published model."""

from __future__ import annotations

from typing import Any

from forerun.kernels.triton.common import EXACT

WALK = {"slots": "*i32", "firsts": "*i32", "num_known": "*i32"}
QWEN = {"NUM_KEYS": 16, "NUM_VALUES": 32, "KEY_DIM": 128, "VALUE_DIM": 128}  # Qwen3-Next, Qwen3.5-4B
WIDE = {"NUM_KEYS": 1, "NUM_VALUES": 24, "KEY_DIM": 256, "VALUE_DIM": 64}  # the longest keys of Mamba-2
NEMOTRON = {"NUM_KEYS": 8, "NUM_VALUES": 128, "KEY_DIM": 128, "VALUE_DIM": 80}


def kernels() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """See `ahead_of_time`."""
    return [*convolutions(), *gates(), *states()]


def convolutions() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from forerun.kernels.triton.recurrent import _conv_kernel, _path_kernel, _tail_kernel

    options = {"num_warps": 2, **EXACT}
    path = {"drafts": "*i64", "sequences": "*i32", "firsts": "*i32", "num_known": "*i32", "parents": "*i32"}
    path |= {"has_child": "*i32", "paths": "*i32", "lengths": "*i32", "DEPTH": 64}
    conv = {"x": "*fp32", "weight": "*fp32", "bias": None, "tails": "*fp32", "out": "*fp32", "slots": "*i32"}
    conv |= {"sequences": "*i32", "parents": "*i32", "CHANNELS": 8192, "TAPS": 4, "SILU": True, "BLOCK": 256}
    tail = {"x": "*fp32", "tails": "*fp32", **WALK, "CHANNELS": 8192, "KEPT": 3, "KEPT_BLOCK": 4, "BLOCK": 256}
    return [
        (_path_kernel, path, {"num_warps": 1, **EXACT}),
        (_conv_kernel, conv, options),
        (_conv_kernel, {**conv, "bias": "*fp32", "SILU": False}, options),
        (_tail_kernel, tail, options),
    ]


def gates() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from forerun.kernels.triton.recurrent import _prepare_kernel

    made = {"rows": "*fp32", "gates": "*fp32", "decay": "*fp32", "bias": "*fp32", "vectors": "*fp32", "made": "*fp32"}
    made |= {"query_scale": "fp32", "NUM_VECTORS": 32, "NUM_KEYS": 16, "NUM_VALUES": 32, "KEY_DIM": 128}
    delta = {**made, "ROW_SIZE": 8192, "NUM_DECAYS": 32, "KEY_BLOCK": 128, "BLOCK": 64}
    channels = {"NUM_DECAYS": 32 * 128, "BLOCK": 256}
    mamba = {"NUM_VECTORS": 0, "NUM_KEYS": 8, "NUM_VALUES": 128, "ROW_SIZE": 12288, "NUM_DECAYS": 128, "BLOCK": 256}
    return [(_prepare_kernel, delta | more, {"num_warps": 1, **EXACT}) for more in ({}, channels, mamba)]


def states() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from forerun.kernels.triton.recurrent import _state_kernel

    plan = {"drafts": "*i64", "sequences": "*i32", "paths": "*i32", "lengths": "*i32"}
    given = {"vectors": "*fp32", "rows": "*fp32", "gates": "*fp32", "skip": None, "memory": "*fp32", "out": "*fp32"}
    given |= {**WALK, **plan, "drafting": "i32", "DEPTH": 64}
    delta = {**given, **QWEN, "VECTORS": 32 * 128, "NUM_DECAYS": 32, "KEY_BLOCK": 128, "BLOCK": 8}
    wide = {**given, **WIDE, "skip": "*fp32", "VECTORS": 2048, "NUM_DECAYS": 24, "KEY_BLOCK": 256, "BLOCK": 8}
    nemotron = {**given, **NEMOTRON, "skip": "*fp32", "VECTORS": 12288, "NUM_DECAYS": 128, "KEY_BLOCK": 128, "BLOCK": 8}
    own = [delta, {**delta, "NUM_DECAYS": 32 * 128}, wide, nemotron]
    return [(_state_kernel, arguments, {"num_warps": 1, **EXACT}) for arguments in own]
