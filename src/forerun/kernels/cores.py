"""How many threads are worth having: the physical cores this process may use.

Knows: affinity, hyper-twins, and the CPU limits of control groups (version 2), as Linux tells them. Does not know: the
threads. Two hyper-threads share the units that multiply, and a barrier waits for the slower one; a thread beyond a
group's limit is stopped for most of each period while the others wait for it.
"""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("sys/fs/cgroup")  # below the root


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores, at least 1; logical ones where the system (below `root`) does not tell which are twins."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cpus = range(os.cpu_count() or 1) if affinity is None else affinity(0)
    cores = {_twins_of(cpu, root) for cpu in cpus}
    return max(1, min([len(cores), *_limits(root)]))


def _twins_of(cpu: int, root: Path) -> str:
    """The logical CPUs on the same core."""
    return _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _limits(root: Path) -> list[int]:
    """Whole CPUs that this process's control group and those around it allow."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / GROUPS / own
    folders = [folder, *folder.parents]
    given = [_text(path / "cpu.max").split() for path in folders if path.is_relative_to(root / GROUPS)]
    return [int(pair[0]) // int(pair[1]) for pair in given if len(pair) == 2 and pair[0] != "max"]


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
