"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from forerun.errors import RankLost
from forerun.kernels.ranks import Ranks

T = TypeVar("T")
LIMIT_S = 60.0


class ThreadRanks(Ranks):
    """One of several threads that meet at a barrier."""

    def __init__(
        self, rank: int, barrier: threading.Barrier, held: list[Tensor | None], turn: threading.Lock | None = None
    ) -> None:
        super().__init__(rank, len(held))
        self._barrier, self._held, self._turn = barrier, held, turn

    def _gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        self._held[self.rank] = part.clone()
        self._meet()
        parts = [one for one in self._held if one is not None]
        assert [tuple(one.shape) for one in parts] == [(part.shape[0], width) for width in widths]
        made = torch.cat(parts, dim=1)
        self._meet()  # nobody writes before all have read
        return made

    def _meet(self) -> None:
        if self._turn is not None:
            self._turn.release()
        try:
            self._barrier.wait(LIMIT_S)
        except threading.BrokenBarrierError as error:
            raise RankLost("another thread failed") from error
        finally:
            if self._turn is not None:
                self._turn.acquire()


def on_ranks(size: int, run: Callable[[Ranks], T], in_turns: bool = False) -> list[T]:
    """What `run` gives on each of `size` ranks, which are threads; the first error that is a rank's own is raised.

    in_turns: one computes while the others wait, as Triton's interpreter needs it.
    """
    barrier, held = threading.Barrier(size), list[Tensor | None]([None] * size)
    turn = threading.Lock() if in_turns else None

    def one(rank: int) -> T:
        try:
            with turn or nullcontext():
                return run(ThreadRanks(rank, barrier, held, turn))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        own = [error for error in errors if not isinstance(error, RankLost)]
        if errors:
            raise (own or errors)[0]
        return [future.result() for future in futures]
