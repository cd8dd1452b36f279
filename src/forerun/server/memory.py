"""Keeps a server's resident memory from growing with the number of threads that ever ran.

Knows: one setting of the C library's allocator. Does not know: who allocates what.

glibc gives threads arenas of their own, up to eight per core, and an arena keeps the memory it once used: each thread
that reads requests would keep as much as its largest prompt took. A few shared arenas bound that.
"""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8  # malloc.h
MAX_ARENAS = 4  # the engine, the event loop, and two for the threads that read requests


def bound_arenas() -> bool:
    """Let threads share MAX_ARENAS arenas; returns whether the C library supports it (only glibc does).

    It only affects new arenas: call it before threads are started.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and mallopt(_M_ARENA_MAX, MAX_ARENAS) == 1
