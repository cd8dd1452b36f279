"""Where each rank stands, and how activations travel between pipeline stages and back to the leader.

Knows: torch.distributed's sends and receives. Does not know: layers, passes, who starts ranks. The shards of one stage
exchange by `kernels.ranks`.

A GPU is given exchanges (NCCL) and the host goes on: if another rank is lost the GPU waits for ever, and nobody knows.
So every pass ends with `settle`, which waits and asks meanwhile whether somebody is lost.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from forerun.errors import RankLost
from forerun.kernels.device import given_work
from forerun.kernels.ranks import Enqueued, first_line

PASS_LIMIT_S = 3600.0  # an early stage may compute that long; who hangs or died is found out by beats
_LOOK_S: Final = 50e-6  # between looks at a GPU that computes a pass
_ASK_S: Final = 10.0  # of a pass after which NCCL is asked for errors
_ABORT_S: Final = 5.0  # for NCCL to give up


class RankLayout(NamedTuple):
    """Shards of stages: rank = stage * `num_shards` + shard."""

    num_shards: int
    num_stages: int

    @property
    def num_ranks(self) -> int:
        """All of them."""
        return self.num_shards * self.num_stages

    def stage_of(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // self.num_shards

    def ranks_of(self, stage: int) -> list[int]:
        """The ranks of a stage, which share its matrices."""
        return list(range(stage * self.num_shards, (stage + 1) * self.num_shards))


class Exchange:
    """One rank's sends and receives. Implements `models.stages.Neighbours`."""

    def __init__(self, layout: RankLayout, rank: int, device: torch.device) -> None:
        """`device`: where activations lie."""
        self.layout = layout
        self.rank = rank
        self.sent_bytes = 0
        self.messages = 0
        self.digest: int | None = None  # of what this stage handed on; None: nobody asks
        self.enqueued: Enqueued = {}  # since `settle`
        self.check: Callable[[], None] = _nobody_is_lost  # raises RankLost for a rank that is known to be lost
        self._device = device
        self._ending = Lock()
        self._waiting: dist.Work | None = None
        self._limit = timedelta(seconds=PASS_LIMIT_S)

    def receive(self, shape: Sequence[int]) -> Tensor:
        """See `Neighbours`. Raises RankLost."""
        return self.receive_from(self.rank - self.layout.num_shards, shape)

    def send(self, tensor: Tensor) -> None:
        """See `Neighbours`. Raises RankLost."""
        self.note(tensor)
        self.send_to(self.rank + self.layout.num_shards, tensor)

    def note(self, made: Tensor) -> None:
        """Take what this stage made into the digest. Raises RankLost."""
        if self.digest is not None:
            self.settle()
            self.digest = checksum_of(made, self.digest)

    def receive_from(self, rank: int, shape: Sequence[int]) -> Tensor:
        """What that rank sends, float32. Raises RankLost."""
        tensor = torch.empty(tuple(shape), dtype=torch.float32, device=self._device)
        try:
            self._waiting = dist.irecv(tensor, src=rank)
            self._finish(self._waiting, rank)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} got nothing from rank {rank} ({first_line(error)})") from error
        finally:
            self._waiting = None
        return tensor

    def send_to(self, rank: int, tensor: Tensor) -> None:
        """Raises RankLost."""
        self.sent_bytes += tensor.nbytes
        self.messages += 1
        try:
            self._waiting = dist.isend(tensor.contiguous(), dst=rank)
            self._finish(self._waiting, rank)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} could not send to rank {rank} ({first_line(error)})") from error
        finally:
            self._waiting = None

    def _finish(self, work: dist.Work | None, rank: int) -> None:
        """Wait for an exchange; on a GPU have what it is given next wait."""
        assert work is not None
        if self._device.type == "cpu":
            work.wait(self._limit)
        else:
            work.wait()
            self.enqueued[rank] = work

    def settle(self) -> None:
        """Wait until a GPU has done all that it was given; on CPUs nothing is left to do.

        Raises RankLost if a rank is lost meanwhile. What then came from it is no result.
        """
        if self._device.type != "cuda":
            return
        is_done, asked = given_work(self._device), time.monotonic()
        while not is_done():
            self.check()
            if time.monotonic() - asked > _ASK_S:
                asked = time.monotonic()
                self._ask_for_errors()
            time.sleep(_LOOK_S)
        self.check()
        self.enqueued.clear()

    def _ask_for_errors(self) -> None:
        error = next((error for work in self.enqueued.values() if (error := work.exception()) is not None), None)
        if error is not None:
            raise RankLost(f"rank {self.rank} cannot exchange with the others ({first_line(error)})")

    def abort(self) -> None:
        """From another thread: whoever waits here for a tensor gets RankLost, and a GPU gives its exchanges up."""
        waiting = self._waiting
        if self._device.type == "cpu":
            if waiting is not None and hasattr(waiting, "abort"):
                waiting.abort()
        else:
            self._end(_abort_process_group)

    def close(self) -> None:
        """Give the connections up, unless they are being broken off for longer than that should take.

        GPUs' are broken off, after all was done: to destroy one of NCCL's, all of its ranks would have to come.
        """
        self._end(dist.destroy_process_group if self._device.type == "cpu" else _abort_process_group)

    def _end(self, how: Callable[[], None]) -> None:
        if not self._ending.acquire(timeout=_ABORT_S):
            return
        try:
            with suppress(Exception):  # it was not connected, or is not any more
                if dist.is_initialized():
                    how()
        finally:
            self._ending.release()


def backend_for(device: torch.device) -> str:
    """By what ranks with such a device exchange, as torch.distributed calls it."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _nobody_is_lost() -> None:
    pass


def checksum_of(tensor: Tensor, start: int) -> int:
    """A check sum of a float32 tensor's bits, which goes on from `start`."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(bits.numpy().tobytes(), start)
