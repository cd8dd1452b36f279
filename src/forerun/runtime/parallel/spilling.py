"""Tiers of KV of a model on several ranks: each rank stores its own part of a block, and all or none have it.

Knows: what the leader's tiers tell followers, how ranks agree on what was read. Does not know: who decides what is
stored or read, files, which prefix a block stands for.

Followers copy blocks out of their pools and into them where the leader's messages say, in the order of passes, so a
block has the same contents on all ranks. What is read goes into no pool before every rank has answered how much of it
there is: the shortest part counts, on all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Lock
from typing import Final

from forerun.cache.boundaries import BoundaryStates
from forerun.cache.disk import DiskTier
from forerun.cache.kv_cache import KVCache
from forerun.cache.prefix_cache import Node
from forerun.cache.spill import Loaded, RecordName, Spill, state_key
from forerun.cache.states import RecurrentStates
from forerun.cache.tiers import Tier
from forerun.errors import ConfigError
from forerun.runtime.parallel.crew import OPEN_LIMIT_S, Crew
from forerun.runtime.parallel.exchange import RankLayout
from forerun.runtime.parallel.messages import NamedBlock, TierCall, TierOrder

FLUSH_LIMIT_S: Final = 30.0  # for other ranks to write what they were given
NOTHING: Final = Loaded((), (), (), None)

log = logging.getLogger("forerun.cache")


def place_of(rank: int, layout: RankLayout) -> str:
    """Which part of a model a rank has."""
    return f"{rank} of tensor_parallel {layout.num_shards}, pipeline_parallel {layout.num_stages}"


def about_ranks(crew: Crew, engine: int) -> dict[str, str]:
    """What blocks of the engine depend on: the leader's place, and what each follower says. Raises ConfigError."""
    layout = crew.exchange.layout
    crew.tell(TierOrder(engine, TierCall.DESCRIBE).message())
    answers = _answers(crew, None)
    return {"rank": place_of(0, layout), **{f"rank {rank}": about for rank, about in sorted(answers.items())}}


def open_tier(crew: Crew, engine: int, tier: DiskTier, identity: bytes) -> None:
    """Have all followers open a folder of the same name. Raises ConfigError for a rank that cannot, and RankLost."""
    order = TierOrder(engine, TierCall.OPEN, 0, [tier.max_bytes]).message()
    crew.tell(order._replace(texts=[str(tier.folder), identity.hex()]))
    _answers(crew, OPEN_LIMIT_S)


def _answers(crew: Crew, limit_s: float | None) -> dict[int, str]:
    """What each follower says, by rank: why not, then anything else."""
    answers = crew.await_ready(limit_s)
    for rank, (why, _) in sorted(answers.items()):
        if why:
            raise ConfigError(f"{crew.name_of(rank)} cannot keep its part of blocks: {why}")
    return {rank: about for rank, (_, about) in answers.items()}


# -- on rank 0 ------------------------------------------------------------------------------------------------------


class RankedSpill(Spill):
    """The leader's tiers; followers do what they do."""

    def __init__(
        self, tiers: Sequence[Tier], kv_cache: KVCache, states: RecurrentStates | None, boundaries: BoundaryStates,
        crew: Crew, engine: int,
    ) -> None:  # fmt: skip
        """`engine`: whose blocks these are, as followers number it."""
        super().__init__(tiers, kv_cache, states, boundaries)
        self._crew, self._engine = crew, engine

    def store(self, nodes: Sequence[Node]) -> None:
        """See `Spill`."""
        self._tell(TierCall.SAVE, blocks=[_named(node) for node in nodes])
        super().store(nodes)

    def store_state(self, node: Node) -> None:
        """See `Spill`."""
        self._tell(TierCall.SAVE_STATE, blocks=[_named(node)._replace(tokens=(), has_state=False)])
        super().store_state(node)

    def touch(self, nodes: Sequence[Node]) -> None:
        """See `Spill`. A rank that has lost one of these reads less some day; then it is computed and stored again."""
        self._tell(TierCall.TOUCH, blocks=[_named(node)._replace(tokens=()) for node in nodes])
        super().touch(nodes)

    def flush(self) -> None:
        """See `Spill`. Other ranks have `FLUSH_LIMIT_S` for it."""
        super().flush()
        self._others_have((), with_state=False)

    def has_all(self, names: Sequence[RecordName], with_state: bool) -> bool:
        """See `Spill`: whether every rank has them."""
        return super().has_all(names, with_state) and self._others_have(names, with_state)

    def _others_have(self, names: Sequence[RecordName], with_state: bool) -> bool:
        """Whether other ranks have all of these, when they have written what they were given, within the limit."""
        answers, all_came = list[bool](), Event()

        def answered(answer: Sequence[int] | None) -> None:  # one at a time
            answers.append(answer is not None and bool(answer[0]))
            if answer is None or len(answers) == self._num_followers:
                all_came.set()

        number = self._crew.ask(answered)
        self._tell(TierCall.FLUSH, number, [int(with_state)], [NamedBlock(*name) for name in names])
        have_come = all_came.wait(FLUSH_LIMIT_S)
        self._crew.forget_question(number)
        if not have_come:
            log.warning("another rank has not stored its blocks of KV after %g s; requests go on", FLUSH_LIMIT_S)
        return have_come and all(answers)

    def read(self, blocks: Sequence[RecordName], state: RecordName | None) -> Future[Loaded]:
        """See `Spill`: what every rank has."""
        reading = AgreedReading(1 + self._num_followers)
        number = reading.number = self._crew.ask(reading.answered)
        names = [NamedBlock(*name) for name in blocks]
        if state is not None:
            names.append(NamedBlock(state_key(state.key), state.depth, ()))
        self._tell(TierCall.READ, number, [int(state is not None)], names)
        super().read(blocks, state).add_done_callback(reading.own)
        return reading.loaded

    def fill(self, blocks: Sequence[int], loaded: Loaded, first: int) -> None:
        """See `Spill`."""
        self._tell(TierCall.FILL, loaded.number, [first, *blocks])
        super().fill(blocks, loaded, first)

    def fill_state(self, block: int, num_tokens: int, loaded: Loaded) -> None:
        """See `Spill`."""
        self._tell(TierCall.FILL_STATE, loaded.number, [block, num_tokens])
        super().fill_state(block, num_tokens, loaded)

    def drop(self, loaded: Loaded) -> None:
        """See `Spill`."""
        self._crew.forget_question(loaded.number)
        self._tell(TierCall.DROP, loaded.number)

    @property
    def _num_followers(self) -> int:
        return self._crew.exchange.layout.num_ranks - 1

    def _tell(
        self, call: TierCall, number: int = 0, numbers: Sequence[int] = (), blocks: Sequence[NamedBlock] = ()
    ) -> None:
        self._crew.tell(TierOrder(self._engine, call, number, numbers, blocks).message())


