"""A rank above 0: it computes its part of every pass that the leader announces, in the same order.

Knows: what each message asks for. Does not know: requests, drafts, why. Everything a follower keeps (its part of the
pool, its slots of recurrent state) changes by the leader's messages alone, so it is what the leader's part is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NoReturn
from zlib import crc32

from forerun.block_identity import about_part
from forerun.cache.kv_cache import KVCache, bytes_per_block
from forerun.cache.states import RecurrentStates, bytes_per_slot
from forerun.errors import ConfigError, ForerunError, RankLost
from forerun.kernels.ops import Kernels
from forerun.models.adapted import LoraAdapter
from forerun.models.base import Model, state_specs_of, with_states
from forerun.models.batch import ForwardBatch
from forerun.models.decoder import Decoder
from forerun.models.loader import LoadedModel, load_adapter
from forerun.models.memory import check_memory
from forerun.models.stages import StagedDecoder
from forerun.runtime.parallel.crew import EXIT_LOST, digest_of_adapter
from forerun.runtime.parallel.exchange import Exchange
from forerun.runtime.parallel.leader import KV_DTYPES
from forerun.runtime.parallel.links import BEAT_S, Link, LinkClosed, Watch
from forerun.runtime.parallel.messages import Kind, PassOrder, RankMessage, StateCall, TierCall, TierOrder, read_commit
from forerun.runtime.parallel.spilling import RankTiers, place_of, rank_tiers
from forerun.weights.identity import stamps_of

LEADER = 0


@dataclass(frozen=True, slots=True)
class _Engine:
    """What one of the leader's engines has here."""

    model: Model
    kv_cache: KVCache
    states: RecurrentStates | None
    about: dict[str, str] = field(default_factory=dict)  # what the bits of its blocks depend on
    tiers: list[RankTiers] = field(default_factory=list)  # at most one


