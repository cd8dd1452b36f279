"""Moving rows inside pools: all layers by two launches, through a buffer.

Knows: where a slot lies in a pool, addresses of pools. Does not know: why rows move.
A source is never an earlier target, so every source can be read before anything is written; where targets repeat, the
last one counts. That is the order the contract asks for, without the waiting that one row after the other costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.kernels.triton.common import EXACT, device_copy, power_of_two

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8}


class PoolShape(NamedTuple):
    """What pools that move together have in common."""

    num_kv: int
    key_dim: int  # 0 of a pool of latents
    value_dim: int
    block_size: int
    dtype: torch.dtype


class PoolTables:
    """Addresses of pools as tensors on their device, kept so that a step uploads nothing."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def table(self, kvs: Sequence[LayerKV]) -> Tensor:
        """Addresses of keys, values, key scales and value scales (0 where there are none) -> [len(kvs), 4] int64."""
        addresses = tuple(address for kv in kvs for address in _addresses(kv))
        if addresses not in self._tables:
            self._tables[addresses] = device_copy(list(addresses), kvs[0].values.device)
        return self._tables[addresses]


def move_rows(kvs: list[LayerKV], sources: Tensor, targets: Tensor, tables: PoolTables | None = None) -> None:
    """See `Kernels.move_rows`; without `tables` the addresses are uploaded anew."""
    tables = PoolTables() if tables is None else tables
    groups: dict[PoolShape, list[LayerKV]] = {}
    for kv in kvs:
        _, num_kv, key_dim, block_size = kv.keys.shape
        shape = PoolShape(num_kv, key_dim, kv.values.shape[3], block_size, kv.values.dtype)
        groups.setdefault(shape, []).append(kv)
    for shape, group in groups.items():
        _move_group(shape, group, sources, targets, tables)


def _move_group(shape: PoolShape, kvs: list[LayerKV], sources: Tensor, targets: Tensor, tables: PoolTables) -> None:
    num, places = len(sources), len(sources) * len(kvs) * shape.num_kv
    width = shape.key_dim + shape.value_dim
    buffer = torch.empty(places, width, dtype=shape.dtype, device=sources.device)
    scales = torch.empty(places, 2, device=sources.device)
    constants = (shape.num_kv, shape.key_dim, shape.value_dim, shape.block_size, _TYPES[shape.dtype])
    blocks = (power_of_two(max(shape.key_dim, shape.value_dim)), shape.dtype is torch.int8)
    table = tables.table(kvs)
    for slots, writes in ((sources, False), (targets, True)):
        _move_kernel[(num, len(kvs), shape.num_kv)](
            table, slots, buffer, scales, num, *constants, *blocks, writes, num_warps=1, **EXACT
        )


def _addresses(kv: LayerKV) -> tuple[int, int, int, int]:
    key_scales, value_scales = (
        0 if scales is None else scales.data_ptr() for scales in (kv.key_scales, kv.value_scales)
    )
    return kv.keys.data_ptr(), kv.values.data_ptr(), key_scales, value_scales


@triton.jit
def _is_last(slots, index, num):
    """Whether no later place of `slots` names the same slot."""
    slot, repeats = tl.load(slots + index), 0
    for start in range(0, num, 64):
        other = start + tl.arange(0, 64)
        same = (tl.load(slots + other, other < num, -1) == slot) & (other > index)
        repeats += tl.sum(same.to(tl.int32), 0)
    return repeats == 0


@triton.jit
def _copy(pool, stride, buffer, inside, BLOCK: tl.constexpr, WRITES: tl.constexpr):
    """A vector between the pool and the buffer."""
    entry = tl.arange(0, BLOCK)
    if WRITES:
        tl.store(pool + entry * stride, tl.load(buffer + entry, inside), inside)
    else:
        tl.store(buffer + entry, tl.load(pool + entry * stride, inside), inside)


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["slots"])
def _move_kernel(
    table, slots, buffer, scales, num,
    NUM_KV: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    index, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    counts = True
    if WRITES:
        counts = _is_last(slots, index, num)
    if counts:
        place = (index * tl.num_programs(1) + layer).to(tl.int64) * NUM_KV + head
        slot = tl.load(slots + index)
        block, offset = (slot // BLOCK_SIZE).to(tl.int64) * NUM_KV + head, slot % BLOCK_SIZE
        entry = tl.arange(0, BLOCK)
        buffer += place * (KEY_DIM + VALUE_DIM)
        if KEY_DIM > 0:
            keys = tl.load(table + layer * 4).to(tl.pointer_type(TYPE)) + block * (KEY_DIM * BLOCK_SIZE) + offset
            _copy(keys, BLOCK_SIZE, buffer, entry < KEY_DIM, BLOCK, WRITES)
        values = tl.load(table + layer * 4 + 1).to(tl.pointer_type(TYPE)) + (block * BLOCK_SIZE + offset) * VALUE_DIM
        _copy(values, 1, buffer + KEY_DIM, entry < VALUE_DIM, BLOCK, WRITES)
        if SCALED:
            at = block * BLOCK_SIZE + offset
            key_scales = tl.load(table + layer * 4 + 2).to(tl.pointer_type(tl.float32)) + at
            value_scales = tl.load(table + layer * 4 + 3).to(tl.pointer_type(tl.float32)) + at
            _copy(key_scales, 1, scales + place * 2, tl.arange(0, 1) < 1, 1, WRITES)
            _copy(value_scales, 1, scales + place * 2 + 1, tl.arange(0, 1) < 1, 1, WRITES)
