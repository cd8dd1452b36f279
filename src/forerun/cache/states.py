"""Slots of recurrent state: what recurrent layers keep of a sequence in place of keys and values.

Knows: the tensors, which request owns which slot, how many tokens its state comes after, after which blocks of the KV
pool a state is kept. Does not know: what a state means, who runs, which prefix a block stands for. A
request owns one slot while it runs, as it owns blocks: from its first pass until it ends or is preempted. Other slots
hold states that later requests may go on from; the least recently used one makes room.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache.block_pool import BlockPool
from forerun.kernels.recurrent_ops import LayerState
from forerun.models.base import StateSpec

_UNKNOWN = -1  # tokens: something was begun in the slot and has not ended


class RecurrentStates:
    """`num_slots` slots in every recurrent layer. Implements `models.base.States` and `prefix_cache.KeptStates`."""

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, device: torch.device) -> None:
        self.layers: Sequence[LayerState] = [_allocate(spec, num_slots, device) for spec in specs]
        self._num_tokens = [_UNKNOWN] * num_slots  # that each slot's state comes after
        self._pool = BlockPool(num_slots)
        self._pool.on_evict = self._forget
        self._slots: dict[str, int] = {}  # by request
        self._kept: dict[int, int] = {}  # slot by the block of the KV pool that the state comes after
        self._latest: dict[str, int] = {}  # by request: the block it reached last, behind its prompt

    @property
    def num_free(self) -> int:
        """Slots that no request owns and that keep nothing."""
        return self._pool.num_free

    def begin(self, request_id: str, num_tokens: int) -> int:
        """See `States`."""
        slot = self._slot(request_id)
        known, self._num_tokens[slot] = self._num_tokens[slot], _UNKNOWN
        if num_tokens == 0:
            for layer in self.layers:
                layer.clear(slot)
        elif known != num_tokens:
            raise RuntimeError(f"request {request_id} goes on after {num_tokens} tokens, its state after {known}")
        return slot

    def end(self, request_id: str, num_tokens: int) -> None:
        """See `States`."""
        self._num_tokens[self._slots[request_id]] = num_tokens

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            slots = self._pool.allocate(1)
            assert slots is not None, "more requests run than there are slots"
            slot = self._slots[request_id] = slots[0]
            self._num_tokens[slot] = _UNKNOWN
        return slot

    def release(self, request_id: str) -> None:
        """See `States`."""
        self._latest.pop(request_id, None)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._pool.release([slot])

    # -- states that outlive their requests ---------------------------------------------------------------------

    def has(self, block: int) -> bool:
        """See `KeptStates`."""
        return block in self._kept

    def keep(self, request_id: str, block: int, in_answer: bool) -> None:
        """See `KeptStates`."""
        if in_answer and self._latest.get(request_id) != block:
            self.forget(self._latest.pop(request_id, -1))
        known = self._kept.get(block)
        slots = self._pool.allocate(1) if known is None else [known]
        if slots is None:
            return
        try:
            if known is None:
                self._copy(self._slots[request_id], slots[0])
                self._pool.keep(slots[0])
                self._kept[block] = slots[0]  # not before it is whole
            else:
                self._pool.share(slots)
        finally:
            self._pool.release(slots)  # now the most recently used
        if in_answer:
            self._latest[request_id] = block

    def restore(self, request_id: str, block: int) -> None:
        """See `KeptStates`."""
        slot = self._kept[block]
        if self._pool.num_available == 1:  # no room for both: the state moves
            num_tokens = self._num_tokens[slot]
            self.forget(block)
            assert self._slot(request_id) == slot, "the slot that is free is another one"
            self._num_tokens[slot] = num_tokens
            return
        self._pool.share([slot])
        try:
            self._copy(slot, self._slot(request_id))
        finally:
            self._pool.release([slot])

    def forget(self, block: int) -> None:
        """See `KeptStates`."""
        slot = self._kept.pop(block, None)
        if slot is not None:
            self._pool.drop(slot)

    # -- states that slower memory keeps ---------------------------------------------------------------------------

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a slot has a share of, [num_slots, ...] each."""
        both = [tensor for layer in self.layers for tensor in (layer.tails, layer.memory)]
        return [tensor for tensor in both if tensor.numel()]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(tensor[0].nbytes for tensor in self.tensors)

    def kept(self, block: int) -> list[torch.Tensor] | None:
        """The state after the block, in the order of `tensors`, until anything else is called; None: it is not kept."""
        slot = self._kept.get(block)
        return None if slot is None else [tensor[slot] for tensor in self.tensors]

    def put(self, block: int, num_tokens: int, state: Sequence[torch.Tensor]) -> None:
        """Keep a state that was computed elsewhere, after the block and `num_tokens` tokens, if there is a slot."""
        slots = None if block in self._kept else self._pool.allocate(1)
        if slots is None:
            return
        for tensor, own in zip(self.tensors, state, strict=True):
            tensor[slots[0]].copy_(own.view(tensor.shape[1:]))
        self._num_tokens[slots[0]] = num_tokens
        self._pool.keep(slots[0])
        self._kept[block] = slots[0]
        self._pool.release(slots)

    def _forget(self, slot: int) -> None:
        """The pool takes the slot for something else."""
        self._kept = {block: kept for block, kept in self._kept.items() if kept != slot}

    def _copy(self, source: int, target: int) -> None:
        self._num_tokens[target] = _UNKNOWN
        for layer in self.layers:
            layer.tails[target].copy_(layer.tails[source])
            layer.memory[target].copy_(layer.memory[source])
        self._num_tokens[target] = self._num_tokens[source]


def bytes_per_slot(specs: Sequence[StateSpec]) -> int:
    """Bytes of one request's state over all layers."""
    return sum(spec.bytes_per_slot for spec in specs)


def _allocate(spec: StateSpec, num_slots: int, device: torch.device) -> LayerState:
    tails = torch.zeros(num_slots, *spec.tail, device=device)
    return LayerState(tails, torch.zeros(num_slots, *spec.memory, device=device), torch.empty(0, device=device))
