"""The ops of recurrent layers on the C++ extension.

Knows: which addresses and sizes they need. Does not know: arithmetic, other ops.
"""

from __future__ import annotations

import torch
from torch import Tensor, empty

from forerun.kernels.cpu import _native
from forerun.kernels.cpu.addresses import address_of, floats_of
from forerun.kernels.recurrent_ops import DeltaHeads, Walk
from forerun.kernels.reference import ReferenceKernels


class CpuRecurrentOps(ReferenceKernels):
    """Implements `RecurrentOps` on the engine of `CpuKernels`."""

    engine: _native.CpuEngine

    def causal_conv(self, x: Tensor, weight: Tensor, tails: Tensor, walk: Walk, silu: bool) -> Tensor:
        """See `RecurrentOps.causal_conv`."""
        out, (taps, channels) = empty(*x.shape), weight.shape
        addresses = [floats_of(tensor) for tensor in (x, weight, tails, out)]
        self.engine.causal_conv(*addresses, *_walk(walk, tails), x.shape[0], channels, taps, silu)
        return out

    def gated_delta(
        self, qkv: Tensor, gates: Tensor, heads: DeltaHeads, decay: Tensor, bias: Tensor, memory: Tensor, walk: Walk
    ) -> Tensor:
        """See `RecurrentOps.gated_delta`."""
        out = empty(qkv.shape[0], heads.values_size)
        addresses = [floats_of(tensor) for tensor in (qkv, gates, decay, bias, memory, out)]
        self.engine.gated_delta(*addresses, *_walk(walk, memory), qkv.shape[0], *heads)
        return out


def _walk(walk: Walk, slots: Tensor) -> tuple[int, ...]:
    """Addresses of the columns, how many sequences and slots there are."""
    columns = (walk.slots, walk.firsts, walk.num_known, walk.parents)
    return *(address_of(column, torch.int32) for column in columns), walk.slots.shape[0], slots.shape[0]
