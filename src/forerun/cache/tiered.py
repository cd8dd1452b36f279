"""Which blocks of a waiting request come back from slower tiers, and where they hang in the tree of prefixes.

Knows: the tree, keys, what is being read. Does not know: tensors, files. Implements `lower.LowerTiers`.

A request that waits asks before it starts. What the tree lacks of its prefix and a tier has is read by a thread, while
other requests run; then it is put into blocks of the pool, which are part of the tree like any other, and the request
finds them there. Nothing depends on whether that works out: what does not come is computed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Final, NamedTuple

from forerun.cache.block_pool import BlockPool
from forerun.cache.lower import chained, state_key
from forerun.cache.prefix_cache import Node, PrefixCache
from forerun.cache.spill import Loaded, RecordName, Spill
from forerun.core import Request
from forerun.errors import ResourceError

MAX_READINGS: Final = 8  # at a time
LONGEST_WAIT_S: Final = 10.0  # for a reading, of a request that could be computed instead
PAUSE_S: Final = 0.01  # of the engine, when all it could do is being read; then it hears who else came
ASK_AGAIN_S: Final = 0.5  # between two looks for a request that waits for something else: each asks for many files
_REMEMBERED = 4096  # requests that have asked

log = logging.getLogger("forerun.cache")


class _Missing(NamedTuple):
    """What the tree lacks and tiers have."""

    blocks: Sequence[RecordName]  # that follow each other
    state: RecordName | None  # after the last block

    @property
    def key(self) -> bytes:
        """Of the first record."""
        return self.blocks[0].key if self.blocks else self.state.key if self.state is not None else b""


@dataclass(slots=True)
class _Asked:
    """What a request was answered."""

    key: bytes = b""  # of the first record it asked for last
    again_s: float = 0.0  # before then the answer is no


@dataclass(slots=True)
class _Fetch:
    """Records on their way."""

    request: Request  # whose tokens, adapter and salt they have
    missing: _Missing
    loaded: Future[Loaded]
    began_s: float = field(default_factory=perf_counter)

    @property
    def is_late(self) -> bool:
        """Whether nobody should wait for it any longer."""
        return perf_counter() - self.began_s > LONGEST_WAIT_S


class TieredPrefixes:
    """The tiers below one prefix cache."""

    def __init__(self, cache: PrefixCache, pool: BlockPool, spill: Spill) -> None:
        self.spill = spill
        self.num_hits = 0  # requests whose prefix came back
        self._cache, self._pool = cache, pool
        self._readings: dict[bytes, _Fetch] = {}  # by the key of their first record
        self._asked: OrderedDict[tuple[float, int], _Asked] = OrderedDict()  # by request, of which none have one turn
        self.save, self.save_state = spill.save, spill.save_state
        self.computed = spill.computed

    def counts(self) -> dict[str, dict[str, int]]:
        """See `LowerTiers`."""
        return {tier.name: asdict(tier.stats) for tier in self.spill.tiers}

    def hand_over(self, requests: Sequence[Request]) -> None:
        """See `LowerTiers`."""
        ended = [(each, self._keys(each)) for each in requests if each.finish_reason is not None and each.error is None]
        if not ended:
            return
        wanted = {key for _, keys in ended for key in keys}
        lacking, num_before = set(self.spill.lacking(wanted)), len(wanted) + 1
        while 0 < len(lacking) < num_before:  # as long as that helps: not all of them may wait to be written at once
            num_before = len(lacking)
            self._store_again([request for request, _ in ended], lacking)
            lacking = set(self.spill.lacking(wanted))
        for request, keys in ended:
            if num := len(lacking.intersection(keys)):
                request.error = ResourceError(
                    f"the prompt was computed, but the folder of kv_disk was found to have only {len(keys) - num} of "
                    f"its {len(keys)} blocks: look for errors of the disk in the log; without any, raise kv_disk_gib"
                )

    def _store_again(self, requests: Sequence[Request], lacking: set[tuple[bytes, bool]]) -> None:
        """Give the tiers what they lack of these requests, and the pool has."""
        keys = {key for key, _ in lacking}
        nodes = {node.key: node for request in requests for node in self._path(request) if node.key in keys}
        for node in nodes.values():
            node.saved = -1
        self.save(list(nodes.values()))
        for key, node in nodes.items():
            if (key, True) in lacking:
                node.has_saved_state = False
                self.save_state(node)

    def _keys(self, request: Request) -> list[tuple[bytes, bool]]:
        """Of the blocks that others could load of the prompt, and whether they need the state after it."""
        found, key = list[tuple[bytes, bool]](), self._cache.top_of(request.adapter, request.cache_salt).key
        num_blocks = self._cache.last_end(request) // self._cache.block_size
        for tokens in self._cache.full_blocks(request.prompt_token_ids, num_blocks):
            key = chained(key, tokens)
            found.append((key, self._cache.states is not None and len(found) + 1 == num_blocks))
        return found

    def is_reading(self, request: Request) -> bool:
        """See `LowerTiers`."""
        asked = self._asked.get(request.turn)
        reading = None if asked is None else self._readings.get(asked.key)
        if reading is None and (asked is None or perf_counter() >= asked.again_s):
            reading = self._reading_for(request, asked)
        return reading is not None and not reading.is_late

    def pause(self) -> None:
        """See `LowerTiers`."""
        if self._readings:
            wait([reading.loaded for reading in self._readings.values()], PAUSE_S, FIRST_COMPLETED)

    def _reading_for(self, request: Request, asked: _Asked | None) -> _Fetch | None:
        """What is read for the request from now on, or for another one that lacks the same."""
        path = self._path(request)
        if request.prompt_logprobs is not None or not self._has_room(request, path):
            return None
        missing = self._missing(request, path, is_first=asked is None)
        if asked is None:
            asked = self._asked[request.turn] = _Asked()
            if len(self._asked) > _REMEMBERED:
                self._asked.popitem(last=False)
        reading = None
        if missing is not None and missing.key != asked.key:  # nobody asks for the same twice
            reading = self._readings.get(missing.key)
            if reading is None and len(self._readings) < MAX_READINGS:
                reading = self._readings[missing.key] = _Fetch(request, missing, self.spill.read(*missing))
        if reading is None or missing is None:
            asked.again_s = perf_counter() + ASK_AGAIN_S
        else:
            asked.key = missing.key
        return reading

    def _has_room(self, request: Request, path: Sequence[Node]) -> bool:
        """Whether the pool has the blocks that the request needs besides those of its path."""
        num_needed = -(-len(request.token_ids) // self._cache.block_size) - (len(path) - 1)
        return num_needed <= self._pool.num_available - sum(self._pool.is_cached(node.block) for node in path[1:])

    def _missing(self, request: Request, path: Sequence[Node], is_first: bool) -> _Missing | None:
        """What to read for the request; None if that is nothing or not worth its time. `is_first`: it is new."""
        size, blocks = self._cache.block_size, self.spill.leading(self._names(request, path))
        num_gained, state = len(blocks), None
        wanted: Sequence[RecordName] = blocks
        if self._cache.states is not None:
            wanted, state = self._up_to_state(path, blocks)
            num_gained = 0 if state is None else state.depth + 1 - self._num_known(path)
        if num_gained <= 0:
            return None
        if not self.spill.is_worth(len(wanted), state is not None, num_gained * size):
            if is_first:
                self.spill.was_not_worth()
            return None
        return _Missing(wanted, state)

    def _names(self, request: Request, path: Sequence[Node]) -> Iterator[RecordName]:
        """Of the request's blocks after those of the path."""
        key = path[-1].key
        for index, tokens in enumerate(self._cache.full_blocks(request.token_ids, self._num_shared(request))):
            if index >= len(path) - 1:
                key = chained(key, tokens)
                yield RecordName(key, index, tokens)

    def _up_to_state(
        self, path: Sequence[Node], blocks: list[RecordName]
    ) -> tuple[list[RecordName], RecordName | None]:
        """As many blocks as end with a state that a tier has, and that; without any, a state that the tree has lost."""
        found = self.spill.first(_state_of(block) for block in reversed(blocks))
        if found is not None:
            return blocks[: found.depth - blocks[0].depth + 1], found
        return [], self.spill.first(_state_of(node) for node in reversed(path[self._num_known(path) + 1 :]))

    def _num_known(self, path: Sequence[Node]) -> int:
        """Leading blocks after which the tree has a state."""
        assert self._cache.states is not None
        return next((node.depth + 1 for node in reversed(path[1:]) if self._cache.states.has(node.block)), 0)

    def _num_shared(self, request: Request) -> int:
        return (len(request.token_ids) - 1) // self._cache.block_size

    def _path(self, request: Request) -> list[Node]:
        """The tree's nodes for the request's tokens, the top first."""
        path = [self._cache.top_of(request.adapter, request.cache_salt)]
        for tokens in self._cache.full_blocks(request.token_ids, self._num_shared(request)):
            child = path[-1].children.get(tokens)
            if child is None:
                break
            path.append(child)
        return path

    # -- into the pool ------------------------------------------------------------------------------------------

    def take_done(self) -> None:
        """See `LowerTiers`."""
        for key in [key for key, reading in self._readings.items() if reading.loaded.done()]:
            reading = self._readings.pop(key)
            error = reading.loaded.exception()
            if error is not None:
                log.warning("blocks of KV could not be read; they are computed", exc_info=error)
                continue
            loaded = reading.loaded.result()
            try:
                self._place(reading, loaded)
            except (MemoryError, RuntimeError):  # what torch raises without memory
                log.warning("blocks of KV were read and could not be placed; they are computed", exc_info=True)
            finally:
                self.spill.drop(loaded)

    def _place(self, reading: _Fetch, loaded: Loaded) -> None:
        path = self._path(reading.request)
        first = reading.missing.blocks[0].depth if reading.missing.blocks else len(path) - 1
        num_done = len(path) - 1 - first  # others may have computed some meanwhile; below 0: what they follow is gone
        if num_done < 0:
            return
        new = loaded.blocks[num_done:]
        above = [node.block for node in path[1:]]
        self._pool.share(above)
        blocks = self._pool.allocate(len(new)) or []
        try:
            if len(blocks) == len(new):
                if new:
                    self.spill.fill(blocks, loaded, num_done)
                for block, record in zip(blocks, new, strict=True):
                    node = self._cache.insert(path[-1], record.tokens, block, reading.request)
                    node.ready, node.saved, node.touched_s = list(record.ready), record.num_ready, perf_counter()
                    path.append(node)
                self._place_state(reading.missing.state, loaded, path)
                self.spill.was_read(loaded, perf_counter() - reading.began_s)
                self.num_hits += bool(loaded.blocks or loaded.state)
        finally:
            self._pool.release([*above, *blocks])

    def _place_state(self, wanted: RecordName | None, loaded: Loaded, path: Sequence[Node]) -> None:
        """The state goes with its block, which is in the tree now."""
        if wanted is None or loaded.state is None or wanted.depth + 1 >= len(path):
            return
        node = path[wanted.depth + 1]
        self.spill.fill_state(node.block, (wanted.depth + 1) * self._cache.block_size, loaded)
        node.has_saved_state = True


def _state_of(block: RecordName | Node) -> RecordName:
    """The name of the recurrent state after it."""
    return RecordName(state_key(block.key), block.depth, ())
