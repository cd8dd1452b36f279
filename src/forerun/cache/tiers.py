"""Tiers: slower memory that keeps blocks which the KV pool may lose.

Knows: what a record is, how tiers count, the tier in host memory. Does not know: the pool, what is in a record, trees
of prefixes. A record is named by a key that says everything its bits depend on, so it never changes; at most it is
replaced by one in which drafters have more valid rows.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Record:
    """A block, or a recurrent state after one: the bytes of its tensors, one after the other."""

    tokens: tuple[int, ...]  # of the block; () of a state
    ready: tuple[int, ...]  # rows with valid drafter KV, by kind
    parts: tuple[int, ...]  # bytes of each tensor
    payload: Bytes

    @property
    def num_ready(self) -> int:
        """Valid rows over all kinds of drafter KV."""
        return sum(self.ready)

    def is_better_than(self, other: Record) -> bool:
        """Of two of one key: whether this has more valid rows, or hidden states that the other lacks."""
        return self.num_ready > other.num_ready or len(self.parts) > len(other.parts)

    def header(self, key: bytes) -> bytes:
        """Everything but the payload."""
        about = {"key": key.hex(), "tokens": self.tokens, "ready": self.ready, "parts": self.parts}
        return json.dumps(about, separators=(",", ":")).encode()

    @staticmethod
    def read(header: bytes, payload: Bytes, key: bytes) -> Record:
        """From `header`. Raises ValueError, KeyError or TypeError for what it did not write for this key."""
        about = json.loads(header)
        if about["key"] != key.hex() or sum(about["parts"]) != len(payload):
            raise ValueError("a record of another block")
        return Record(tuple(about["tokens"]), tuple(about["ready"]), tuple(about["parts"]), payload)


@dataclass(slots=True)
class TierStats:
    """What happened in one tier since the process began."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    corrupted_blocks: int = 0
    failed_writes: int = 0
    used_bytes: int = 0


class Tier(Protocol):
    """One kind of memory. `put`, `get` and `touch` run on background threads, the others anywhere."""

    name: str
    max_bytes: int
    stats: TierStats

    @property
    def is_open(self) -> bool:
        """Whether it takes records now."""

    def has(self, key: bytes) -> bool:
        """Whether there is a record, which may be gone when it is read."""

    def put(self, key: bytes, record: Record, depth: int) -> bool:
        """Keep a record, or the one that is there if it is as good, at the price of the least recently used ones.

        Returns whether there is one now.

        `depth`: blocks in front of it. Of equally old records the deepest goes first, since nobody reads it without the
        others.
        """

    def get(self, key: bytes, depth: int) -> Record | None:
        """The record, whole and unchanged, which is now the most recently used; None if there is no such."""

    def touch(self, key: bytes, depth: int) -> bool:
        """The record was used elsewhere -> whether it is still there."""


class HostTier:
    """Records in the host's memory, for a pool that lies on a GPU; pinned, so that copies need no detour."""

    name = "host"

    def __init__(self, max_bytes: int, pinned: bool) -> None:
        self.max_bytes = max_bytes
        self.stats = TierStats()
        self.is_open = True
        self._pinned = pinned
        self._records: OrderedDict[bytes, Record] = OrderedDict()  # the least recently used first
        self._lock = Lock()  # reading and writing are different threads

    def has(self, key: bytes) -> bool:
        """See `Tier`."""
        return key in self._records

    def put(self, key: bytes, record: Record, depth: int) -> bool:
        """See `Tier`."""
        size = len(record.payload)
        if size > self.max_bytes:
            return False
        with self._lock:
            old = self._records.get(key)
            if old is not None and not record.is_better_than(old):
                self._records.move_to_end(key)
                return True
        try:
            own = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        except (MemoryError, RuntimeError):  # less can be pinned than was asked for
            return False
        own[:] = record.payload
        with self._lock:
            old = self._records.pop(key, None)
            if old is not None:
                self.stats.used_bytes -= len(old.payload)
            while self.stats.used_bytes + size > self.max_bytes:
                _, gone = self._records.popitem(last=False)
                self.stats.used_bytes -= len(gone.payload)
                self.stats.evicted_blocks += 1
            self._records[key] = Record(record.tokens, record.ready, record.parts, own)
            self.stats.used_bytes += size
        self.stats.stored_blocks += 1
        self.stats.stored_bytes += size
        return True

    def get(self, key: bytes, depth: int) -> Record | None:
        """See `Tier`."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return None
            self._records.move_to_end(key)
        self.stats.loaded_blocks += 1
        self.stats.loaded_bytes += len(record.payload)
        return record

    def touch(self, key: bytes, depth: int) -> bool:
        """See `Tier`."""
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
                return True
        return False
