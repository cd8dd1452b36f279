"""How fast this machine reads memory, the upper limit for a pass over weights.

Knows: a buffer far larger than the caches, and threads that read it from end to end. Does not know: models.

Each thread computes the dot product of the two halves of its share: two ascending streams, the fastest read without
native code of our own (a sum has one stream, `memchr` waits for every line). If the kernels have a read function of
their own, on their own threads, that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ResourceError
from forerun.kernels import pages
from forerun.kernels.device import synchronize
from forerun.kernels.ops import Kernels
from forerun.models.memory import available_bytes

LEAST_BYTES = 256 << 20
MOST_BYTES = 2 << 30
TIMES_CACHE = 2  # buffer size over the largest cache, which virtual machines share
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@contextmanager
def reader(kernels: Kernels, num_threads: int) -> Iterator[Callable[[], float]]:
    """Gives a function that reads a buffer once -> bytes a second; the buffer lives as long as the context.

    On a GPU it copies, and counts both bytes read and bytes written.
    """
    if kernels.device.type != "cpu":
        yield copier(kernels.device)
        return
    num_bytes = buffer_bytes()
    buffer = _buffer(num_bytes)
    native: Any = getattr(kernels, "engine", None)
    if hasattr(native, "stream_read"):
        address = buffer.data_ptr()
        yield lambda: num_bytes / _seconds(lambda: native.stream_read(address, num_bytes))
        return
    own_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # every reading thread is one
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            shares = [(part[0], part[1]) for part in _shares(buffer, num_threads)]
            yield lambda: num_bytes / _seconds(lambda: list(pool.map(_read, shares)))
    finally:
        torch.set_num_threads(own_threads)


def copier(device: torch.device, num_bytes: int = MOST_BYTES) -> Callable[[], float]:
    """A function that copies a buffer on `device` once -> bytes read and written a second."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    copy()  # the first one starts the GPU
    return lambda: 2 * source.nbytes / _seconds(copy)


def buffer_bytes() -> int:
    """Twice the largest cache, within bounds; raises ResourceError if there is too little memory."""
    wanted = min(max(TIMES_CACHE * largest_cache(), LEAST_BYTES), MOST_BYTES)
    available = available_bytes()
    if available is not None and wanted > available // 2:
        raise ResourceError(
            f"measuring the read bandwidth needs a buffer of {wanted / 1e9:.2f} GB, {available / 1e9:.2f} GB are "
            "available; close other programs"
        )
    return wanted


def largest_cache(folder: Path = CACHES) -> int:
    """Bytes of the largest cache that the system reports, 0 if it reports none."""
    sizes = [_size(path) for path in folder.glob("index*/size")]
    return max(sizes, default=0)


def _size(path: Path) -> int:
    try:
        text = path.read_text("ascii").strip()
        return int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)
    except (OSError, ValueError):
        return 0


def _buffer(num_bytes: int) -> Tensor:
    """Newly mapped memory -> [num_bytes / 4] float32, nothing of it zero pages."""
    return pages.zeros((num_bytes // 4,), torch.float32).fill_(1.0)


def _shares(buffer: Tensor, num_threads: int) -> Tensor:
    """Two streams per thread -> [num_threads, 2, n]; a few entries are left over."""
    return buffer[: len(buffer) - len(buffer) % (2 * num_threads)].view(num_threads, 2, -1)


def _read(halves: tuple[Tensor, Tensor]) -> None:
    torch.dot(*halves)


def _seconds(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start
