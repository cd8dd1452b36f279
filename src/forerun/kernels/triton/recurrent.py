"""The ops of recurrent layers in Triton: short convolutions, the gated delta rule and Mamba-2, row after row.

Knows: the arithmetic, which program walks which rows. Does not know: layers, whose slots these are.

A program keeps some columns of one head's state in registers while it walks rows: the known rows of a sequence, whose
last state goes to the slot; then, in a second launch, the drafts from below the root to one leaf of the tree. Leaves
are walked side by side, so no state is kept of a draft. Those that share drafts compute them all, and write the same
bits to the same places. Both launches run the very same compiled kernel, so a draft has the bits of a known row.

Decays and steps take exp and log of float64: they multiply the state at every row, so their errors would add up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.recurrent_ops import DeltaHeads, Walk, check_decays
from forerun.kernels.triton.common import EXACT, aligned, power_of_two
from forerun.kernels.triton.norms import gated

_CONV_BLOCK = 256  # channels a program convolves
_GATE_BLOCK = 256
_STATE_SIZE = 1024  # entries of a state a program keeps, 32 a thread of its warp
_LEAST_COLUMNS = 8  # 32 bytes, what memory is read in
_MOST_KEYS = 1024  # entries of a key
LONGEST_PATH = 64  # rows; a tree has no more nodes, which are bits of a mask
_UNALIGNED = ["slots", "firsts", "num_known", "parents", "drafts", "sequences", "paths", "lengths"]


class PlannedWalk(NamedTuple):
    """A walk on a device, and what programs look up in it."""

    walk: Walk
    sequences: Tensor  # [M] int32: whose row it is
    paths: Tensor  # [D, LONGEST_PATH] int32: the row of a draft that is a leaf, then those above it, below the root
    lengths: Tensor  # [D] int32: how many these are; 0 of a draft that is no leaf


class LastWalk:
    """The walk of the last pass, planned once for all its layers."""

    def __init__(self) -> None:
        self._kept: tuple[Walk, PlannedWalk] | None = None

    def plan(self, walk: Walk, device: torch.device) -> PlannedWalk:
        """A walk that may come from the host, planned on `device`; the host does not wait."""
        if self._kept is None or self._kept[0] is not walk:
            self._kept = walk, plan(walk.on(device))
        return self._kept[1]


def plan(walk: Walk) -> PlannedWalk:
    """Where the rows of a walk belong, and the paths to its leaves."""
    (num_rows,), (num_drafts,), device = walk.parents.shape, walk.drafts.shape, walk.parents.device
    every = torch.arange(len(walk.slots), dtype=torch.int32, device=device)
    sequences = every.repeat_interleave(walk.firsts.diff(), output_size=num_rows)
    paths = torch.empty(num_drafts, LONGEST_PATH, dtype=torch.int32, device=device)
    lengths = torch.empty(num_drafts, dtype=torch.int32, device=device)
    if num_drafts:
        has_child = torch.zeros(num_rows, dtype=torch.int32, device=device)
        has_child.index_fill_(0, walk.parents.index_select(0, walk.drafts).long(), 1)
        _path_kernel[(num_drafts,)](
            walk.drafts, sequences, walk.firsts, walk.num_known, walk.parents, has_child, paths, lengths, LONGEST_PATH,
            num_warps=1, **EXACT,
        )  # fmt: skip
    return PlannedWalk(walk, sequences, paths, lengths)


def causal_conv(
    x: Tensor, weight: Tensor, tails: Tensor, planned: PlannedWalk, silu: bool, bias: Tensor | None = None
) -> Tensor:
    """See `RecurrentOps.causal_conv`."""
    walk, (num_rows, channels), taps = planned.walk, x.shape, weight.shape[0]
    rows, out = aligned(x), torch.empty(num_rows, channels, device=x.device)
    block = min(_CONV_BLOCK, power_of_two(channels))
    blocks = triton.cdiv(channels, block)
    bias = None if bias is None else aligned(bias)
    _conv_kernel[(num_rows, blocks)](
        rows, aligned(weight), bias, tails, out, walk.slots, planned.sequences, walk.parents,
        channels, taps, silu, block, num_warps=2, **EXACT,
    )  # fmt: skip
    if taps > 1:
        _tail_kernel[(len(walk.slots), blocks)](
            rows, tails, walk.slots, walk.firsts, walk.num_known, channels, taps - 1, power_of_two(taps - 1), block,
            num_warps=2, **EXACT,
        )  # fmt: skip
    return out


def advance(
    rows: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, skip: Tensor | None, memory: Tensor,
    planned: PlannedWalk,
) -> Tensor:  # fmt: skip
    """See `RecurrentOps.gated_delta`; with `skip` [num_values] see `RecurrentOps.mamba2`."""
    check_decays(len(decay), heads)
    if heads.key_dim > _MOST_KEYS:
        raise KernelError(
            f"keys of {heads.key_dim} entries in a recurrent layer: the Triton kernels take up to {_MOST_KEYS}; choose "
            "device 'cpu'"
        )
    walk, num_rows, rows = planned.walk, rows.shape[0], aligned(rows)
    vectors, made = _prepare(rows, gates, heads, decay, bias, skip is None)
    out = torch.empty(num_rows, heads.values_size, device=rows.device)
    keys = power_of_two(heads.key_dim)
    columns = min(power_of_two(heads.value_dim), max(_LEAST_COLUMNS, _STATE_SIZE // keys))
    for units, drafting in ((len(walk.slots), 0), (len(walk.drafts), 1)):
        if units:
            _state_kernel[(units, heads.num_values, triton.cdiv(heads.value_dim, columns))](
                vectors, rows, made, None if skip is None else aligned(skip), memory, out,
                walk.slots, walk.firsts, walk.num_known, walk.drafts, *planned[1:], drafting, LONGEST_PATH,
                *heads, vectors.shape[1], decay.numel(), keys, columns, num_warps=1, **EXACT,
            )  # fmt: skip
    return out


def _prepare(
    rows: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, is_delta: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys as they meet the state, the first columns; and how strongly rows write, then what stays."""
    num_rows, num_gates = rows.shape[0], heads.num_values + decay.numel()
    made = torch.empty(num_rows, num_gates, device=rows.device)
    num_vectors = 2 * heads.num_keys if is_delta else 0  # those of Mamba-2 stay as they are
    vectors = torch.empty(num_rows, num_vectors * heads.key_dim, device=rows.device) if is_delta else rows
    block = min(_GATE_BLOCK, power_of_two(num_gates))
    _prepare_kernel[(num_rows, num_vectors + triton.cdiv(num_gates, block))](
        rows, aligned(gates), aligned(decay), aligned(bias), vectors, made, heads.key_dim**-0.5,
        num_vectors, heads.num_keys, heads.num_values, heads.key_dim, heads.row_size, decay.numel(),
        power_of_two(heads.key_dim), block, num_warps=1, **EXACT,
    )  # fmt: skip
    return vectors, made


