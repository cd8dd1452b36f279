"""Rotations and writes to the pool: head norms, partial rotation, roundings of every pool, latents.

Knows: how vectors are rotated and stored. Does not know: who reads them, nor how rows move (`moves`). A program
handles one head of one row.
Positions and slots are not checked, since that would make the host wait for the device: whoever builds a batch
guarantees them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import KV_DTYPES, HeadLayout, LatentLayout, LayerKV
from forerun.kernels.triton.common import EXACT, aligned, power_of_two, round_to_bfloat16, round_to_integer
from forerun.kernels.triton.norms import rms_factor


def check_pool(kv: LayerKV, latent: bool) -> None:
    """Refuse a pool these kernels do not read or that is of the other kind."""
    if kv.values.dtype not in KV_DTYPES:
        raise KernelError(f"a pool of {kv.values.dtype}: the Triton kernels take float32, bfloat16 or int8")
    if kv.is_latent is not latent:
        wanted, found = ("latents", "keys and values") if latent else ("keys and values", "latents")
        raise KernelError(f"attention over {wanted} was given a pool of {found}; make it with latent={latent}")


def rope_and_cache(
    qkv: Tensor,
    heads: HeadLayout,
    rope_table: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: LayerKV,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """See `Kernels.rope_and_cache`."""
    check_pool(kv, latent=False)
    rows, half = aligned(qkv), heads.rotary_dim // 2
    _rope_kernel[(qkv.shape[0], heads.num_q + 2 * heads.num_kv)](
        rows, aligned(rope_table), positions, slots, q_norm, k_norm,
        kv.keys, kv.values, kv.key_scales, kv.value_scales, eps,
        heads.num_q, heads.num_kv, heads.head_dim, half, heads.interleaved, kv.block_size,
        power_of_two(half), power_of_two(heads.head_dim - 2 * half),
        num_warps=1, **EXACT,
    )  # fmt: skip
    if rows is not qkv:
        qkv.copy_(rows)


def latent_rope_and_cache(
    queries: Tensor,
    latents: Tensor,
    layout: LatentLayout,
    rope_table: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: LayerKV,
    norm: Tensor,
    eps: float,
) -> None:
    """See `Kernels.latent_rope_and_cache`."""
    check_pool(kv, latent=True)
    copies, half = (aligned(queries), aligned(latents)), layout.rope_dim // 2
    _latent_kernel[(queries.shape[0], layout.num_heads + 1)](
        *copies, aligned(rope_table), positions, slots, aligned(norm), kv.values, eps,
        layout.num_heads, layout.rank, half, layout.interleaved,
        power_of_two(layout.rank), power_of_two(half), num_warps=1, **EXACT,
    )  # fmt: skip
    for copy, original in zip(copies, (queries, latents), strict=True):
        if copy is not original:
            original.copy_(copy)


@triton.jit
def _load_pairs(base, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """The two halves that rotate together: an entry and its partner are one thread's."""
    pair = tl.arange(0, HALF_BLOCK)
    if INTERLEAVED:
        first = tl.load(base + 2 * pair, pair < HALF, 0.0)
        second = tl.load(base + 2 * pair + 1, pair < HALF, 0.0)
        tl.debug_barrier()  # an entry is written where another thread reads
    else:
        first = tl.load(base + pair, pair < HALF, 0.0)
        second = tl.load(base + HALF + pair, pair < HALF, 0.0)
    return first, second


@triton.jit
def _load_head(
    base, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """The two halves that rotate together and what stays."""
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)
    first, second = _load_pairs(base, HALF, INTERLEAVED, HALF_BLOCK)
    return first, second, tl.load(base + rest, rest < DIM, 0.0)


