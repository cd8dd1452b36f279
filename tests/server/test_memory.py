"""Memory of a server's process: what threads that come and go leave behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forerun.server.memory import MAX_ARENAS

# Threads that all allocate at once, as readers of long prompts do -> how many arenas glibc has made for them.
MANY_THREADS = """
import ctypes, os, sys, tempfile, threading
from forerun.server.memory import bound_arenas
if sys.argv[1] == "bounded" and not bound_arenas():
    sys.exit("no glibc")
libc = ctypes.CDLL(None)
if not hasattr(libc, "malloc_info"):
    sys.exit("no glibc")
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
together = threading.Barrier(24)
def hold():
    pieces = [libc.malloc(1000) for _ in range(100)]
    together.wait()
    for piece in pieces: libc.free(piece)
threads = [threading.Thread(target=hold) for _ in range(24)]
for thread in threads: thread.start()
for thread in threads: thread.join()
path = tempfile.mktemp()
libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
file = libc.fopen(path.encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(ctypes.c_void_p(file))
print(open(path).read().count("<heap nr="))
os.unlink(path)
"""


def num_arenas(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", MANY_THREADS, how], capture_output=True, text=True, timeout=60)
    if done.returncode and "no glibc" in done.stderr:
        pytest.skip("not on glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_many_threads_share_a_few_arenas() -> None:
    assert num_arenas("bounded") <= MAX_ARENAS < num_arenas("as it comes")