@triton.jit(do_not_specialize_on_alignment=[*_UNALIGNED, "has_child"])
def _path_kernel(drafts, sequences, firsts, num_known, parents, has_child, paths, lengths, DEPTH: tl.constexpr):
    """One draft: if it is a leaf, its row and those above it."""
    draft = tl.program_id(0)
    row = tl.load(drafts + draft).to(tl.int32)
    sequence = tl.load(sequences + row)
    begin = tl.load(firsts + sequence) + tl.load(num_known + sequence)  # the sequence's first draft
    length = 0
    if tl.load(has_child + row) == 0:
        while row >= begin:
            tl.store(paths + draft * DEPTH + length, row)
            row = tl.load(parents + row)
            length += 1
    tl.store(lengths + draft, length)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _conv_kernel(
    x, weight, bias, tails, out, slots, sequences, parents,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of one row. The taps come oldest first, so each looks for its own row again."""
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    slot = tl.load(slots + tl.load(sequences + row)).to(tl.int64)
    tail = tails + slot * ((TAPS - 1) * CHANNELS)
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, inside, 0.0)
    for tap in range(TAPS):
        at, beyond = row, 0
        for _ in range(TAPS - 1 - tap):
            beyond += (at < 0).to(tl.int32)
            at = tl.where(at < 0, -1, tl.load(parents + tl.maximum(at, 0)))
        source = x + at.to(tl.int64) * CHANNELS
        if at < 0:
            source = tail + (TAPS - 2 - beyond) * CHANNELS
        total = tl.fma(
            tl.load(source + channel, inside, 0.0), tl.load(weight + tap * CHANNELS + channel, inside, 0.0), total
        )
    if SILU:
        total = gated(total, 1.0, 0)
    tl.store(out + row.to(tl.int64) * CHANNELS + channel, total, inside)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
def _tail_kernel(
    x, tails, slots, firsts, num_known,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, KEPT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some channels of one sequence's tail: the last inputs, of its known rows and of what it had before."""
    sequence, place = tl.program_id(0), tl.arange(0, KEPT_BLOCK)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    known, first = tl.load(num_known + sequence), tl.load(firsts + sequence).to(tl.int64)
    tail = tails + tl.load(slots + sequence).to(tl.int64) * (KEPT * CHANNELS)
    inside, row = (place < KEPT) & (channel < CHANNELS), place + known - KEPT
    own = tl.load(x + (first + row) * CHANNELS + channel, inside & (row >= 0), 0.0)
    kept = tl.load(tail + (place + known) * CHANNELS + channel, inside & (row < 0), 0.0)
    tl.debug_barrier()  # an entry is written where another thread reads
    tl.store(tail + place * CHANNELS + channel, tl.where(row < 0, kept, own), inside)


@triton.jit
def _softplus(x):
    """ln(1 + e^x) of float64, which is max(x, 0) + ln(1 + e^-|x|); by the logarithm's series where e^-|x| is small."""
    u = tl.exp(-tl.abs(x))
    series = u * (1.0 - u * (0.5 - u * (1.0 / 3)))
    return tl.maximum(x, 0.0) + tl.where(u < 1e-4, series, tl.log(1.0 + u))


@triton.jit
def _prepare_kernel(
    rows, gates, decay, bias, vectors, made, query_scale,
    NUM_VECTORS: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, KEY_DIM: tl.constexpr,
    ROW_SIZE: tl.constexpr, NUM_DECAYS: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: a query or a key over its length, or some gates. Only the delta rule has vectors to prepare."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < NUM_VECTORS:
        entry = tl.arange(0, KEY_BLOCK)
        inside = entry < KEY_DIM
        x = tl.load(rows + row * ROW_SIZE + part * KEY_DIM + entry, inside, 0.0)
        x *= tl.math.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) + 1e-6))
        if part < NUM_KEYS:
            x *= query_scale
        tl.store(vectors + row * (NUM_VECTORS * KEY_DIM) + part * KEY_DIM + entry, x, inside)
    else:
        column = (part - NUM_VECTORS) * BLOCK + tl.arange(0, BLOCK)
        present = column < NUM_VALUES + NUM_DECAYS
        writes = column < NUM_VALUES
        index = tl.where(writes, column, column - NUM_VALUES)
        if NUM_VECTORS > 0:
            given = tl.load(gates + row * (NUM_VALUES + NUM_DECAYS) + column, present, 0.0)
        else:
            given = tl.load(gates + row * NUM_VALUES + index, present, 0.0)
        step = _softplus((given + tl.load(bias + index, present, 0.0)).to(tl.float64)).to(tl.float32)
        stays = tl.exp((tl.load(decay + index, present, 0.0) * step).to(tl.float64)).to(tl.float32)
        strength = step
        if NUM_VECTORS > 0:
            strength = gated(given, 1.0, 3)
        tl.store(made + row * (NUM_VALUES + NUM_DECAYS) + column, tl.where(writes, strength, stays), present)


