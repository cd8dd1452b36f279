"""Rank 0 of a model on several ranks: it tells the others each pass before it computes its own part.

Knows: what followers must be told, and in which order; what becomes of a lost rank. Does not know: how ranks start
(`start`), what followers do (`follower`), requests. Engine, scheduler and drafters run here and nowhere else.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from threading import Condition, Timer
from weakref import finalize
from zlib import crc32

import torch
import torch.distributed as dist

from forerun.cache.kv_cache import KVCache
from forerun.cache.states import RecurrentStates
from forerun.errors import ConfigError, ForerunError, RankLost
from forerun.kernels.ops import LayerKV
from forerun.kernels.ranks import ALONE
from forerun.models.base import CommittedPath, PassOutput, States, StateSpec
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import Decoder
from forerun.models.hybrid import HybridDecoder
from forerun.models.stages import PipelineStage, StagedDecoder
from forerun.runtime.parallel.exchange import Exchange, digest_of
from forerun.runtime.parallel.links import Link, LinkClosed, Watch
from forerun.runtime.parallel.messages import Kind, PassOrder, RankMessage, StateCall, commit_message

CHECKED_EVERY = 64  # passes
OPEN_LIMIT_S = 120.0  # for a follower to make room for an engine
_GRACE_S, _NAME_S = 5.0, 2.0  # for a blocked pass to end by itself, and for the watch to say who is lost
KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # as messages number them
_RECEIVED = -1  # the logits as the leader got them, beside what ranks made
EXIT_LOST = 1


class Crew:
    """The followers of this process, and what it must know of them."""

    def __init__(
        self, exchange: Exchange, links: Mapping[int, Link], hosts: Mapping[int, str],
        workers: Sequence[subprocess.Popen[bytes]], limit_s: float,
    ) -> None:  # fmt: skip
        """links and hosts by rank. workers: the followers that this process has started. limit_s: of silence."""
        self.exchange = exchange
        self.shards = ALONE  # the ranks of this stage, when they have connected
        self.failure: RankLost | None = None
        self.on_failure: list[Callable[[RankLost], None]] = []
        self.num_here = list(hosts.values()).count(hosts[0])  # ranks on this machine
        self.told_bytes = self.told = self.num_passes = 0
        self._links, self._hosts, self._workers = dict(links), dict(hosts), list(workers)
        self._watch = Watch(links, limit_s, self._arrived, self._lost)
        self._changed = Condition()
        self._ready = set[int]()
        self._stamps: dict[int, str] = {}  # of weights
        self._num_engines = 0
        self._closed_engines = list[int]()  # whose followers are told with the next message
        self._chain = 0  # check sum of all messages
        self._digests: dict[int, dict[int, int]] = {}  # by pass, by rank
        self._is_passing = self._ended = False

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While ranks load; watches over the followers from here on."""
        self._watch.start()
        with self.passing():
            yield
        self._chain = 0

    def compare_weights(self, stamp: str) -> None:
        """Wait until all followers have looked at their files. Raises ConfigError for a rank with other weights."""
        self.await_ready()
        other = next((rank for rank, theirs in sorted(self._stamps.items()) if theirs != stamp), None)
        if other is not None:
            raise ConfigError(
                f"{self.name_of(other)} has other weights than rank 0 on {self._hosts[0]}: copy the same files to all"
            )

    def await_ready(self, limit_s: float | None = None) -> None:
        """Wait until every follower has done what it was told last. Raises RankLost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._ready >= set(self._links), limit_s)
            late = sorted(set(self._links) - self._ready)
            self._ready.clear()
        if late and self.failure is None:
            self.fail(f"{self.name_of(late[0])} was not ready within {limit_s:g} s")
        self.check()

    def check(self) -> None:
        """Raise RankLost if a rank was lost, or all have ended."""
        if self.failure is not None:
            raise self.failure
        if self._ended:
            raise RankLost("the ranks of this model were closed: make another LLM")

    @property
    def is_open(self) -> bool:
        """Whether followers can be told anything."""
        return self.failure is None and not self._ended

    def name_of(self, rank: int) -> str:
        """How errors call a rank."""
        return f"rank {rank} on {self._hosts.get(rank, 'an unknown host')}"

    # -- telling ------------------------------------------------------------------------------------------------

    def tell(self, message: RankMessage) -> None:
        """Send to all followers. Raises RankLost."""
        self.check()
        while self._closed_engines and message.kind != Kind.CLOSE:
            self.tell(RankMessage(Kind.CLOSE, [self._closed_engines.pop()]))
        body = message.encode()
        for rank, link in self._links.items():
            try:
                link.send(message.kind, body)
            except LinkClosed as error:
                self._lost(rank, str(error))
                self.check()
        self.told, self.told_bytes = self.told + len(self._links), self.told_bytes + len(self._links) * len(body)
        self._chain = crc32(body, self._chain)

    def open_engine(self, numbers: Sequence[int]) -> int:
        """Have all followers make room for an engine -> its number. Raises RankLost."""
        self._num_engines += 1
        self.tell(RankMessage(Kind.OPEN, [self._num_engines, *numbers]))
        self.await_ready(OPEN_LIMIT_S)
        return self._num_engines

    def close_engine(self, engine: int) -> None:
        """The followers' pools will be freed; callable from any thread at any time."""
        self._closed_engines.append(engine)

    def pass_number(self) -> tuple[int, bool]:
        """Of the next pass, and whether what it gives is checked."""
        self.num_passes += 1
        return self.num_passes, self.num_passes % CHECKED_EVERY == 1

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a pass: if it does not end as it should, the ranks do not agree any more, and all end."""
        self._is_passing = True
        try:
            yield
        except Exception as error:
            if isinstance(error, ForerunError) and not isinstance(error, RankLost):
                self.fail(str(error))
                raise
            raise self._named(error) from error
        except BaseException:
            self.fail("interrupted in the middle of a pass")
            raise
        finally:
            self._is_passing = False

    def _named(self, error: Exception) -> RankLost:
        """What to raise in place of an exchange's error: the watch may be about to say who is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, _NAME_S)
        self.fail(str(error))
        return self.failure or RankLost(str(error))

    # -- hearing (on the watch's thread) ------------------------------------------------------------------------

    def _arrived(self, rank: int, message: RankMessage) -> None:
        if message.kind == Kind.LOST:
            self.fail(f"{self.name_of(rank)}: {message.texts[0]}")
        elif message.kind == Kind.DIGEST:
            self.digested(rank, *message.numbers)
        elif message.kind == Kind.READY:
            with self._changed:
                self._ready.add(rank)
                self._stamps[rank] = message.texts[0] if message.texts else self._stamps[rank]
                self._changed.notify_all()

    def _lost(self, rank: int, why: str) -> None:
        self.fail(f"{self.name_of(rank)} is lost: {why}")

    def digested(self, rank: int, number: int, digest: int) -> None:
        """A rank's check sum of what its stage made in a pass and of all that it was told before."""
        layout = self.exchange.layout
        with self._changed:
            found = self._digests.setdefault(number, {})
            found[rank] = digest
            if len(found) < layout.num_ranks + (layout.num_stages > 1):
                return
            del self._digests[number]
        first = {layout.stage_of(each): each for each in sorted(found, reverse=True) if each != _RECEIVED}
        stages = {each: layout.stage_of(each) if each != _RECEIVED else layout.num_stages - 1 for each in found}
        for each, stage in stages.items():
            if found[each] != found[first[stage]]:
                self.fail(
                    f"{self.name_of(first[stage])} and {self.name_of(max(each, 0))} have different numbers for pass "
                    f"{number}, where all must be equal: look for different releases or processors, or bad memory"
                )
                return

    def expects(self, number: int, received: torch.Tensor | None) -> None:
        """The leader's own check sums of a pass: of what its stage made, and of the logits it was sent."""
        made = self.exchange.digest
        assert made is not None
        self.exchange.digest = None
        self.digested(self.exchange.rank, number, made)
        if received is not None:
            self.digested(_RECEIVED, number, digest_of(received, self._chain))

    def begin_check(self) -> None:
        """What this stage makes next is taken into a check sum."""
        self.exchange.digest = self._chain

    # -- ending -------------------------------------------------------------------------------------------------

    def fail(self, text: str) -> None:
        """Something is wrong with a rank: end all of them. Only the first call counts."""
        with self._changed:
            if self.failure is not None or self._ended:
                return
            self.failure = RankLost(f"{text}; all ranks have ended: look at its own messages, then start again")
            self._changed.notify_all()
        self._watch.stop()
        for link in self._links.values():
            with suppress(LinkClosed):
                link.send_if_room(RankMessage(Kind.LOST, (), [text]))
        for worker in self._workers:
            worker.kill()  # one that was stopped, too
        self.shards.close()
        self.exchange.abort()
        for told in list(self.on_failure):
            told(self.failure)
        timer = Timer(_GRACE_S, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        """A pass that waits for a rank on another machine may not end by itself."""
        if self._is_passing:
            print(f"error: {self.failure}", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST)

    def close(self) -> None:
        """End all followers; nothing is left of them when this returns. More calls do nothing."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
        self._watch.stop()
        for link in self._links.values():
            with suppress(LinkClosed):
                link.send_if_room(RankMessage(Kind.END))
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(_GRACE_S)
            worker.kill()
            worker.wait()
        for link in self._links.values():
            link.close()
        self.shards.close()
        if dist.is_initialized():
            dist.destroy_process_group()


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

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`. Raises RankLost."""
        crew = self.crew
        with crew.passing():
            number, is_checked = crew.pass_number()
            crew.tell(PassOrder(self._engine, number, is_checked, tuple(hidden_layers), batch.sequences).message())
            if is_checked:
                crew.begin_check()
            out = self.part.forward(batch, kvs, hidden_layers)
            if not isinstance(self.part, StagedDecoder):
                crew.exchange.note(out.logits)
                received = None
            else:
                out = self._collect(self.part.stage, out, batch, hidden_layers)
                received = out.logits
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
