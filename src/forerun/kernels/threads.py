"""torch on a single thread while the kernels' own threads compute.

Knows: torch's number of threads for the calling thread, which kernels have threads. Does not know: what is computed.

torch runs its own operations on OpenMP threads. After an operation on many elements (for example copying a row of
logits of a large vocabulary for each of two requests) those threads spin, waiting for the next one, which takes tens of
milliseconds on some processors. Meanwhile they occupy the cores that the kernels' threads need for the next pass.

`torch.set_num_threads` also sets what a thread begins with that has not called torch yet, for good. So the numbers of
the calling thread are set where torch reads them: in OpenMP and MKL, by the functions that torch itself calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

import torch

from forerun.kernels.ops import Kernels


def torch_beside(kernels: Kernels) -> Callable[[], AbstractContextManager[None]]:
    """What belongs around passes on these kernels: one thread of torch where they compute on threads of their own.

    Passes that are not replayed need it most: torch joins and selects rows between any two ops.
    """
    return single_torch_thread if kernels.name.startswith("cpu") else nullcontext


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Inside, torch computes on the calling thread alone; other threads keep their numbers.

    Where torch is built without OpenMP, threads whose first call of torch falls inside keep a single thread, too.
    """
    before = torch.get_num_threads()  # a thread's first call sets its numbers
    if before == 1:
        yield
        return
    of_openmp, of_mkl = _setters()
    mkl_before = of_mkl(1)
    of_openmp(1)
    try:
        yield
    finally:
        of_openmp(before)
        of_mkl(mkl_before)


@cache
def _setters() -> tuple[Callable[[int], object], Callable[[int], int]]:
    """What sets the numbers of the calling thread in OpenMP and MKL; the latter returns what it was.

    `torch.set_num_threads`, which sets both, where torch's library does not offer these.
    """
    of_all = torch.set_num_threads, _nothing
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        of_openmp = library.omp_set_num_threads
        of_mkl = library.MKL_Set_Num_Threads_Local if has_mkl else _nothing
    except (OSError, AttributeError):
        return of_all
    before = torch.get_num_threads()
    of_openmp(1)
    is_torchs = torch.get_num_threads() == 1
    of_openmp(before)
    return (of_openmp, of_mkl) if is_torchs else of_all


def _nothing(_: int) -> int:
    return 0