class Inbox:
    """What the leader says, read by a thread that ends this process if the leader is lost."""

    def __init__(self, link: Link, rank: int, limit_s: float) -> None:
        """limit_s: of the leader's silence."""
        self.link = link
        self._rank = rank
        self._has_ended = False
        self._messages: SimpleQueue[RankMessage] = SimpleQueue()
        self._watch = Watch({LEADER: link}, limit_s, self._arrived, self._lost)
        self._watch.start()

    def next(self) -> RankMessage:
        """Waits."""
        return self._messages.get()

    def tell(self, message: RankMessage) -> None:
        """Answer the leader, or end without one; who has told all to end hears nothing any more."""
        try:
            self.link.send(message.kind, message.encode())
        except LinkClosed as error:
            if not self._has_ended:
                self._lost(LEADER, str(error))

    def fail(self, error: BaseException) -> NoReturn:
        """Tell the leader why this rank cannot go on, and end."""
        text = str(error) if isinstance(error, ForerunError) else f"{type(error).__name__}: {error}"
        self._watch.stop()
        try:
            self.link.send(Kind.LOST, RankMessage(Kind.LOST, (), [text.replace("\0", " ")]).encode())
        except LinkClosed:
            _print(self._rank, text)
        self.leave()

    def leave(self) -> NoReturn:
        """End with a status that says so, whatever other threads wait for."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(EXIT_LOST)

    def _arrived(self, rank: int, message: RankMessage) -> None:
        if message.kind == Kind.LOST:
            _print(self._rank, message.texts[0])
            self.leave()
        if message.kind == Kind.END:
            self._has_ended = True
            self._watch.stop()
        self._messages.put(message)

    def _lost(self, rank: int, why: str) -> None:
        _print(self._rank, f"the leader (rank 0) is lost: {why}")
        self.leave()


def _print(rank: int, text: str) -> None:
    with suppress(OSError, ValueError):  # nobody may read any more, and the rank has to end all the same
        print(f"rank {rank} ends: {text}", file=sys.stderr, flush=True)


class RankFollower:
    """This rank's part of the model and of the engines on it."""

    def __init__(self, loaded: LoadedModel, kernels: Kernels, exchange: Exchange, inbox: Inbox) -> None:
        """loaded: this rank's shard of its stage."""
        assert isinstance(loaded.model, Decoder)
        self._loaded, self._model = loaded, loaded.model
        self._kernels = kernels
        self._exchange = exchange
        self._inbox = inbox
        self._engines: dict[int, _Engine] = {}
        self._adapters: dict[int, LoraAdapter] = {}
        self._chain = 0  # check sum of all messages, as `crew.Crew` has it

    def run(self) -> None:
        """Do what the leader says until it ends all ranks."""
        while (message := self._inbox.next()).kind != Kind.END:
            self._chain = crc32(message.encode(), self._chain)
            self._do(message)

    def _do(self, message: RankMessage) -> None:
        numbers = message.numbers
        if message.kind == Kind.PASS:
            self._pass(PassOrder.read(message))
        elif message.kind == Kind.OPEN:
            self._open(*numbers)
            self._inbox.tell(RankMessage(Kind.READY))
        elif message.kind == Kind.CLOSE:
            del self._engines[numbers[0]]
        elif message.kind == Kind.MOVE:
            half = (len(numbers) + 1) // 2
            self._engines[numbers[0]].kv_cache.move(numbers[1:half], numbers[half:])
        elif message.kind == Kind.COMMIT:
            self._engines[numbers[0]].model.commit(read_commit(message))
        elif message.kind == Kind.RELEASE:
            self._engines[numbers[0]].model.release(message.texts[0])
        elif message.kind == Kind.STATES:
            self._keep(numbers, message.texts[0] if message.texts else "")
        elif message.kind == Kind.TIERS:
            self._tier(message)
        elif message.kind == Kind.ADAPTER:
            self._inbox.tell(RankMessage(Kind.READY, (), self._adapt(numbers[0], *message.texts)))
        elif message.kind == Kind.FORGET:
            self._adapters.pop(numbers[0], None)

    def _open(self, engine: int, num_blocks: int, block_size: int, num_slots: int, *dtypes: int) -> None:
        """Raises ResourceError if this machine has no room."""
        specs = [spec._replace(dtype=KV_DTYPES[dtypes[0]]) for spec in self._model.kv_specs]
        state_specs = state_specs_of(self._model)
        needed = num_blocks * bytes_per_block(specs, block_size) + num_slots * bytes_per_slot(state_specs)
        check_memory(needed, f"a KV cache of {num_blocks} blocks", self._kernels.device)
        states = RecurrentStates(state_specs, num_slots, self._kernels.device) if num_slots else None
        model: Model = self._model if states is None else with_states(self._model, states)
        self._engines[engine] = _Engine(model, KVCache(self._kernels, specs, num_blocks, block_size), states)

    def _adapt(self, number: int, path: str, digest: str) -> list[str]:
        """Read the adapter that has these files on rank 0 -> why not, if so."""
        try:
            adapter = load_adapter("", path, self._loaded, self._kernels)
            if digest_of_adapter(adapter) != digest:
                return [f"{path} has other files than on rank 0: copy the same folder to all"]
        except Exception as error:  # nothing has changed yet; the other ranks go on
            text = str(error) if isinstance(error, ForerunError) else f"{type(error).__name__}: {error}"
            return [text.replace("\0", " ")]
        self._adapters[number] = adapter
        return []

    def _pass(self, order: PassOrder) -> None:
        engine, exchange = self._engines[order.engine], self._exchange
        adapters = [self._adapters[number] if number else None for number in order.adapters]
        batch = ForwardBatch.build(order.sequences, engine.kv_cache.block_size, adapters=adapters)
        exchange.digest = self._chain if order.is_checked else None
        out = engine.model.forward(batch, engine.kv_cache.layers, order.hidden_layers)
        stage = self._model.stage if isinstance(self._model, StagedDecoder) else None
        if stage is None or stage.is_last:
            exchange.note(out.logits)
        if order.is_checked and exchange.digest is not None:
            self._inbox.tell(RankMessage(Kind.DIGEST, [order.number, exchange.digest]))
        if stage is not None and exchange.layout.ranks_of(stage.index)[0] == exchange.rank:
            for layer in stage.states_of(order.hidden_layers)[stage.index]:
                exchange.send_to(LEADER, out.hidden[layer])
            if stage.is_last and batch.num_logit_rows:
                exchange.send_to(LEADER, out.logits)
        exchange.settle()

    def _keep(self, numbers: Sequence[int], request_id: str) -> None:
        engine, call, block, in_answer = numbers
        states = self._engines[engine].states
        assert states is not None, "the leader has recurrent layers, this rank has none"
        if call == StateCall.KEEP:
            states.keep(request_id, block, bool(in_answer))
        elif call == StateCall.RESTORE:
            states.restore(request_id, block)
        else:
            states.forget(block)

    def _tier(self, message: RankMessage) -> None:
        call = TierCall(message.numbers[1])
        if call not in (TierCall.DESCRIBE, TierCall.OPEN):
            order = TierOrder.read(message)
            self._engines[order.engine].tiers[0].do(order)
            return
        engine, texts = self._engines[message.numbers[0]], ["", ""]
        try:
            if call == TierCall.DESCRIBE:
                engine.about.update(self._about(engine))
                texts[1] = json.dumps(engine.about, sort_keys=True)
            else:
                own, (folder, identity) = (engine.about, engine.kv_cache, engine.states), message.texts
                engine.tiers.append(rank_tiers(folder, identity, message.numbers[-1], *own, self._answer))
        except (ForerunError, OSError) as error:  # nothing has changed yet; the leader refuses the option
            texts[0] = str(error).replace("\0", " ")
        self._inbox.tell(RankMessage(Kind.READY, (), texts))

    def _about(self, engine: _Engine) -> dict[str, str]:
        """What the bits of blocks here depend on. Raises ConfigError for files that are not those that were loaded."""
        loaded, exchange = self._loaded, self._exchange
        about = about_part(self._model, self._kernels, loaded.folder, engine.kv_cache)
        if loaded.stamps != stamps_of(loaded.folder):
            raise ConfigError(f"the files of {loaded.folder} have changed since its weights were read: load it again")
        return {**about, "rank": place_of(exchange.rank, exchange.layout)}

    def _answer(self, numbers: Sequence[int]) -> None:
        self._inbox.tell(RankMessage(Kind.ANSWER, numbers))


def guarded(work: Callable[[], None], inbox: Inbox, limit_s: float) -> None:
    """Do it; errors are told to the leader and end this process.

    Where an exchange broke off it is another rank that is lost. The leader finds out which one within the time limit,
    and the inbox ends this process.
    """
    try:
        work()
    except RankLost as error:
        time.sleep(limit_s + 2 * BEAT_S)
        inbox.fail(error)
    except Exception as error:
        inbox.fail(error)
