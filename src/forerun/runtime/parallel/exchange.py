"""Where each rank stands, and how activations travel between pipeline stages and back to the leader.

Knows: torch.distributed's sends and receives. Does not know: layers, passes, who starts ranks. The shards of one stage
exchange by `kernels.ranks`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from forerun.errors import RankLost
from forerun.kernels.ranks import first_line

PASS_LIMIT_S = 3600.0  # an early stage may compute that long; who hangs or died is found out by beats


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
        self._device = device
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
        """Take what this stage made into the digest."""
        if self.digest is not None:
            self.digest = checksum_of(made, self.digest)

    def receive_from(self, rank: int, shape: Sequence[int]) -> Tensor:
        """What that rank sends, float32. Raises RankLost."""
        tensor = torch.empty(tuple(shape), dtype=torch.float32, device=self._device)
        try:
            self._waiting = dist.irecv(tensor, src=rank)
            assert self._waiting is not None
            self._waiting.wait(self._limit) if self._device.type == "cpu" else self._waiting.wait()
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
            dist.send(tensor.contiguous(), dst=rank)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} could not send to rank {rank} ({first_line(error)})") from error

    def abort(self) -> None:
        """From another thread: whoever waits here for a tensor gets RankLost."""
        waiting = self._waiting
        if waiting is not None and hasattr(waiting, "abort"):
            waiting.abort()


def checksum_of(tensor: Tensor, start: int) -> int:
    """A check sum of a float32 tensor's bits, which goes on from `start`."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(bits.numpy().tobytes(), start)
