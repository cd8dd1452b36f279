"""Rank 0's part of a model on several ranks: it tells the others each pass before it computes its own part.

Knows: what followers must be told, and in which order. Does not know: who the others are (`crew`), how ranks start
(`start`), what followers do (`follower`), requests. Engine, scheduler and drafters run here and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from weakref import finalize

import torch

from forerun.cache.boundaries import BoundaryStates
from forerun.cache.disk import DiskTier
from forerun.cache.kv_cache import KVCache
from forerun.cache.states import RecurrentStates
from forerun.cache.tiers import Tier
from forerun.kernels.ops import LayerKV
from forerun.models.base import CommittedPath, PassOutput, States, StateSpec
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import Decoder
from forerun.models.hybrid import HybridDecoder
from forerun.models.stages import PipelineStage, StagedDecoder
from forerun.runtime.parallel.crew import Crew
from forerun.runtime.parallel.messages import Kind, PassOrder, RankMessage, StateCall, commit_message
from forerun.runtime.parallel.spilling import RankedSpill, about_ranks, open_tier

KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # as messages number them


class RankedModel:
    """The leader's part of a model. Implements `models.base.Model` and `KeepsSlots`: engines see one model."""

    exchanges = True

    def __init__(self, model: Decoder, crew: Crew, load_ends: Callable[[], Decoder]) -> None:
        """model: this rank's shard of the first stage. load_ends: of the whole model, where draft heads need them."""
        self.part = model
        self.crew = crew
        self._load_ends = cache(load_ends)
        self.vocab_size, self.hidden_size, self.max_position = model.vocab_size, model.hidden_size, model.max_position
        self.device, self.mask_token_id = model.device, model.mask_token_id
        self.kv_specs, self.weight_bytes, self.num_parameters = model.kv_specs, model.weight_bytes, model.num_parameters
        self.state_specs: tuple[StateSpec, ...] = model.state_specs if isinstance(model, HybridDecoder) else ()
        self._engine = 0

    def seen_by_heads(self) -> Decoder:
        """The model without its layers, for heads on this rank that read its embedding or output layer."""
        return self._load_ends()

    def with_states(self, states: States) -> RankedModel:
        """See `KeepsSlots`."""
        assert isinstance(self.part, HybridDecoder)
        other = copy.copy(self)
        other.part = self.part.with_states(states)
        return other

    def opened(self, kv_cache: KVCache, states: RecurrentStates | None) -> RankedModel:
        """The model for an engine with this pool and these slots; followers make room for as many. Raises RankLost."""
        dtypes = [KV_DTYPES.index(layer.values.dtype) for layer in kv_cache.layers[:1]]
        num_slots = 0 if states is None else states.num_free
        other = copy.copy(self)
        other._engine = self.crew.open_engine([kv_cache.num_blocks, kv_cache.block_size, num_slots, *dtypes])
        kv_cache.on_move = other._move
        finalize(other, self.crew.close_engine, other._engine)
        return other

    def mirrored(self, states: RecurrentStates) -> MirroredStates:
        """The slots as the prefix cache keeps states in them: followers do the same."""
        return MirroredStates(states, self.crew, self._engine)

    def about_ranks(self) -> dict[str, str]:
        """What the bits of a block depend on beside this rank's part. Raises ConfigError and RankLost."""
        return about_ranks(self.crew, self._engine)

    def spill(
        self, tiers: Sequence[Tier], kv_cache: KVCache, states: RecurrentStates | None, boundaries: BoundaryStates,
        identity: bytes,
    ) -> RankedSpill:  # fmt: skip
        """Have all followers open such tiers for their parts of blocks, whose keys begin at `identity`.

        Raises ConfigError for a rank that cannot, and RankLost.
        """
        for tier in tiers:
            assert isinstance(tier, DiskTier), "options refuse any other tier for several ranks"
            open_tier(self.crew, self._engine, tier, identity)
        return RankedSpill(tiers, kv_cache, states, boundaries, self.crew, self._engine)

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`. Raises RankLost."""
        crew = self.crew
        with crew.passing():
            number, is_checked = crew.pass_number()
            layers, adapters = tuple(hidden_layers), crew.numbers_of(batch.adapters)
            crew.tell(PassOrder(self._engine, number, is_checked, layers, batch.sequences, adapters).message())
            if is_checked:
                crew.begin_check()
            out = self.part.forward(batch, kvs, hidden_layers)
            if not isinstance(self.part, StagedDecoder):
                crew.exchange.note(out.logits)
                received = None
            else:
                out = self._collect(self.part.stage, out, batch, hidden_layers)
                received = out.logits
            crew.exchange.settle()
            if is_checked:
                crew.expects(number, received)
        return out

    def _collect(
        self, stage: PipelineStage, out: PassOutput, batch: ForwardBatch, hidden_layers: Sequence[int]
    ) -> PassOutput:
        """The states and logits that other stages have for the leader, in the order in which `follower` sends them."""
        exchange, hidden = self.crew.exchange, dict(out.hidden)
        ranks = [exchange.layout.ranks_of(index)[0] for index in range(stage.count)]
        missing = [layer for layer in hidden_layers if layer not in hidden]
        rows = (batch.num_rows, self.hidden_size)
        for rank, layers in zip(ranks[1:], stage.states_of(missing)[1:], strict=True):
            hidden |= {layer: exchange.receive_from(rank, rows) for layer in layers}
        logits = out.logits
        if batch.num_logit_rows:
            logits = exchange.receive_from(ranks[-1], (batch.num_logit_rows, self.vocab_size))
        return PassOutput(logits, hidden)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """See `models.base.Model`; only recurrent layers have something to do."""
        if self.state_specs:
            self.crew.tell(commit_message(self._engine, paths))
        self.part.commit(paths)

    def release(self, request_id: str) -> None:
        """See `models.base.Model`."""
        if self.state_specs and self._engine and self.crew.is_open:
            self.crew.tell(RankMessage(Kind.RELEASE, [self._engine], [request_id]))
        self.part.release(request_id)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.crew.tell(RankMessage(Kind.MOVE, [self._engine, *sources, *targets]))


class MirroredStates:
    """Slots of recurrent state that followers keep alike. Implements `prefix_cache.KeptStates`."""

    def __init__(self, states: RecurrentStates, crew: Crew, engine: int) -> None:
        """`states`: the leader's."""
        self._states = states
        self._crew = crew
        self._engine = engine

    def has(self, block: int) -> bool:
        """See `KeptStates`."""
        return self._states.has(block)

    def keep(self, request_id: str, block: int, in_answer: bool) -> None:
        """See `KeptStates`."""
        self._tell(StateCall.KEEP, block, request_id, in_answer)
        self._states.keep(request_id, block, in_answer)

    def restore(self, request_id: str, block: int) -> None:
        """See `KeptStates`."""
        self._tell(StateCall.RESTORE, block, request_id)
        self._states.restore(request_id, block)

    def forget(self, block: int) -> None:
        """See `KeptStates`."""
        self._tell(StateCall.FORGET, block)
        self._states.forget(block)

    def _tell(self, call: StateCall, block: int, request_id: str = "", in_answer: bool = False) -> None:
        self._crew.tell(RankMessage(Kind.STATES, [self._engine, call, block, int(in_answer)], [request_id]))
