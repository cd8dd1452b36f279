"""What the processes of one model exchange: each one's part of some activations, side by side on all of them.

Knows: torch.distributed, memory that processes of a machine share, that a process may die. Does not know: layers, what
parts are of, who starts processes.

Nothing is ever summed over ranks: every number is computed by one of them and copied. So the bits do not depend on how
many there are, nor on the way the parts travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from forerun.errors import RankLost
from forerun.kernels.device import CPU
from forerun.kernels.shared_memory import SharedMemory, reserve_memory

LIMIT_S = 30.0
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
_ROWS_TOGETHER = 16  # rows of matrices that kernels multiply at once: shares begin there, where there are enough


class Ranks:
    """The processes that compute one model together, as one of them sees them; as it is, a process by itself.

    All of them call `gather` in the same order, for as many rows.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        """`rank` of 0 .. size - 1."""
        assert 0 <= rank < size, (rank, size)
        self.rank = rank
        self.size = size
        self.sent_bytes = 0  # of own parts, once for each rank that gets them
        self.messages = 0  # parts that were sent, likewise

    def gather(self, part: Tensor, widths: Sequence[int] = ()) -> Tensor:
        """Every rank's part [M, n_r] in the order of ranks -> [M, sum of n_r]; of one process, `part` itself.

        widths: n_r of every rank, not given where all are alike. Raises RankLost within the time limit.
        """
        if self.size == 1:
            return part
        widths = widths or [part.shape[1]] * self.size
        assert part.shape[1] == widths[self.rank], (tuple(part.shape), widths, self.rank)
        self.sent_bytes += part.nbytes * (self.size - 1)
        self.messages += self.size - 1
        return self._gather(part, widths)

    def _gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def shares(self, count: int) -> list[int]:
        """How many of `count` things in a row each rank has: as many, if that can be."""
        few = count % _ROWS_TOGETHER != 0 or count < _ROWS_TOGETHER * self.size
        unit = 1 if few or count % self.size == 0 else _ROWS_TOGETHER
        ends = [count // unit * rank // self.size * unit for rank in range(self.size + 1)]
        return [end - start for start, end in pairwise(ends)]

    def share(self, count: int) -> slice:
        """Which of `count` things in a row this rank has."""
        sizes = self.shares(count)
        first = sum(sizes[: self.rank])
        return slice(first, first + sizes[self.rank])

    def close(self) -> None:
        """Nothing more will be gathered: ranks that wait for this one are told."""


ALONE = Ranks()
GATHERS = -1  # beside the numbers of ranks, which are those of sends and receives
# What a GPU was given last, by whom it exchanges with. No more: a `dist.Work` of NCCL holds the memory of its results.
Enqueued = dict[int, dist.Work]


class GroupRanks(Ranks):
    """Ranks that exchange over a group of torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, limit_s: float = LIMIT_S, enqueued: Enqueued | None = None
    ) -> None:
        """`group` None: all processes. limit_s: how long another rank is waited for, on CPUs.

        enqueued: gets the exchange that a GPU was given last, for which nobody waits here.
        """
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self._limit = timedelta(seconds=limit_s)
        self._enqueued = enqueued

    def _gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Parts of several widths travel as wide as the widest: collectives take equal ones."""
        num_rows, widest = part.shape[0], max(widths)
        sent = (
            part.contiguous() if part.shape[1] == widest else torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        )
        received = part.new_empty(self.size * num_rows, widest)
        try:
            work = _all_gather(received, sent, group=self._group, async_op=True)
            assert work is not None
            if part.device == CPU:
                work.wait(self._limit)
            else:
                work.wait()  # the GPU does, this thread goes on
                if self._enqueued is not None:
                    self._enqueued[GATHERS] = work
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size} waited at most {self._limit.total_seconds():g} s for the others, one "
                f"of which ended or hangs ({first_line(error)}): look at its own messages, then start all again"
            ) from error
        parts = received.view(self.size, num_rows, widest)
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=1)


class SharedRanks(Ranks):
    """Ranks of one machine, which copy parts into memory that all of them see."""

    def __init__(self, memory: SharedMemory) -> None:
        """`memory`: this rank's view of what they share."""
        super().__init__(memory.rank, memory.size)
        self._memory = memory

    def _gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        num_rows, size = part.shape[0], part.itemsize
        parts = self._memory.exchange(
            part.contiguous().view(-1).view(torch.uint8), [num_rows * n * size for n in widths]
        )
        shaped = [one.view(part.dtype).view(num_rows, n) for one, n in zip(parts, widths, strict=True)]
        return torch.cat(shaped, dim=1)

    def close(self) -> None:
        """See `Ranks`."""
        self._memory.close()


def connect_ranks(
    group: dist.ProcessGroup | None = None, device: torch.device = CPU, limit_s: float = LIMIT_S,
    enqueued: Enqueued | None = None,
) -> Ranks:  # fmt: skip
    """The ranks of a group of torch.distributed, None for all processes; called by all of them.

    Those of one machine that compute on its CPU share memory, if the system lets them; others exchange over the group.
    limit_s: how long a rank that does not answer is waited for. enqueued: see `GroupRanks`.
    """
    if dist.get_world_size(group) == 1:
        return Ranks()
    memory = _shared_memory(group, limit_s) if device == CPU else None
    return GroupRanks(group, limit_s, enqueued) if memory is None else SharedRanks(memory)


def _shared_memory(group: dist.ProcessGroup | None, limit_s: float) -> SharedMemory | None:
    """What all ranks of the group share; None unless all of them can."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with reserve_memory(size if rank == 0 else 0) as (path, machine):
        told: list[tuple[str, str] | None] = [None] * size
        dist.all_gather_object(told, (path, machine), group=group)
        [(first_path, first), *others] = [each or ("", "") for each in told]
        memory = None
        if first_path and all(each == first for _, each in others):
            memory = SharedMemory.open(first_path, rank, size, limit_s)
        opened = [False] * size
        dist.all_gather_object(opened, memory is not None, group=group)
    return memory if all(opened) else None


def first_line(error: BaseException) -> str:
    """Of what an error says; torch adds where in its source it was raised."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]
