"""Memory of the host for what is large and read from end to end by any thread: a KV pool.

Knows: huge pages and memory nodes, as far as the system has them. Does not know: what lies there.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from forerun.kernels.cores import memory_nodes

PAGE = 4096  # at most what a page has


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.zeros, in huge pages where there are some, in turns on the nodes of this process; all is touched."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    _spread(data)
    data[::PAGE] = 0
    return data[:num_bytes].view(dtype).view(*shape)


def _spread(data: Tensor) -> None:
    nodes = _nodes()
    if len(nodes) < 2:
        return
    with suppress(ImportError):  # without the C++ kernels pages lie where they are touched
        from forerun.kernels.cpu import _native

        _native.spread_over_nodes(data.data_ptr(), data.nbytes, nodes)


_nodes = cache(memory_nodes)  # many files on a large machine