def _named(node: Node) -> NamedBlock:
    return NamedBlock(node.key, node.depth, node.tokens, node.block, node.has_saved_state)


class AgreedReading:
    """One reading on all ranks, which ends when the last of them has answered."""

    def __init__(self, num_ranks: int) -> None:
        """`num_ranks`: the leader, too."""
        self.loaded: Future[Loaded] = Future()
        self.number = 0
        self._left = num_ranks
        self._own = NOTHING
        self._num_blocks: int | None = None  # that all have who have answered
        self._has_state = True
        self._lock = Lock()

    def own(self, read: Future[Loaded]) -> None:
        """The leader has read."""
        if read.exception() is None:
            self._own = read.result()
        self.answered((len(self._own.blocks), int(self._own.state is not None)))

    def answered(self, answer: Sequence[int] | None) -> None:
        """A rank has so many blocks and, or not, the state; None: a rank is lost, and nothing comes of it."""
        with self._lock:
            if self.loaded.done():
                return
            if answer is None:
                self.loaded.set_result(NOTHING._replace(number=self.number))
                return
            num_blocks, has_state = answer
            self._num_blocks = num_blocks if self._num_blocks is None else min(num_blocks, self._num_blocks)
            self._has_state &= bool(has_state)
            self._left -= 1
            if self._left == 0:
                self.loaded.set_result(self._own.leading(self._num_blocks, self._has_state, self.number))


# -- on other ranks -------------------------------------------------------------------------------------------------


class RankTiers:
    """One engine's tiers on a follower. The main thread calls it, and waits for no file."""

    def __init__(self, spill: Spill, about: Mapping[str, str], answer: Callable[[Sequence[int]], None]) -> None:
        """`about`: all that tells this rank's part from others. `answer`: tells the leader, from any thread."""
        self._spill = spill
        self._answer = answer
        self._own = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).digest()
        self._readings: dict[int, Future[Loaded]] = {}

    def do(self, order: TierOrder) -> None:
        """What the leader has told."""
        number, numbers, nodes = order.number, order.numbers, [self._node(each) for each in order.blocks]
        names = [RecordName(node.key, node.depth, node.tokens) for node in nodes]
        if order.call == TierCall.SAVE:
            self._spill.save(nodes)
        elif order.call == TierCall.SAVE_STATE:
            for node in nodes:
                self._spill.save_state(node)
        elif order.call == TierCall.TOUCH:
            self._spill.touch(nodes)
        elif order.call == TierCall.READ:
            self._read(number, bool(numbers[0]), names)
        elif order.call == TierCall.FILL:
            self._spill.fill(numbers[1:], self._readings[number].result(), numbers[0])
        elif order.call == TierCall.FILL_STATE:
            self._spill.fill_state(numbers[0], numbers[1], self._readings[number].result())
        elif order.call == TierCall.DROP:
            self._readings.pop(number, None)
        elif order.call == TierCall.FLUSH:
            self._spill.when_written(lambda: self._answer([number, int(self._spill.has_all(names, bool(numbers[0])))]))

    def _node(self, named: NamedBlock) -> Node:
        """By the name it has on this rank: another one's file can never be taken for its own."""
        key = hashlib.sha256(self._own + named.key).digest()
        return Node(named.block, named.tokens, None, key=key, depth=named.depth, has_saved_state=named.has_state)

    def _read(self, number: int, with_state: bool, names: list[RecordName]) -> None:
        """The state's name is the last one, if one is read."""
        state = names.pop() if with_state else None
        if state is not None:
            state = state._replace(key=state_key(state.key))

        def read(done: Future[Loaded]) -> None:
            found = done.result() if done.exception() is None else NOTHING
            self._answer([number, len(found.blocks), int(found.state is not None)])

        self._readings[number] = self._spill.read(names, state)
        self._readings[number].add_done_callback(read)


def rank_tiers(
    folder: str, identity: str, max_bytes: int, about: Mapping[str, str], kv_cache: KVCache,
    states: RecurrentStates | None, answer: Callable[[Sequence[int]], None],
) -> RankTiers:  # fmt: skip
    """A follower's tiers in a folder. `identity`: the leader's, in hexadecimal. Raises ConfigError."""
    whole = {**about, "identity of all ranks": identity}
    tier = DiskTier(Path(folder), max_bytes, whole)
    return RankTiers(Spill([tier], kv_cache, states, BoundaryStates(kv_cache.block_size)), whole, answer)
