"""Keeps a server's resident memory from growing with the number of threads that ever ran.

Knows: one setting of the C library's allocator. Does not know: who allocates what.

glibc gives threads arenas of their own, up to eight a core, and what an arena has once held it keeps: each of the
threads that read requests would end up with the memory of the largest prompt it has tokenized. Few arenas bound that.
"""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8  # malloc.h
MAX_ARENAS = 4  # the engine, the event loop, and two for the threads that read requests


def bound_arenas() -> bool:
    """Let threads share MAX_ARENAS arenas; whether the C library could be told so (only glibc can).

    It counts for arenas to come: call it before threads are started.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(_M_ARENA_MAX, MAX_ARENAS) == 1
