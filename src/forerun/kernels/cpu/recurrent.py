"""The ops of recurrent layers on the C++ extension.

Knows: which addresses and sizes they need. Does not know: arithmetic, other ops.
"""

from __future__ import annotations

import torch
from torch import Tensor, empty

from forerun.kernels.cpu import _native
from forerun.kernels.cpu.addresses import address_of, floats_of
from forerun.kernels.recurrent_ops import DeltaHeads, Walk, check_decays
from forerun.kernels.reference import ReferenceKernels


class CpuRecurrentOps(ReferenceKernels):
    """Implements `RecurrentOps` on the engine of `CpuKernels`."""

    engine: _native.CpuEngine

    def causal_conv(
        self, x: Tensor, weight: Tensor, tails: Tensor, walk: Walk, silu: bool, bias: Tensor | None = None
    ) -> Tensor:
        """See `RecurrentOps.causal_conv`."""
        out, (taps, channels) = empty(*x.shape), weight.shape
        shift = 0 if bias is None else floats_of(bias)
        addresses = (floats_of(x), floats_of(weight), shift, floats_of(tails), floats_of(out))
        self.engine.causal_conv(*addresses, *_walk(walk, tails), x.shape[0], channels, taps, silu)
        return out

    def gated_delta(
        self, qkv: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, memory: Tensor, walk: Walk
    ) -> Tensor:
        """See `RecurrentOps.gated_delta`."""
        check_decays(len(decay), heads)
        return self._advance(qkv, gates, heads, decay, bias, None, memory, walk)

    def mamba2(
        self, rows: Tensor, steps: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, skip: Tensor, memory: Tensor,
        walk: Walk,
    ) -> Tensor:  # fmt: skip
        """See `RecurrentOps.mamba2`."""
        return self._advance(rows, steps, heads, decay, bias, skip, memory, walk)

    def _advance(
        self, rows: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, skip: Tensor | None,
        memory: Tensor, walk: Walk,
    ) -> Tensor:  # fmt: skip
        """The gated delta rule, or with `skip` Mamba-2, which the engine walks alike."""
        out = empty(rows.shape[0], heads.values_size)
        given = [floats_of(tensor) for tensor in (rows, gates, decay, bias)]
        changed = (0 if skip is None else floats_of(skip), floats_of(memory), floats_of(out))
        self.engine.gated_delta(*given, *changed, *_walk(walk, memory), rows.shape[0], *heads, len(decay))
        return out


def _walk(walk: Walk, slots: Tensor) -> tuple[int, ...]:
    """Addresses of the columns, how many sequences and slots there are."""
    columns = (walk.slots, walk.firsts, walk.num_known, walk.parents)
    return *(address_of(column, torch.int32) for column in columns), walk.slots.shape[0], slots.shape[0]
