"""Mixtures of experts on the device: which experts are chosen, which rows each gets, and what they add up to.

Knows: `Kernels.route` and `Kernels.experts`. Does not know: how matrices are stored (`banks`), layers.

The host never learns how many rows an expert got. Room is made for every row at every expert, in work space that is
bounded: a batch with more rows goes in pieces, which changes no bit, since a row's result is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.experts import check_routing
from forerun.kernels.ops import ACTIVATIONS, SQUARED_RELU, ExpertBiases, PackedExperts, PackedLinear, Routing
from forerun.kernels.reference import check_activation
from forerun.kernels.triton.banks import Bank, Slots, pack_bank
from forerun.kernels.triton.common import EXACT, aligned, power_of_two
from forerun.kernels.triton.norms import gated

WORK_BYTES = 256 << 20  # of work space a piece of a batch may take
LEAST_ROWS = 64  # of a piece, whatever they take
BLOCK = 1024  # columns of a program that only moves or adds
SLOTS = 4  # of a program that activates
FAR = tl.constexpr(1 << 30)  # behind every expert


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """All experts of a layer."""

    gate_up: Bank  # [2F, H] each
    down: Bank  # [H, F] each
    activation: str
    num_experts: int
    biases: ExpertBiases | None

    @property
    def rows_at_once(self) -> int:
        """Rows for which there is room at every expert."""
        a_slot = self.gate_up.bytes_a_slot + self.down.bytes_a_slot + 4 * self.down.shape[1]
        return max(LEAST_ROWS, WORK_BYTES // (self.num_experts * a_slot))


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
    """See `Kernels.route`."""
    num_rows, num_experts = logits.shape
    check_routing(routing, num_experts)
    out = torch.empty(num_rows, num_experts, device=logits.device)
    size = num_experts // routing.num_groups
    if num_rows:
        _route[(num_rows,)](
            aligned(logits), logits if correction is None else correction, out, routing.scale, routing.smallest_sum,
            NUM_EXPERTS=num_experts, NUM_GROUPS=routing.num_groups, SIZE=size,
            GROUPS=power_of_two(routing.num_groups), MEMBERS=power_of_two(size),
            TOP_K=routing.top_k, TOP_GROUPS=routing.top_groups, SIGMOID=routing.sigmoid,
            NORMALIZE=routing.normalize, CORRECTED=correction is not None, **EXACT,
        )  # fmt: skip
    return out


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str, biases: ExpertBiases | None = None,
    scales_inputs: bool = False,
) -> TritonExperts:  # fmt: skip
    """See `Kernels.pack_experts`; matrices that differ in how they are stored are refused."""
    check_activation(activation)
    if scales_inputs:
        raise KernelError("the Triton kernels have no experts whose inputs are scaled (Llama 4); choose --device cpu")
    if activation == SQUARED_RELU:
        raise KernelError("the Triton kernels have no experts without a gate (Nemotron-H); choose --device cpu")
    num_inputs, num_inner = gate_up[0].shape[1], down[0].shape[1]
    return TritonExperts(
        pack_bank(gate_up, (2 * num_inner, num_inputs)), pack_bank(down, (num_inputs, num_inner)), activation,
        len(gate_up), biases,
    )  # fmt: skip


def apply_experts(x: Tensor, weights: Tensor, experts: PackedExperts, base: Tensor | None = None) -> Tensor:
    """See `Kernels.experts`."""
    if not isinstance(experts, TritonExperts):
        raise KernelError(f"experts packed by {type(experts).__name__} given to the Triton kernels")
    out, piece = torch.empty_like(x), experts.rows_at_once
    for start in range(0, x.shape[0], piece):
        rows = slice(start, start + piece)
        _piece(x[rows], weights[rows], experts, None if base is None else base[rows], out[rows])
    return out


def list_slots(weights: Tensor) -> tuple[Slots, Tensor]:
    """Slots for all weights [M, E] other than 0, and the slot of every pair -> [E, M] int64, the last one for none."""
    num_rows, num_experts = weights.shape
    chosen = (weights != 0).T.reshape(-1)  # [E * M]
    counted = chosen.cumsum(0)  # [E * M] int64
    slot_of = torch.where(chosen, counted - 1, chosen.numel())
    pairs = torch.arange(chosen.numel(), device=weights.device)
    order = torch.zeros(chosen.numel() + 1, dtype=torch.int64, device=weights.device).scatter_(0, slot_of, pairs)[:-1]
    starts = torch.nn.functional.pad(counted[num_rows - 1 :: num_rows], (1, 0)).int()  # [E + 1]
    return Slots((order % num_rows).int(), (order // num_rows).int(), starts, num_rows), slot_of.view(num_experts, -1)


def _piece(x: Tensor, weights: Tensor, packed: TritonExperts, base: Tensor | None, out: Tensor) -> None:
    """Gate and up, activation, down, and the sum, for rows whose slots fit the work space."""
    num_rows, hidden = x.shape
    slots, slot_of = list_slots(weights)
    both, inner = packed.gate_up.multiply(x, slots, gathered=True), packed.down.shape[1]  # [slots, 2F]
    acted = torch.empty(slots.room, inner, device=x.device)
    biases = packed.biases or (None, None)
    _activate[(triton.cdiv(slots.room, SLOTS), triton.cdiv(inner, BLOCK))](
        both, biases[0], slots.owners, acted, slots.starts[-1:],
        SIZE=inner, ACTIVATION=ACTIVATIONS.index(packed.activation), SLOTS=SLOTS, BLOCK=BLOCK, **EXACT,
    )  # fmt: skip
    addends = packed.down.multiply(acted, slots, gathered=False)  # [slots, H]
    _add_up[(num_rows, triton.cdiv(hidden, BLOCK))](
        addends, biases[1], weights.contiguous(), slot_of, addends if base is None else base, out, num_rows,
        HIDDEN=hidden, NUM_EXPERTS=packed.num_experts, HAS_BASE=base is not None, BLOCK=BLOCK, **EXACT,
    )  # fmt: skip


@triton.jit
def _route(
    logits, correction, out, factor, smallest,
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, MEMBERS: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr, CORRECTED: tl.constexpr,
):  # fmt: skip
    """One row, its experts laid out by group [GROUPS, MEMBERS]; a row with NaN gets NaN weights."""
    row = tl.program_id(0).to(tl.int64)
    groups, members = tl.arange(0, GROUPS)[:, None], tl.arange(0, MEMBERS)[None, :]
    index = groups * SIZE + members
    inside = (groups < NUM_GROUPS) & (members < SIZE)
    values = tl.load(logits + row * NUM_EXPERTS + index, mask=inside, other=float("-inf")).to(tl.float64)
    if SIGMOID:
        scores = (1.0 / (1.0 + tl.exp(-values))).to(tl.float32)
    else:
        powers = tl.exp(values - tl.max(tl.max(values, axis=1), axis=0))
        scores = (powers / tl.sum(tl.sum(powers, axis=1), axis=0)).to(tl.float32)
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + index, mask=inside, other=0.0)
    broken = tl.max(tl.max((inside & (choice != choice)).to(tl.int32), axis=1), axis=0) != 0
    choice = tl.where(inside, choice, float("-inf"))
    if TOP_GROUPS < NUM_GROUPS:
        choice = tl.where(best_groups(choice, members, GROUPS, SIZE, TOP_GROUPS), choice, float("-inf"))
    chosen = index < 0
    for _ in range(TOP_K):
        best = tl.max(tl.max(choice, axis=1), axis=0)
        first = tl.min(tl.min(tl.where((choice == best) & (chosen == 0), index, FAR), axis=1), axis=0)
        chosen = chosen | (index == first)
        choice = tl.where(index == first, float("-inf"), choice)
    weights = tl.where(chosen, scores, 0.0)
    if NORMALIZE:
        weights = tl.div_rn(weights, tl.sum(tl.sum(weights, axis=1), axis=0) + smallest)
    tl.store(out + row * NUM_EXPERTS + index, tl.where(broken, float("nan"), weights * factor), mask=inside)


@triton.jit
def best_groups(
    choice, members, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr
):  # fmt: skip
    """Whether a group is among those whose two best add up to most; choice [GROUPS, MEMBERS] -> [GROUPS, 1]."""
    votes = tl.max(choice, axis=1)  # [GROUPS]
    if SIZE > 1:
        best = tl.min(tl.where(choice == votes[:, None], members, FAR), axis=1)
        votes += tl.max(tl.where(members == best[:, None], float("-inf"), choice), axis=1)
    numbers = tl.arange(0, GROUPS)
    kept = numbers < 0
    for _ in range(TOP_GROUPS):
        first = tl.min(tl.where((votes == tl.max(votes, axis=0)) & (kept == 0), numbers, FAR), axis=0)
        kept = kept | (numbers == first)
        votes = tl.where(numbers == first, float("-inf"), votes)
    return kept[:, None]


@triton.jit
def _activate(
    both, biases, owners, out, end,
    SIZE: tl.constexpr, ACTIVATION: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, num = tl.program_id(0) * SLOTS, tl.load(end)
    if first >= num:
        return
    slots = (first + tl.arange(0, SLOTS))[:, None].to(tl.int64)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (slots < num) & (columns < SIZE)
    gate = tl.load(both + slots * (2 * SIZE) + columns, mask=inside, other=0.0)  # [SLOTS, BLOCK]
    up = tl.load(both + slots * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0)
    if biases is not None:
        owner = tl.load(owners + slots, mask=slots < num, other=0).to(tl.int64)
        gate += tl.load(biases + owner * (2 * SIZE) + columns, mask=inside, other=0.0)
        up += tl.load(biases + owner * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0)
    tl.store(out + slots * SIZE + columns, gated(gate, up, ACTIVATION), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_up(
    addends, biases, weights, slot_of, base, out, num_rows,
    HIDDEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_BASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """base plus a row's weighted addends, each rounded by itself, in the order of the experts."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BASE:
        total = tl.load(base + row * HIDDEN + columns, mask=inside, other=0.0)
    for expert in range(NUM_EXPERTS):
        weight = tl.load(weights + row * NUM_EXPERTS + expert)
        if weight != 0.0:
            slot = tl.load(slot_of + expert * num_rows + row)
            addend = tl.load(addends + slot * HIDDEN + columns, mask=inside, other=0.0)
            if biases is not None:
                addend += tl.load(biases + expert * HIDDEN + columns, mask=inside, other=0.0)
            total += weight * addend
    tl.store(out + row * HIDDEN + columns, total, mask=inside)
