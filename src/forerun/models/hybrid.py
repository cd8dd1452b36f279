"""A decoder some of whose layers are recurrent: their state lies in slots, beside the pool of the others.

Knows: which layers read what, that drafts leave no state until they are accepted. Does not know: what layers compute,
who owns slots.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.kernels.device import to_device
from forerun.kernels.ops import LayerKV
from forerun.kernels.recurrent_ops import LayerState, StateRows, Walk
from forerun.models.base import CommittedPath, PassOutput, States, StateSpec
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import BothCaches, Decoder, DecoderLayer, DecoderParts, LayerCache
from forerun.models.walk import end_of, replay_of, walk_of


class HybridDecoder(Decoder):
    """A decoder over the pool and slots of state. Implements `models.base.Model` and `KeepsSlots`.

    A pass advances states over known tokens and roots, which plain decoding would compute next in any case. What it
    keeps of drafts are their inputs to the recurrence; `commit` goes through the accepted ones by the same operations.
    """

    def __init__(self, parts: DecoderParts, max_position: int, kv_dtype: torch.dtype) -> None:
        """See `Decoder`."""
        super().__init__(parts, max_position, kv_dtype)
        self._recurrent = [layer.recurrent for layer in parts.layers if layer.recurrent is not None]
        self.state_specs = tuple(StateSpec(layer.tail, layer.memory) for layer in self._recurrent)
        self._states: States | None = None
        self._sequences: tuple[SequenceRows, ...] = ()  # of the last pass

    def with_states(self, states: States) -> HybridDecoder:
        """See `models.base.KeepsSlots`."""
        other = copy.copy(self)
        other._states = states
        return other

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`; `kvs` are those of the attention layers. Raises UnsupportedError without slots."""
        if self._states is None:
            raise UnsupportedError(
                "models with recurrent layers run in an engine only; `forerun perplexity` measures models whose layers "
                "all attend"
            )
        self._sequences = batch.sequences
        walk = walk_of(batch, self._states, self.device)
        states, pooled = iter(self._states.layers), self.pooled(kvs)
        caches = [_cache(*each, walk, states) for each in zip(self.parts.layers, pooled, strict=True)]
        out = self._run(batch, caches, hidden_layers)
        for rows in batch.sequences:
            self._states.end(rows.request_id, end_of(rows))
        return out

    @torch.no_grad()
    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """Advance states over the drafts that were accepted."""
        if self._states is None:
            return
        replay = replay_of(self._sequences, paths, self._states)
        if replay is not None:
            replay = replay.on(self.device)
            for layer, state in zip(self._recurrent, self._states.layers, strict=True):
                layer.replay(replay.drafts, StateRows(state, replay.walk))
            for request_id, num_tokens in replay.ends.items():
                self._states.end(request_id, num_tokens)

    def release(self, request_id: str) -> None:
        """Take the request's slot back."""
        if self._states is not None:
            self._states.release(request_id)

    def states_at(self, roots: Sequence[SequenceRows], layers: Sequence[int]) -> States:
        """Copies, for drafts to advance, of what some layers keep before these roots; all tokens before were read."""
        assert self._states is not None, "only an engine's model has states"
        slots = []
        for rows in roots:
            slots.append(self._states.begin(rows.request_id, rows.tree_start))
            self._states.end(rows.request_id, rows.tree_start)
        recurrent = [index for index, layer in enumerate(self.parts.layers) if layer.recurrent is not None]
        kept = [state for index, state in zip(recurrent, self._states.layers, strict=True) if index in layers]
        return CopiedStates(roots, [_copied(state, torch.tensor(slots)) for state in kept])


class CopiedStates:
    """States of sequences whose drafts go on from them and are then forgotten. Implements `models.base.States`."""

    def __init__(self, sequences: Sequence[SequenceRows], layers: Sequence[LayerState]) -> None:
        self.layers = layers
        self._slots = {rows.request_id: slot for slot, rows in enumerate(sequences)}

    def begin(self, request_id: str, num_tokens: int) -> int:
        """See `States`; drafts are gone through in order."""
        return self._slots[request_id]

    def end(self, request_id: str, num_tokens: int) -> None:
        """See `States`."""

    def release(self, request_id: str) -> None:
        """See `States`."""


def _copied(state: LayerState, slots: Tensor) -> LayerState:
    slots = to_device(slots, state.memory.device)
    return LayerState(state.tails[slots], state.memory[slots], state.inputs.new_empty(0))


def _cache(
    layer: DecoderLayer, kv: LayerKV | None, walk: Walk, states: Iterator[LayerState]
) -> LayerCache:  # fmt: skip
    """What the layer needs of its share of the pool and the next state."""
    if layer.recurrent is None:
        return kv
    rows = StateRows(next(states), walk)
    return rows if kv is None else BothCaches(kv, rows)
