"""torch on a single thread while the kernels' own threads compute.

Knows: torch's number of threads for the calling thread. Does not know: the kernels' threads, what is computed.

torch runs its own operations on OpenMP threads. After an operation on many elements (for example copying a row of
logits of a large vocabulary for each of two requests) those threads spin, waiting for the next one, which takes tens of
milliseconds on some processors. Meanwhile they occupy the cores that the kernels' threads need for the next pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
