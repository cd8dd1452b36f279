"""Memory that the ranks of one machine share: each copies its bytes in, and reads what the others copied.

Knows: a file in memory, the order in which ranks write and read it, how to wait for one that may be dead. Does not
know: tensors' shapes, what the bytes are.

Every rank has two slots and a counter. In round n it fills slot n % 2, then sets its counter to n, and reads the slots
of the others when their counters have reached n. A rank that is in round n + 1 has read all of round n - 1, so a slot
is never written while it is read. Only on x86, where a processor's stores become visible in their order: elsewhere the
counter could be seen before the bytes.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import RankLost

FOLDER = Path("/dev/shm")
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc")
SLOT_BYTES = 2 << 20  # containers often have 64 MiB of such memory: enough for 15 ranks
_LINE = 64  # bytes that processors exchange: each rank's numbers have their own
_SPINS = 3000  # looks at a counter before others get the core, some hundred microseconds
_SHORT_S, _LONG_S = 50e-6, 1e-3  # sleeps between looks after that
_LIFE_S = 0.05  # between looks at whether the other process is alive


class SharedMemory:
    """One rank's view. All ranks call `exchange` in the same order with the same sizes."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, limit_s: float) -> None:
        """Use `SharedMemory.open`."""
        self.rank = rank
        self.size = size
        self._limit_s = limit_s
        self._round = 0
        numbers = memoryview(memory)[: size * _LINE].cast("q")
        self._counters, self._pids, self._closed = (numbers[index :: _LINE // 8] for index in range(3))
        self._slots = [[_slot(memory, _begin(size, one, turn)) for one in range(size)] for turn in range(2)]
        self._pids[rank] = os.getpid()

    @staticmethod
    def open(path: str | Path, rank: int, size: int, limit_s: float) -> SharedMemory | None:
        """Map a file that was made by `reserve_memory` for as many ranks; None if the system does not let us."""
        try:
            with Path(path).open("r+b") as file:
                return SharedMemory(mmap.mmap(file.fileno(), _begin(size, size, 1)), rank, size, limit_s)
        except (OSError, ValueError):
            return None

    def exchange(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """own [sizes[rank]] uint8 -> those of all ranks; they are overwritten by the exchange after the next.

        Raises RankLost for a rank that died, closed, or does not come within the time limit.
        """
        if max(sizes) <= SLOT_BYTES:
            return self._exchange(own, sizes)
        pieces: list[list[Tensor]] = [[] for _ in sizes]
        for start in range(0, max(sizes), SLOT_BYTES):
            now = [min(max(size - start, 0), SLOT_BYTES) for size in sizes]
            for held, piece in zip(pieces, self._exchange(own[start : start + SLOT_BYTES], now), strict=True):
                held.append(piece.clone())
        return [torch.cat(held) for held in pieces]

    def _exchange(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        self._round += 1
        slots = self._slots[self._round % 2]
        slots[self.rank][: len(own)].copy_(own)
        self._counters[self.rank] = self._round
        for other in range(self.size):
            if other != self.rank:
                self._wait_for(other)
        return [slot[:size] for slot, size in zip(slots, sizes, strict=True)]

    def _wait_for(self, other: int) -> None:
        counters, wanted = self._counters, self._round
        for _ in range(_SPINS):
            if counters[other] >= wanted:
                return
        begun = looked = time.monotonic()
        while counters[other] < wanted:
            if self._closed[other] and counters[other] < wanted:
                raise self._lost(other, "ended")
            now = time.monotonic()
            if now - looked > _LIFE_S:
                looked = now
                if not _is_alive(self._pids[other]) and counters[other] < wanted:
                    raise self._lost(other, f"(process {self._pids[other]}) died")
            if now - begun > self._limit_s:
                raise self._lost(other, f"(process {self._pids[other]}) did not come within {self._limit_s:g} s")
            time.sleep(_SHORT_S if now - begun < _LIFE_S else _LONG_S)

    def _lost(self, other: int, what: str) -> RankLost:
        self.close()
        return RankLost(
            f"rank {other} of {self.size} {what}, and rank {self.rank} cannot go on without it: look at its own "
            "messages, then start all again"
        )

    def close(self) -> None:
        """Tell those who wait that nothing more comes; what was given stays readable."""
        self._closed[self.rank] = 1


@contextmanager
def reserve_memory(num_ranks: int) -> Iterator[tuple[str, str]]:
    """Inside this context: the name of a file for `num_ranks` ranks, "" for none or where there can be none, and where.

    Where is a text that is the same on ranks that can share memory and tell whether each other's processes live. Ranks
    that mapped the file keep it after the context, and the system frees it with the last of them.
    """
    where = _where()
    path = _reserve(num_ranks) if num_ranks and where else None
    try:
        yield ("" if path is None else str(path)), where
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _reserve(num_ranks: int) -> Path | None:
    try:
        number, name = tempfile.mkstemp(prefix="forerun-", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(number, 0, _begin(num_ranks, num_ranks, 1))  # else a full file system is noticed by SIGBUS
    except OSError:
        Path(name).unlink(missing_ok=True)
        return None
    finally:
        os.close(number)
    return Path(name)


def _where() -> str:
    """The machine, and what containers on it have of their own; "" where memory is not shared."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    with suppress(OSError):
        own = os.readlink(PROCESSES / "self/ns/pid"), FOLDER.stat().st_dev
        return f"{BOOT.read_text('ascii').strip()} {own}"
    return ""


def _slot(memory: mmap.mmap, begin: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=SLOT_BYTES)  # [SLOT_BYTES]


def _begin(size: int, rank: int, turn: int) -> int:
    """Where a slot begins; that of a rank after the last, for turn 1, is the end."""
    return size * _LINE + (turn * size + rank) * SLOT_BYTES


def _is_alive(process_id: int) -> bool:
    """Whether a process runs; one that ended and whose parent has not noticed does not. 0: it has not begun yet."""
    if not process_id:
        return True
    try:
        status = (PROCESSES / str(process_id) / "stat").read_text("ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
