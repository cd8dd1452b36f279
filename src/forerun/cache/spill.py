"""Copies blocks between the KV pool and slower tiers, beside the steps.

Knows: the tensors that make up a block (KV of all layers, hidden states at its end, recurrent states after it), the
threads that write and read, how fast reading and computing are. Does not know: which prefix a block stands for (its key
says so), files.

A full block does not change, so it is copied out of the pool in the step that filled it and written later by a thread.
If more than MAX_UNWRITTEN bytes wait, blocks are left for another time. Reading is done by a second thread. Only the
copy into the pool happens between steps. What tiers have a third one asks, which is waited for, but not for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Lock
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.cache.boundaries import BoundaryStates
from forerun.cache.kv_cache import KVCache
from forerun.cache.lower import state_key
from forerun.cache.prefix_cache import Node
from forerun.cache.states import RecurrentStates
from forerun.cache.tiers import Bytes, Record, Tier
from forerun.kernels.device import enqueue_to_host, to_device

MAX_UNWRITTEN: Final = 512 << 20  # bytes copied out that wait for a thread to write them
TOUCH_S: Final = 60.0  # between two notes that a block in the pool was used
ASK_LIMIT_S: Final = 2.0  # for a folder to say what it has: what it has not said then it has not
_RECENT = 0.25  # weight of a new measurement
_FORGETS = 0.98  # what a judgement against reading leaves of the time reading is taken to need: it is tried again
_LEAST_TOKENS = 64  # of a prompt whose time counts

T = TypeVar("T")
log = logging.getLogger("forerun.cache")


class Loaded(NamedTuple):
    """Leading blocks that a tier had, and a state after the last that was asked for."""

    blocks: Sequence[Record]
    rows: Sequence[Tensor]  # by tensor of the pool: [blocks, bytes] uint8
    boundaries: Sequence[Tensor | None]  # hidden states at the blocks' ends, where they were known
    state: Record | None
    number: int = 0  # by which other ranks know what they have read


class RecordName(NamedTuple):
    """What a record is asked for by."""

    key: bytes
    depth: int  # blocks in front of it
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Waiting:
    """Bytes that are copied out and not written; the engine's thread adds, the writer subtracts."""

    num_bytes: int = 0
    lock: Lock = field(default_factory=Lock)

    def add(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes += num_bytes


@dataclass(slots=True)
class _Outgoing:
    """Blocks on their way to the tiers."""

    nodes: Sequence[Node]
    keys: Sequence[bytes]
    tokens: Sequence[tuple[int, ...]]
    ready: Sequence[tuple[int, ...]]
    rows: Sequence[Tensor]  # [nodes, ...] on the host: a copy of their share of every tensor
    has_last: Sequence[bool]  # by node: whether the last tensor has anything of it, the hidden states
    num_whole: int  # tensors that have something of every node
    copied: Callable[[], None]  # waits until they are there
    num_bytes: int


class Spill:
    """Takes blocks to the tiers and back. One thread, the engine's, calls it."""

    def __init__(
        self, tiers: Sequence[Tier], kv_cache: KVCache, states: RecurrentStates | None, boundaries: BoundaryStates
    ) -> None:
        """`tiers`: the fastest first."""
        self.tiers, self.states, self.boundaries = tiers, states, boundaries
        self._tensors = [
            tensor
            for layer in kv_cache.layers
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
            if tensor is not None and tensor.numel()
        ]
        self._device = kv_cache.device
        self._sizes = tuple(tensor[0].nbytes for tensor in self._tensors)
        self._waiting = _Waiting()
        self._writer = ThreadPoolExecutor(1, "forerun-kv-writer")
        self._reader = ThreadPoolExecutor(1, "forerun-kv-reader")
        self._asker = ThreadPoolExecutor(1, "forerun-kv-asker")
        self._asking: Future[None] | None = None
        self._s_per_byte: float | None = None  # of reading
        self._s_per_token: float | None = None  # of computing

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's KV."""
        return sum(self._sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of a recurrent state's record; 0 for a model without."""
        return 0 if self.states is None else self.states.slot_bytes

    # -- out ----------------------------------------------------------------------------------------------------

    def save(self, nodes: Sequence[Node]) -> int:
        """See `LowerTiers`."""
        if not any(tier.is_open for tier in self.tiers):
            return 0
        room = (MAX_UNWRITTEN - self._waiting.num_bytes) // max(self.block_bytes, 1)
        due = list[Node]()
        for index, node in enumerate(nodes):
            if node.saved < sum(node.ready):
                if len(due) >= room:
                    nodes = nodes[:index]
                    break
                due.append(node)
        self._touch(node for node in nodes if node.saved >= sum(node.ready))
        if due:
            self.store(due)
        return len(nodes)

    def store(self, nodes: Sequence[Node]) -> None:
        """Copy these out of the pool and have them written."""
        self._submit(partial(self._copy_out, nodes))

    def _copy_out(self, nodes: Sequence[Node]) -> _Outgoing:
        chosen = to_device(torch.tensor([node.block for node in nodes]), self._device)
        rows = [tensor.index_select(0, chosen) for tensor in self._tensors]
        states = [self.boundaries.of(node.block) for node in nodes]
        blank = next((torch.zeros_like(state) for state in states if state is not None), None)
        if blank is not None:
            rows.append(torch.stack([blank if state is None else state for state in states]))
        on_host, copied = enqueue_to_host(rows)
        for node in nodes:
            node.saved, node.touched_s = sum(node.ready), perf_counter()
        return _Outgoing(
            nodes, [node.key for node in nodes], [node.tokens for node in nodes],
            [tuple(node.ready) for node in nodes], on_host, [state is not None for state in states],
            len(self._tensors), copied, sum(row.nbytes for row in rows),
        )  # fmt: skip

    def save_state(self, node: Node) -> None:
        """See `LowerTiers`."""
        is_due = self.states is not None and not node.has_saved_state and self.states.has(node.block)
        has_room = self._waiting.num_bytes + self.state_bytes <= MAX_UNWRITTEN
        if is_due and has_room and any(tier.is_open for tier in self.tiers):
            self.store_state(node)

    def store_state(self, node: Node) -> None:
        """Copy the state that is kept after this block and have it written."""
        self._submit(partial(self._copy_state, node))

    def _copy_state(self, node: Node) -> _Outgoing:
        state = None if self.states is None else self.states.kept(node.block)
        assert state is not None, "the state is not kept"
        on_host, copied = enqueue_to_host([tensor.reshape(1, -1).clone() for tensor in state])
        node.has_saved_state = True
        keys, num_bytes = [state_key(node.key)], self.state_bytes
        return _Outgoing([node], keys, [()], [()], on_host, [True], len(on_host), copied, num_bytes)

    def _submit(self, copy_out: Callable[[], _Outgoing]) -> None:
        """Have copies out of the pool written; without memory for the copies, not this time."""
        try:
            parcel = copy_out()
        except (MemoryError, RuntimeError):  # what torch raises without memory; requests do not depend on this
            log.warning("blocks of KV could not be copied out of the pool; requests go on", exc_info=True)
            return
        self._waiting.add(parcel.num_bytes)
        self._writer.submit(_write, self.tiers, parcel, self._waiting)

    def _touch(self, nodes: Iterable[Node]) -> None:
        """Note that these were used, so that the tiers keep them; now and then is enough."""
        now = perf_counter()
        used = [node for node in nodes if now - node.touched_s > TOUCH_S]
        for node in used:
            node.touched_s = now
        if used:
            self.touch(used)

    def touch(self, nodes: Sequence[Node]) -> None:
        """Have the tiers note that these were used."""
        self._writer.submit(_touch, self.tiers, nodes)

    def flush(self) -> None:
        """Return when all that was saved until now is written, or has failed to be."""
        self.lacking(())

    def lacking(self, wanted: Collection[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
        """After `flush`: those of these for which `is_stored` is false."""
        return self.when_written(lambda: [each for each in wanted if not self.is_stored(*each)]).result()

    def when_written(self, then: Callable[[], T]) -> Future[T]:
        """Have the writing thread do this after all that was saved until now."""
        return self._writer.submit(then)

    # -- back ---------------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether some tier has the record."""
        return any(tier.has(key) for tier in self.tiers)

    def is_stored(self, key: bytes, with_state: bool = False) -> bool:
        """Whether the last tier, the one that others may reach, has the record, and the state after it if wanted."""
        return self.tiers[-1].has(key) and (not with_state or self.is_stored(state_key(key)))

    def leading(self, names: Iterable[RecordName]) -> list[RecordName]:
        """Those in the beginning that some tier has."""
        return self._found(names, until=False)

    def first(self, names: Iterable[RecordName]) -> RecordName | None:
        """The first that some tier has."""
        return next(iter(self._found(names, until=True)), None)

    def _found(self, names: Iterable[RecordName], until: bool) -> list[RecordName]:
        """Those that tiers have until one is there, or not: as many as they say in time; none until they have said."""
        if self._asking is not None and not self._asking.done():
            return []
        found, is_late = list[RecordName](), Event()

        def ask() -> None:
            for name in names:
                if has := self.has(name.key):
                    found.append(name)
                if has == until or is_late.is_set():
                    return

        self._asking = self._asker.submit(ask)
        try:
            self._asking.result(ASK_LIMIT_S)
        except TimeoutError:
            is_late.set()
            log.warning("a tier of KV has not said within %g s what it has; the rest is computed", ASK_LIMIT_S)
        return list(found)

    def is_worth(self, num_blocks: int, has_state: bool, num_tokens: int) -> bool:
        """Whether reading so much takes less time than computing so many tokens, as far as both are known."""
        if self._s_per_byte is None or self._s_per_token is None:
            return True
        num_bytes = num_blocks * self.block_bytes + has_state * self.state_bytes
        return num_bytes * self._s_per_byte < num_tokens * self._s_per_token

    def was_not_worth(self) -> None:
        """A request is computed for that reason; some day reading is tried again, since only so its time is known."""
        if self._s_per_byte is not None:
            self._s_per_byte *= _FORGETS

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prompt's tokens took so long."""
        if num_tokens >= _LEAST_TOKENS:
            self._s_per_token = _mean(self._s_per_token, seconds / num_tokens)

    def read(self, blocks: Sequence[RecordName], state: RecordName | None) -> Future[Loaded]:
        """Read blocks that follow each other, up to the first that is missing, and a state after the last."""
        read_state = None if state is None else partial(_read_one, self.tiers, state, self._state_sizes())
        return self._reader.submit(_read, partial(_read_one, self.tiers), blocks, self._sizes, read_state)

    def _state_sizes(self) -> tuple[int, ...]:
        assert self.states is not None
        return tuple(tensor[0].nbytes for tensor in self.states.tensors)

    def fill(self, blocks: Sequence[int], loaded: Loaded, first: int) -> None:
        """Write the records from `first` on into these blocks of the pool, as many as there are blocks."""
        last = first + len(blocks)
        chosen = to_device(torch.tensor(blocks), self._device)
        for tensor, rows in zip(self._tensors, loaded.rows, strict=True):
            own = rows[first:last].view(tensor.dtype).view(len(blocks), *tensor.shape[1:])
            tensor.index_copy_(0, chosen, to_device(own, self._device))
        for block, state in zip(blocks, loaded.boundaries[first:last], strict=True):
            self.boundaries.put(block, None if state is None else to_device(state, self._device))

    def fill_state(self, block: int, num_tokens: int, loaded: Loaded) -> None:
        """Keep the recurrent state that comes after this block and `num_tokens` tokens, if there is a slot for it."""
        record = loaded.state
        assert self.states is not None and record is not None
        parts = np.split(record.payload, np.cumsum(record.parts)[:-1])
        self.states.put(block, num_tokens, [torch.from_numpy(part.copy()).view(torch.float32) for part in parts])

    def drop(self, loaded: Loaded) -> None:
        """Nobody needs these records any more."""

    def was_read(self, loaded: Loaded, seconds: float) -> None:
        """So long passed until the records were in the pool."""
        num_bytes = len(loaded.blocks) * self.block_bytes + (loaded.state is not None) * self.state_bytes
        if num_bytes:
            self._s_per_byte = _mean(self._s_per_byte, seconds / num_bytes)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else before + _RECENT * (new - before)


# -- on the threads -----------------------------------------------------------------------------------------------


def _write(tiers: Sequence[Tier], parcel: _Outgoing, waiting: _Waiting) -> None:
    """Give every tier the records of a parcel. A node that no tier took is saved another time."""
    try:
        parcel.copied()
        for index, node in enumerate(parcel.nodes):
            record = _record(parcel, index)
            kept = [tier.put(parcel.keys[index], record, node.depth) for tier in tiers if tier.is_open]
            if not any(kept):
                _unsave(node, parcel.keys[index])
    except Exception:  # nobody asks for the result, and requests do not depend on it
        log.exception("blocks of KV could not be stored; requests go on")
    finally:
        waiting.add(-parcel.num_bytes)


def _unsave(node: Node, key: bytes) -> None:
    if key == node.key:
        node.saved = -1
    else:
        node.has_saved_state = False


def _record(parcel: _Outgoing, index: int) -> Record:
    rows = parcel.rows if parcel.has_last[index] else parcel.rows[: parcel.num_whole]
    parts = [_bytes_of(row[index]) for row in rows]
    sizes = tuple(len(part) for part in parts)
    return Record(parcel.tokens[index], parcel.ready[index], sizes, np.concatenate(parts))


def _bytes_of(tensor: Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _touch(tiers: Sequence[Tier], nodes: Sequence[Node]) -> None:
    for node in nodes:
        if not [tier.touch(node.key, node.depth) for tier in tiers][-1]:  # every one of them
            node.saved = -1  # evicted there while it was in use here, or never taken: it is stored again
        if node.has_saved_state:
            node.has_saved_state = [tier.touch(state_key(node.key), node.depth) for tier in tiers][-1]


def _read(
    read_one: Callable[[RecordName, Sequence[int]], Record | None], wanted: Sequence[RecordName], sizes: Sequence[int],
    read_state: Callable[[], Record | None] | None,
) -> Loaded:  # fmt: skip
    records = list[Record]()
    for each in wanted:
        record = read_one(each, sizes)
        if record is None:
            break
        records.append(record)
    is_whole = len(records) == len(wanted)
    state = read_state() if read_state is not None and is_whole else None
    return Loaded(records, _stacked(records, sizes), [_boundary(record, sum(sizes)) for record in records], state)


def _read_one(tiers: Sequence[Tier], wanted: RecordName, sizes: Sequence[int]) -> Record | None:
    """From the fastest tier that has it; faster ones have it afterwards. None if it is missing or another block's."""
    for index, tier in enumerate(tiers):
        record = tier.get(wanted.key, wanted.depth)
        if record is not None and record.tokens == wanted.tokens and record.parts[: len(sizes)] == tuple(sizes):
            for faster in tiers[:index]:
                faster.put(wanted.key, record, wanted.depth)
            return record
    return None


def _stacked(records: Sequence[Record], sizes: Sequence[int]) -> list[Tensor]:
    """Every part of all records side by side, in buffers that tensors of any type may be seen in."""
    stacked, start = [], 0
    for size in sizes:
        rows = np.empty((len(records), size), np.uint8)
        for index, record in enumerate(records):
            rows[index] = record.payload[start : start + size]
        stacked.append(torch.from_numpy(rows))
        start += size
    return stacked


def _boundary(record: Record, start: int) -> Tensor | None:
    """The hidden states behind the KV, if the record has any."""
    own = record.payload[start:]
    return torch.from_numpy(own.copy()).view(torch.float32) if len(own) else None
