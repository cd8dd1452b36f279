"""The op contract of recurrent layers: a state a sequence, advanced token by token, over spans and trees.

Knows: how rows follow each other, where states lie, what the ops compute. Does not know: who implements them, whose
slots these are. The rules of `kernels.ops` hold here too. Rows are never grouped: each continues from the state that
its parent left, by the same operations in the same order, so prefill, trees and plain decoding give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.device import to_device


@dataclass(frozen=True, slots=True)
class Walk:
    """Which state each row of a batch continues from.

    Row j continues from the state after row `parents[j]`, an earlier row of its sequence; -1: from its sequence's slot.
    The first `num_known[s]` rows of sequence s are a chain of known tokens: an op leaves the state after the last of
    them in the slot. Further rows are a draft tree below that chain, and leave nothing.
    """

    slots: Tensor  # [S] int32, pairwise different
    firsts: Tensor  # [S + 1] int32: rows of sequence s are firsts[s] .. firsts[s + 1] - 1
    num_known: Tensor  # [S] int32, at least 1
    parents: Tensor  # [M] int32
    drafts: Tensor  # [D] int64: the rows that are not known, ascending

    @staticmethod
    def build(slots: Sequence[int], num_known: Sequence[int], parents: Sequence[Sequence[int]]) -> Walk:
        """`parents`: a list a sequence, by rows of that sequence."""
        firsts = [0]
        for rows in parents:
            firsts.append(firsts[-1] + len(rows))
        above = [first + row if row >= 0 else -1 for first, rows in zip(firsts, parents, strict=False) for row in rows]
        known = zip(firsts, num_known, firsts[1:], strict=False)
        drafts = [row for first, num, end in known for row in range(first + num, end)]
        return Walk(
            _column(slots), _column(firsts), _column(num_known), _column(above), torch.tensor(drafts, dtype=torch.int64)
        )

    def on(self, device: torch.device) -> Walk:
        """The walk on a device (itself if it is there); the host does not wait."""
        if self.parents.device == device:
            return self
        columns = [self.slots, self.firsts, self.num_known, self.parents, self.drafts.int()]
        sizes = [len(column) for column in columns]
        slots, firsts, num_known, parents, drafts = to_device(torch.cat(columns), device).split_with_sizes(sizes)
        return Walk(slots, firsts, num_known, parents, drafts.long())


def _column(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@dataclass(slots=True)
class LayerState:
    """One recurrent layer's share of all slots."""

    tails: Tensor  # [num_slots, taps - 1, C] float32: the last inputs of the convolution, the oldest first
    memory: Tensor  # [num_slots, heads, key_dim, value_dim] float32
    inputs: Tensor  # [D, width] float32: what the layer keeps of the last pass's drafts, to replay those accepted

    def clear(self, slot: int) -> None:
        """The state before the first token."""
        self.tails[slot].zero_()
        self.memory[slot].zero_()


class StateRows(NamedTuple):
    """What a pass tells a recurrent layer about its rows."""

    state: LayerState
    walk: Walk


class DeltaHeads(NamedTuple):
    """How a row of the gated delta rule or Mamba-2 is cut: queries, then keys, then values, head by head."""

    num_keys: int  # heads of queries and keys; each serves as many neighbouring heads of values
    num_values: int
    key_dim: int
    value_dim: int

    @property
    def row_size(self) -> int:
        """Entries in one row."""
        return 2 * self.num_keys * self.key_dim + self.values_size

    @property
    def values_size(self) -> int:
        """Entries of all values."""
        return self.num_values * self.value_dim


def check_decays(num_decays: int, heads: DeltaHeads) -> None:
    """Refuse decays that are neither one for each head of values nor one for each channel of its keys."""
    if num_decays not in (heads.num_values, heads.num_values * heads.key_dim):
        raise KernelError(
            f"{num_decays} decays for {heads.num_values} heads whose keys have {heads.key_dim} channels: there must be "
            "one for each head, or for each channel"
        )


class RecurrentOps(Protocol):
    """The ops; part of `kernels.ops.Kernels`."""

    def causal_conv(
        self, x: Tensor, weight: Tensor, tails: Tensor, walk: Walk, silu: bool, bias: Tensor | None = None
    ) -> Tensor:
        """Sums over a row and the rows before it of weight [taps, C] times x [M, C], channel by channel -> [M, C].

        The last tap belongs to the row itself; to `bias` [C], if given, addends are fused in the order of the taps.
        What came before the sequence's first row is in its slot of `tails` [num_slots, taps - 1, C], which is advanced
        in place.
        silu: the sum goes through it.
        """

    def gated_delta(
        self, qkv: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, memory: Tensor, walk: Walk
    ) -> Tensor:
        """The gated delta rule (2412.06464) -> [M, num_values * value_dim].

        qkv [M, row_size]; gates [M, num_values + num_decays] are b, then a; decay and bias [num_decays]: one for each
        head of values, or for each channel of its keys (Kimi Delta Attention, 2510.26692), the row of S that this one
        is the entry for. Queries and keys are divided by their length, sqrt(sum of squares + 1e-6), queries by
        sqrt(key_dim) too. For each head of values and its state S [key_dim, value_dim], which is a slot of `memory`,
        advanced in place:

            S = exp(decay * softplus(a + bias)) * S
            S = S + k (sigmoid(b) * (v - S^T k))^T
            o = S^T q
        """

    def mamba2(
        self, rows: Tensor, steps: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, skip: Tensor, memory: Tensor,
        walk: Walk,
    ) -> Tensor:  # fmt: skip
        """The state space of Mamba-2 (2405.21060) -> [M, num_values * value_dim].

        rows [M, row_size] are c, b and x, as queries, keys and values; steps [M, num_values]; decay, bias and skip
        [num_values]. For each head and its state S [key_dim, value_dim], which is a slot of `memory`, advanced in
        place, where t = softplus(step + bias):

            S = exp(decay * t) * S + b (t * x)^T
            o = S^T c + skip * x
        """
