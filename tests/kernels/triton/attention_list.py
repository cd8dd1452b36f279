"""The kernels around attention, each with the arguments of a layer of a published model."""

from __future__ import annotations

from typing import Any

from forerun.kernels.triton.common import EXACT

ROWS = {"seq_ids": "*i32", "prefix_lens": "*i32", "tree_masks": "*i64", "tree_starts": "*i32", "block_tables": "*i32"}
NUMBERS = {"table_stride": "i32", "scale": "fp32", "first_row": "i32", "last_row": "i32", "num_splits": "i32"}
NUMBERS |= {"splits": "i32"}
LLAMA = {"NUM_Q": 32, "NUM_KV": 8, "DIM": 128}


def kernels() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """See `ahead_of_time`."""
    return [*rowwise(), *rotations(), *attentions()]


def rowwise() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from forerun.kernels.triton.norms import _gate_kernel, _rms_kernel, _scale_kernel

    row = {"x": "*fp32", "residual": "*fp32", "weight": "*fp32"}
    sizes = {"out": "*fp32", "eps": "fp32", "SIZE": 4096, "CENTERED": False, "BLOCK": 4096}
    gate = {"gate_up": "*fp32", "out": "*fp32", "SIZE": 14336, "ACTIVATION": 0, "BLOCK": 1024}
    scale = {"x": "*fp32", "out": "*fp32", "SIZE": 128256, "factor": "fp32", "cap": "fp32", "BLOCK": 1024}
    return [
        (_rms_kernel, row | sizes, {"num_warps": 4, **EXACT}),
        (_gate_kernel, gate, EXACT),
        *((_gate_kernel, {**gate, "ACTIVATION": activation}, EXACT) for activation in (1, 2)),
        (_scale_kernel, {**scale, "CAPPED": True}, EXACT),
    ]


def rotations() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    import triton.language as tl

    from forerun.kernels.triton.moves import _move_kernel
    from forerun.kernels.triton.rope import _latent_kernel, _rope_kernel

    places = {"table": "*fp32", "positions": "*i32", "slots": "*i32"}
    options = {"num_warps": 1, **EXACT}
    rope = {"qkv": "*fp32", **places, "q_norm": "*fp32", "k_norm": "*fp32", "keys": "*bf16", "values": "*bf16"}
    rope |= {"key_scales": None, "value_scales": None, "eps": "fp32", **LLAMA, "HALF": 64, "BLOCK_SIZE": 16}
    rope |= {"HALF_BLOCK": 64, "REST_BLOCK": 1, "INTERLEAVED": False}
    coded = {"q_norm": None, "k_norm": None, "keys": "*i8", "values": "*i8", "key_scales": "*fp32"}
    coded |= {"value_scales": "*fp32", "HALF": 16, "HALF_BLOCK": 16, "REST_BLOCK": 128, "INTERLEAVED": True}
    latent = {"queries": "*fp32", "latents": "*fp32", **places, "norm": "*fp32", "values": "*bf16", "eps": "fp32"}
    latent |= {"NUM_HEADS": 128, "RANK": 512, "HALF": 32, "INTERLEAVED": True, "RANK_BLOCK": 512, "HALF_BLOCK": 32}
    move = {"table": "*i64", "slots": "*i32", "buffer": "*i8", "scales": "*fp32", "num": "i32", "NUM_KV": 8}
    move |= {"KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_SIZE": 16, "TYPE": tl.int8, "BLOCK": 128, "SCALED": True}
    return [
        (_rope_kernel, rope, options),
        (_rope_kernel, rope | coded, options),
        (_latent_kernel, latent, options),
        (_move_kernel, {**move, "WRITES": True}, options),
        (_move_kernel, {**move, "WRITES": False}, options),
    ]


def attentions() -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    from forerun.kernels.triton.attention import _attention_kernel
    from forerun.kernels.triton.attention_tiles import combine_kernel
    from forerun.kernels.triton.latent import _latent_attention_kernel

    pool = {"keys": "*bf16", "values": "*bf16", "key_scales": None, "value_scales": None}
    plain = {"qkv": "*fp32", **pool, "work": "*fp32", **ROWS, **NUMBERS, **LLAMA, "ROW_SIZE": 48 * 128, "CAP": 0.0}
    plain |= {"BLOCK_SIZE": 16, "WINDOW": 0, "BLOCK_D": 128, "CHUNK": 64, "ROWS": 4, "HEADS": 4, "STRIDE": 1}
    coded = {"keys": "*i8", "values": "*i8", "key_scales": "*fp32", "value_scales": "*fp32", "STRIDE": 4}
    latent = {"queries": "*fp32", "values": "*bf16", "work": "*fp32", **ROWS, **NUMBERS, "NUM_HEADS": 128, "DIM": 576}
    latent |= {"RANK": 512, "BLOCK_SIZE": 16, "BLOCK_D": 512, "CHUNK": 32, "ROWS": 1, "HEADS": 16, "STRIDE": 1}
    combine = {
        "work": "*fp32",
        "sinks": None,
        "out": "*fp32",
        "prefix_lens": "*i32",
        "tree_masks": "*i64",
        "first_row": "i32",
    }
    combine |= {"num_splits": "i32", "NUM_HEADS": 32, "DIM": 128, "BLOCK_D": 128, "WINDOW": 0, "STEP": 16}
    return [
        (_attention_kernel, plain, {"num_warps": 4, "num_stages": 2, **EXACT}),
        (
            _attention_kernel,
            {**plain, **coded, "WINDOW": 4096, "CAP": 50.0},
            {"num_warps": 4, "num_stages": 2, **EXACT},
        ),
        (_latent_attention_kernel, latent, {"num_warps": 8, "num_stages": 2, **EXACT}),
        (combine_kernel, combine, EXACT),
        (combine_kernel, {**combine, "sinks": "*fp32"}, EXACT),
    ]