@triton.jit(do_not_specialize=["drafting"], do_not_specialize_on_alignment=_UNALIGNED)
def _state_kernel(
    vectors, rows, gates, skip, memory, out,
    slots, firsts, num_known, drafts, sequences, paths, lengths, drafting, DEPTH: tl.constexpr,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VECTORS: tl.constexpr, NUM_DECAYS: tl.constexpr, KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one head's state, over the known rows of a sequence or the drafts above and at a leaf."""
    unit, head = tl.program_id(0), tl.program_id(1)
    sequence, count = unit, tl.load(num_known + tl.where(drafting != 0, 0, unit))
    if drafting != 0:
        sequence, count = tl.load(sequences + tl.load(drafts + unit)), tl.load(lengths + unit)
    first = tl.load(firsts + sequence)
    column, entry = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, KEY_BLOCK)
    of_column, of_entry = column < tl.where(count > 0, VALUE_DIM, 0), entry < KEY_DIM
    slot = tl.load(slots + sequence).to(tl.int64) * NUM_VALUES + head
    at = memory + slot * (KEY_DIM * VALUE_DIM) + entry[:, None] * VALUE_DIM + column[None, :]
    inside = of_entry[:, None] & of_column[None, :]
    state = tl.load(at, inside, 0.0)  # [KEY_BLOCK, BLOCK]
    KEYS: tl.constexpr = NUM_KEYS * KEY_DIM
    ROW_SIZE: tl.constexpr = 2 * KEYS + NUM_VALUES * VALUE_DIM
    for step in range(count):
        row = first + step
        if drafting != 0:
            row = tl.load(paths + unit * DEPTH + count - 1 - step)
        row = row.to(tl.int64)
        query_at = vectors + row * VECTORS + head // (NUM_VALUES // NUM_KEYS) * KEY_DIM + entry
        query, key = tl.load(query_at, of_entry, 0.0), tl.load(query_at + KEYS, of_entry, 0.0)
        value = tl.load(rows + row * ROW_SIZE + 2 * KEYS + head * VALUE_DIM + column, of_column, 0.0)
        gate = gates + row * (NUM_VALUES + NUM_DECAYS)
        strength, stays = tl.load(gate + head), gate + NUM_VALUES
        if NUM_DECAYS == NUM_VALUES:
            state *= tl.load(stays + head)
        else:  # a decay for each channel of keys
            state *= tl.load(stays + head * KEY_DIM + entry, of_entry, 0.0)[:, None]
        if skip is None:
            added = strength * (value - tl.sum(state * key[:, None], 0))
        else:
            added = strength * value
        state += key[:, None] * added[None, :]
        made = tl.sum(state * query[:, None], 0)
        if skip is not None:
            made += tl.load(skip + head) * value
        tl.store(out + row * (NUM_VALUES * VALUE_DIM) + head * VALUE_DIM + column, made, of_column)
    if drafting == 0:
        tl.store(at, state, inside)