@triton.jit
def _norm_head(
    first, second, rest, weight, eps, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(rest * rest, 0)
    factor = rms_factor(squares, eps, DIM)
    weights = _load_head(weight, HALF, INTERLEAVED, DIM, HALF_BLOCK, REST_BLOCK)
    return first * factor * weights[0], second * factor * weights[1], rest * factor * weights[2]


@triton.jit
def _rotate(first, second, angles, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    pair = tl.arange(0, HALF_BLOCK)
    cos = tl.load(angles + pair, pair < HALF, 0.0)
    sin = tl.load(angles + HALF + pair, pair < HALF, 0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _largest(x):
    """max |x|, or infinity if any entry is NaN: the maximum alone may drop NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)


@triton.jit
def _codes(x, scale):
    """What an int8 pool stores for x, see `LayerKV`."""
    usable = scale > 0  # not 0, not NaN
    shares = tl.math.div_rn(x, tl.where(usable, scale, 1.0))
    codes = round_to_integer(tl.minimum(tl.maximum(shares, -127.0), 127.0))  # bounds are integers: no rounding passes
    return tl.where(usable, codes, 0.0).to(tl.int8)


@triton.jit
def _store_rounded(pointers, x, inside):
    """float32 numbers stored as float32 or bfloat16."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, round_to_bfloat16(x), inside)
    else:
        tl.store(pointers, x, inside)


@triton.jit
def _store_head(
    base, stride, first, second, rest,
    HALF: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    pair, at = tl.arange(0, HALF_BLOCK), 2 * HALF + tl.arange(0, REST_BLOCK)
    _store_rounded(base + pair * stride, first, pair < HALF)
    _store_rounded(base + (HALF + pair) * stride, second, pair < HALF)
    _store_rounded(base + at * stride, rest, at < DIM)


@triton.jit
def _cache_head(
    pool, stride, scales, place, first, second, rest,
    HALF: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """A vector in the pool's precision; an int8 pool gets its scale at `place` of `scales`."""
    if scales is not None:
        largest = tl.maximum(tl.maximum(_largest(first), _largest(second)), _largest(rest))
        scale = tl.where(largest < float("inf"), tl.math.div_rn(largest, 127.0), float("nan"))
        tl.store(scales + place, scale)
        first, second, rest = _codes(first, scale), _codes(second, scale), _codes(rest, scale)
    _store_head(pool, stride, first, second, rest, HALF, DIM, HALF_BLOCK, REST_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_kernel(
    qkv, table, positions, slots, q_norm, k_norm,
    keys, values, key_scales, value_scales, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = qkv + row * ((NUM_Q + 2 * NUM_KV) * DIM) + head * DIM
    angles = table + tl.load(positions + row).to(tl.int64) * (2 * HALF)
    if head < NUM_Q:
        first, second, rest = _load_head(base, HALF, INTERLEAVED, DIM, HALF_BLOCK, REST_BLOCK)
        if q_norm is not None:
            first, second, rest = _norm_head(
                first, second, rest, q_norm, eps, HALF, INTERLEAVED, DIM, HALF_BLOCK, REST_BLOCK
            )  # fmt: skip
        first, second = _rotate(first, second, angles, HALF, HALF_BLOCK)
        _store_head(base, 1, first, second, rest, HALF, DIM, HALF_BLOCK, REST_BLOCK)
    else:
        slot = tl.load(slots + row)
        block, offset = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
        if head < NUM_Q + NUM_KV:
            first, second, rest = _load_head(base, HALF, INTERLEAVED, DIM, HALF_BLOCK, REST_BLOCK)
            if k_norm is not None:
                first, second, rest = _norm_head(
                    first, second, rest, k_norm, eps, HALF, INTERLEAVED, DIM, HALF_BLOCK, REST_BLOCK
                )  # fmt: skip
            first, second = _rotate(first, second, angles, HALF, HALF_BLOCK)
            place = block * NUM_KV + (head - NUM_Q)
            _cache_head(
                keys + place * (DIM * BLOCK_SIZE) + offset, BLOCK_SIZE, key_scales, place * BLOCK_SIZE + offset,
                first, second, rest, HALF, DIM, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip
        else:
            first, second, rest = _load_head(base, HALF, False, DIM, HALF_BLOCK, REST_BLOCK)
            place = (block * NUM_KV + (head - NUM_Q - NUM_KV)) * BLOCK_SIZE + offset
            _cache_head(
                values + place * DIM, 1, value_scales, place, first, second, rest, HALF, DIM, HALF_BLOCK, REST_BLOCK
            )  # fmt: skip


@triton.jit
def _turn_tail(base, angles, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """The two rotated halves of the 2 * HALF entries at `base`."""
    first, second = _load_pairs(base, HALF, INTERLEAVED, HALF_BLOCK)
    return _rotate(first, second, angles, HALF, HALF_BLOCK)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _latent_kernel(
    queries, latents, table, positions, slots, norm, values, eps,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    RANK_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = table + tl.load(positions + row).to(tl.int64) * (2 * HALF)
    KEY_DIM: tl.constexpr = RANK + 2 * HALF
    if head < NUM_HEADS:
        tail = queries + (row * NUM_HEADS + head) * KEY_DIM + RANK
        first, second = _turn_tail(tail, angles, HALF, INTERLEAVED, HALF_BLOCK)
        _store_head(tail, 1, first, second, 0.0, HALF, 2 * HALF, HALF_BLOCK, 1)
    else:
        base, column = latents + row * KEY_DIM, tl.arange(0, RANK_BLOCK)
        pool = values + tl.load(slots + row).to(tl.int64) * KEY_DIM
        latent = tl.load(base + column, column < RANK, 0.0)
        factor = rms_factor(tl.sum(latent * latent, 0), eps, RANK)
        latent = latent * factor * tl.load(norm + column, column < RANK, 0.0)
        first, second = _turn_tail(base + RANK, angles, HALF, INTERLEAVED, HALF_BLOCK)
        tl.store(base + column, latent, column < RANK)
        _store_head(base + RANK, 1, first, second, 0.0, HALF, 2 * HALF, HALF_BLOCK, 1)
        _store_rounded(pool + column, latent, column < RANK)
        pair = tl.arange(0, HALF_BLOCK)
        _store_rounded(pool + RANK + pair, first, pair < HALF)
        _store_rounded(pool + RANK + HALF + pair, second, pair < HALF)
