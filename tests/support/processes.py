"""Processes that this one has started, and those of their groups, by the script or module they run (Linux)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def own_processes(name: str) -> list[int]:
    """Ids of living processes whose command line has `name` and that this process or a child of it has started."""
    found = dict(_running(name))
    children = {pid for pid, parent in found.items() if parent == os.getpid()}
    return [pid for pid in found if pid in children or os.getpgid(pid) in children]


def _running(name: str) -> Iterator[tuple[int, int]]:
    """Process id, parent."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if name in command and state != "Z":
            yield int(folder.name), int(parent)


def end(processes: Iterable[int]) -> None:
    """Kill them, and wait until they are gone."""
    left = list(processes)
    for process in left:
        os.kill(process, signal.SIGKILL)
    for _ in range(500):
        left = [process for process in left if _is_alive(process)]
        if not left:
            return
        time.sleep(0.01)
    raise AssertionError(f"processes {left} do not end")


def _is_alive(process: int) -> bool:
    """Also not a zombie, whose parent has not asked for it yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(process: int) -> list[str]:
    """Where a process listens for TCP, as /proc/net has it: an address in hexadecimal, and a port."""
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if os.path.islink(path)]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [words[1] for words in lines if words[3] == "0A" and words[9] in own]
