"""torch's own threads, and when they had better rest.

Knows: torch's number of threads for the calling thread. Does not know: the kernels' threads, what is computed.

After an operation of its own on many elements (copying a row of logits of a large vocabulary for each of two requests
is one) torch's OpenMP threads wait for the next one by spinning, which takes tens of milliseconds on some processors.
On a machine whose cores all belong to the kernels' threads, the pass that follows takes that much longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_rests() -> Iterator[None]:
    """torch computes on the calling thread alone meanwhile."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
