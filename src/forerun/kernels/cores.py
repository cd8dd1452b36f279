"""How many threads are worth having, on which CPUs they stay (one for each physical core this process may use), and
what their steps are timed with.

Knows: affinity, hyper-twins, memory nodes, and the CPU limits of control groups (versions 1 and 2), as Linux tells
them. Does not know: the threads. Two hyper-threads share the units that multiply, and a barrier waits for the slower
one; a thread beyond a group's limit is stopped for most of each period while the others wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from forerun.errors import KernelError

GROUPS = Path("sys/fs/cgroup")  # below the root, as the next
CPUS = Path("sys/devices/system/cpu")
NODES = Path("sys/devices/system/node")
ROOT = Path("/")


class Core(NamedTuple):
    """A physical core, as far as this process may use it."""

    node: int  # whose memory is near
    cpus: tuple[int, ...]  # logical ones, ascending


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> list[Core]:
    """The cores of these logical CPUs, a node's one after the other; each CPU a core where `root` tells no twins."""
    nodes = {cpu: int(path.name[4:]) for path in (root / NODES).glob("node[0-9]*") for cpu in _listed(path / "cpulist")}
    twins: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        first = min(_listed(root / CPUS / f"cpu{cpu}/topology/thread_siblings_list"), default=cpu)
        twins.setdefault(first, []).append(cpu)
    return sorted(Core(nodes.get(each[0], 0), tuple(each)) for each in twins.values())


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores that this process may keep busy, at least 1."""
    return max(1, min([len(physical_cores(allowed_cpus(), root)), *_limits(root)]))


def memory_nodes(root: Path = ROOT) -> list[int]:
    """The nodes of the CPUs that this process may use."""
    return sorted({core.node for core in physical_cores(allowed_cpus(), root)})


def pins(num_threads: int, asked: bool | None = None, root: Path = ROOT, first: int = 0) -> list[tuple[int, ...]]:
    """The CPUs each thread stays on, [] for no pinning. Raises KernelError where it is asked for but cannot be.

    asked: None for pinning only where it gains and nobody else is meant to use the cores: memory has several nodes,
    and there is a thread for every core that this process may use. first: the cores before it are another rank's.
    """
    if asked is False:
        return []
    cores = physical_cores(allowed_cpus(), root)
    nodes = {core.node for core in cores}
    if asked is None and (len(nodes) < 2 or not num_threads == len(cores) == usable_cores(root)):
        return []
    if not hasattr(os, "sched_setaffinity"):
        raise KernelError("pin_threads was asked for, but this system does not pin threads: leave it out")
    if first + num_threads > len(cores):
        others = f" besides {first} of other ranks" if first else ""
        raise KernelError(
            f"pin_threads gives each thread a physical core, and there are {len(cores)} for {num_threads} threads"
            f"{others}: lower threads, or leave it out"
        )
    return [core.cpus for core in cores[first : first + num_threads]]


def allowed_cpus() -> Iterable[int]:
    """The logical CPUs that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return range(os.cpu_count() or 1) if affinity is None else affinity(0)


def step_clock(device: torch.device) -> Callable[[], float]:
    """What steps and calls of drafters are timed with, in seconds.

    On a CPU it stands still while others have the core of the thread that reads it, or of one that this waits for: that
    is not what a step costs. A GPU works on while the host waits for a core.
    """
    if device.type != "cpu":
        return perf_counter
    try:
        from forerun.kernels.cpu import _native
    except ImportError:
        return perf_counter
    return _native.own_time


def _limits(root: Path) -> list[int]:
    """Whole CPUs that this process's control groups and those around them allow."""
    quotas = [quota for line in _text(root / "proc/self/cgroup").splitlines() for quota in _quotas(line, root)]
    return [int(pair[0]) // int(pair[1]) for pair in quotas if len(pair) == 2 and pair[0] not in ("max", "-1")]


def _quotas(line: str, root: Path) -> Iterator[list[str]]:
    """Time and period of the groups that a line of /proc/self/cgroup names, from the innermost on."""
    _, _, rest = line.partition(":")
    controllers, _, own = rest.partition(":")
    if controllers and "cpu" not in controllers.split(","):
        return
    mount = root / GROUPS / controllers  # version 2 has no controllers here
    folder = mount / own.lstrip("/")
    for path in (folder, *folder.parents):
        if path.is_relative_to(mount):
            old = f"{_text(path / 'cpu.cfs_quota_us')} {_text(path / 'cpu.cfs_period_us')}"
            yield (old if controllers else _text(path / "cpu.max")).split()


def _listed(path: Path) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    ends = [part.split("-") for part in _text(path).split(",") if part]
    return [cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)]


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
