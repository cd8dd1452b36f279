"""Slots of recurrent state: what recurrent layers keep of a sequence in place of keys and values.

Knows: the tensors, which request owns which slot. Does not know: what a state means, when it advances (a model's pass
and commit do that), who runs. A request owns one slot while it runs, as it owns blocks: from its first pass until it
ends or is preempted, whereupon its state is computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache.block_pool import BlockPool
from forerun.kernels.recurrent_ops import LayerState
from forerun.models.base import StateSpec


class RecurrentStates:
    """`num_slots` slots in every recurrent layer. Implements `models.base.States`."""

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, device: torch.device) -> None:
        self.layers: Sequence[LayerState] = [_allocate(spec, num_slots, device) for spec in specs]
        self._pool = BlockPool(num_slots)
        self._slots: dict[str, int] = {}  # by request

    @property
    def num_free(self) -> int:
        """Slots that no request owns."""
        return self._pool.num_free

    def slot(self, request_id: str) -> int:
        """See `States`."""
        slot = self._slots.get(request_id)
        if slot is None:
            slots = self._pool.allocate(1)
            assert slots is not None, "more requests run than there are slots"
            slot = self._slots[request_id] = slots[0]
        return slot

    def release(self, request_id: str) -> None:
        """See `States`."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._pool.release([slot])


def bytes_per_slot(specs: Sequence[StateSpec]) -> int:
    """Bytes of one request's state over all layers."""
    return sum(spec.bytes_per_slot for spec in specs)


def _allocate(spec: StateSpec, num_slots: int, device: torch.device) -> LayerState:
    tails = torch.zeros(num_slots, *spec.tail, device=device)
    return LayerState(tails, torch.zeros(num_slots, *spec.memory, device=device), torch.empty(0, device=device))
