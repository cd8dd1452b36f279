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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

from forerun.cache.boundaries import BoundaryStates
from forerun.cache.disk import DiskTier
from forerun.cache.kv_cache import KVCache
from forerun.cache.lower import state_key
from forerun.cache.prefix_cache import Node
from forerun.cache.spill import Loaded, RecordName, Spill
from forerun.cache.states import RecurrentStates
from forerun.cache.tiers import Tier
from forerun.errors import ConfigError, RankLost
from forerun.runtime.parallel.crew import FLUSH_LIMIT_S, OPEN_LIMIT_S, Crew
from forerun.runtime.parallel.exchange import RankLayout
from forerun.runtime.parallel.messages import NamedBlock, TierCall, TierOrder

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
    """Have all followers open a folder of the same path. Raises ConfigError for a rank that cannot, and RankLost."""
    order = TierOrder(engine, TierCall.OPEN, 0, [tier.max_bytes]).message()
    crew.tell(order._replace(texts=[str(tier.folder.expanduser().absolute()), identity.hex()]))
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
        self._flushing: Future[list[Sequence[int]]] | None = None

    def store(self, nodes: Sequence[Node]) -> None:
        """See `Spill`. What another rank does not take is stored again with the next request that has it."""
        others = self._ask(TierCall.SAVE, blocks=[_named(node) for node in nodes])[1]
        if self._crew.is_open:  # if not, all ranks have ended, as the next pass will say
            super().store(nodes)
            others.add_done_callback(partial(_unsave, nodes, False))

    def store_state(self, node: Node) -> None:
        """See `Spill`, and `store`."""
        others = self._ask(TierCall.SAVE_STATE, blocks=[_named(node)._replace(tokens=(), has_state=False)])[1]
        if self._crew.is_open:
            super().store_state(node)
            others.add_done_callback(partial(_unsave, [node], True))

    def touch(self, nodes: Sequence[Node]) -> None:
        """See `Spill`, and `store`: a rank may have lost them."""
        others = self._ask(TierCall.TOUCH, blocks=[_named(node)._replace(tokens=()) for node in nodes])[1]
        if self._crew.is_open:
            super().touch(nodes)
            others.add_done_callback(partial(_unsave, nodes, False))

    def lacking(self, wanted: Collection[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
        """See `Spill`: what some rank lacks. Others have `FLUSH_LIMIT_S`; who has not answered since then lacks all.

        Raises RankLost.
        """
        asked = list(wanted)
        if self._flushing is not None and not self._flushing.done():
            return asked
        blocks = [NamedBlock(key, 0, (), has_state=with_state) for key, with_state in asked]
        self._flushing = self._ask(TierCall.FLUSH, blocks=blocks)[1]
        own = super().lacking(asked)
        try:
            answers = self._flushing.result(FLUSH_LIMIT_S)
        except TimeoutError:
            log.warning("another rank has not stored its blocks of KV after %g s; requests go on", FLUSH_LIMIT_S)
            return asked
        return own + [asked[index] for answer in answers for index in answer]

    def read(self, blocks: Sequence[RecordName], state: RecordName | None) -> Future[Loaded]:
        """See `Spill`: what every rank has, when all have said how much that is."""
        names = [NamedBlock(*name) for name in blocks]
        if state is not None:
            names.append(NamedBlock(state_key(state.key), state.depth, ()))
        number, others = self._ask(TierCall.READ, [int(state is not None)], names)
        loaded = Future[Loaded]()

        def own_is_read(own: Future[Loaded]) -> None:
            others.add_done_callback(lambda _: loaded.set_result(_common(own, others, number)))

        super().read(blocks, state).add_done_callback(own_is_read)
        return loaded

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
        self._tell(TierCall.DROP, loaded.number)

    def _tell(self, call: TierCall, number: int, numbers: Sequence[int] = ()) -> None:
        with suppress(RankLost):  # as the next pass will say
            self._crew.tell(TierOrder(self._engine, call, number, numbers).message())

    def _ask(
        self, call: TierCall, numbers: Sequence[int] = (), blocks: Sequence[NamedBlock] = ()
    ) -> tuple[int, Future[list[Sequence[int]]]]:
        return self._crew.ask(lambda number: TierOrder(self._engine, call, number, numbers, blocks).message())


def _named(node: Node) -> NamedBlock:
    return NamedBlock(node.key, node.depth, node.tokens, node.block, node.has_saved_state)


def _unsave(nodes: Sequence[Node], of_states: bool, others: Future[list[Sequence[int]]]) -> None:
    """Other ranks do not have the nodes of these indices."""
    for index in chain(*([] if others.exception() else others.result())):
        if of_states:
            nodes[index].has_saved_state = False
        else:
            nodes[index].saved = -1


def _common(own: Future[Loaded], others: Future[list[Sequence[int]]], number: int) -> Loaded:
    """What the leader has read and all others have, too; nothing if a rank is lost."""
    if own.exception() or others.exception():
        return NOTHING._replace(number=number)
    blocks, rows, boundaries, state, _ = own.result()
    nums_blocks, have_state = zip(*others.result(), strict=True)
    num = min(len(blocks), *nums_blocks)
    return Loaded(
        blocks[:num], [each[:num] for each in rows], boundaries[:num], state if all(have_state) else None, number
    )


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
        if order.call in (TierCall.SAVE, TierCall.SAVE_STATE, TierCall.TOUCH):
            self._keep(order.call, number, nodes)
        elif order.call == TierCall.READ:
            self._read(number, bool(numbers[0]), [RecordName(node.key, node.depth, node.tokens) for node in nodes])
        elif order.call == TierCall.FILL:
            self._spill.fill(numbers[1:], self._readings[number].result(), numbers[0])
        elif order.call == TierCall.FILL_STATE:
            self._spill.fill_state(numbers[0], numbers[1], self._readings[number].result())
        elif order.call == TierCall.DROP:
            self._readings.pop(number, None)
        elif order.call == TierCall.FLUSH:
            self._spill.when_written(
                lambda: self._say_where(
                    number, [not self._spill.is_stored(node.key, node.has_saved_state) for node in nodes]
                )
            )

    def _node(self, named: NamedBlock) -> Node:
        """By the name it has on this rank: another one's file can never be taken for its own."""
        key = hashlib.sha256(self._own + named.key).digest()
        return Node(named.block, named.tokens, None, key=key, depth=named.depth, has_saved_state=named.has_state)

    def _keep(self, call: TierCall, number: int, nodes: list[Node]) -> None:
        """Store or touch, then say which of them are not here."""

        def are_missing() -> list[bool]:
            return [not node.has_saved_state if call == TierCall.SAVE_STATE else node.saved < 0 for node in nodes]

        if call == TierCall.SAVE:
            self._spill.save(nodes)
        elif call == TierCall.SAVE_STATE:
            for node in nodes:
                self._spill.save_state(node)
        else:
            for node in nodes:
                node.saved = 0
            self._spill.touch(nodes)
        if all(are_missing()):  # nothing was begun; and if the folder hangs, questions do not pile up
            self._say_where(number, are_missing())
        else:
            self._spill.when_written(lambda: self._say_where(number, are_missing()))

    def _say_where(self, number: int, are_missing: Sequence[bool]) -> None:
        self._answer([number, *(index for index, is_missing in enumerate(are_missing) if is_missing)])

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
