"""torch on a single thread while the kernels' own threads compute.

Knows: torch's number of threads for the calling thread, which kernels have threads. Does not know: what is computed.

torch runs its own operations on OpenMP threads. After an operation on many elements (for example copying a row of
logits of a large vocabulary for each of two requests) those threads spin, waiting for the next one, which takes tens of
milliseconds on some processors. Meanwhile they occupy the cores that the kernels' threads need for the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from forerun.kernels.ops import Kernels


def torch_beside(kernels: Kernels) -> Callable[[], AbstractContextManager[None]]:
    """What belongs around passes on these kernels: one thread of torch where they compute on threads of their own.

    Passes that are not replayed need it most: torch joins and selects rows between any two ops.
    """
    return single_torch_thread if kernels.name.startswith("cpu") else nullcontext


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
