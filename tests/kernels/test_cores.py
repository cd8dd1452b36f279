"""How many threads are used unless told otherwise, and where they stay, on recorded machines; the clock of steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch

from forerun.errors import KernelError
from forerun.kernels.cores import Core, memory_nodes, physical_cores, pins, step_clock, usable_cores

Allow = Callable[[range | set[int]], None]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def write_twins(root: Path, *lists: str) -> None:
    """A list a core, of first and second CPUs such as 0,4; a single CPU has no twin."""
    for twins in lists:
        for cpu in twins.split(","):
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", twins)


def write_nodes(root: Path, *lists: str) -> None:
    for node, cpus in enumerate(lists):
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpus)


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Allow:
    """Sets which CPUs this process may use."""

    def use(cpus: range | set[int]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: None, raising=False)

    return use


@pytest.fixture
def root(tmp_path: Path, allow: Allow) -> Path:
    """Eight logical CPUs, 0 and 4 twins, 1 and 5, ...; this process may use all."""
    allow(range(8))
    write_twins(tmp_path, "0,4", "1,5", "2,6", "3,7")
    return tmp_path


@pytest.fixture
def two_sockets(tmp_path: Path, allow: Allow) -> Path:
    """Two sockets of 32 cores with twins: node 0 has CPUs 0 to 31 and 64 to 95."""
    allow(range(128))
    write_twins(tmp_path, *(f"{cpu},{cpu + 64}" for cpu in range(64)))
    write_nodes(tmp_path, "0-31,64-95", "32-63,96-127")
    return tmp_path


def test_twins_count_once(root: Path, allow: Allow) -> None:
    assert usable_cores(root) == 4
    allow({1, 2, 5})
    assert usable_cores(root) == 2


def test_two_sockets(two_sockets: Path) -> None:
    cores = physical_cores(range(128), two_sockets)
    assert cores == [Core(cpu // 32, (cpu, cpu + 64)) for cpu in range(64)]
    assert usable_cores(two_sockets) == 64 and memory_nodes(two_sockets) == [0, 1]
    assert pins(64, root=two_sockets) == [core.cpus for core in cores], "a thread a core, a node's one after the other"


def test_nodes_whose_cpus_alternate(tmp_path: Path, allow: Allow) -> None:
    allow(range(4))
    write_twins(tmp_path, "0", "1", "2", "3")
    write_nodes(tmp_path, "0,2", "1,3")
    assert pins(4, root=tmp_path) == [(0,), (2,), (1,), (3,)]


def test_nobody_is_pinned_where_others_may_want_the_cores(two_sockets: Path, allow: Allow) -> None:
    assert pins(32, root=two_sockets) == [], "the other cores are for somebody else"
    assert pins(64, asked=False, root=two_sockets) == []
    write(two_sockets / "proc/self/cgroup", "0::/")
    write(two_sockets / "sys/fs/cgroup/cpu.max", "4800000 100000")
    assert usable_cores(two_sockets) == 48 and pins(48, root=two_sockets) == [], "a quota: others run on these cores"
    allow({*range(32), *range(64, 96)})
    assert usable_cores(two_sockets) == 32 and pins(32, root=two_sockets) == [], "one node: the system does it as well"


def test_pinning_that_is_asked_for(two_sockets: Path, allow: Allow, monkeypatch: pytest.MonkeyPatch) -> None:
    allow({3, 40, 67, 90})
    assert pins(3, asked=True, root=two_sockets) == [(3, 67), (90,), (40,)], "only CPUs this process may use"
    assert pins(1, asked=True, root=two_sockets, first=2) == [(40,)], "the others are another rank's"
    with pytest.raises(KernelError, match="there are 3 for 4 threads: lower threads"):
        pins(4, asked=True, root=two_sockets)
    with pytest.raises(KernelError, match="there are 3 for 2 threads besides 2 of other ranks"):
        pins(2, asked=True, root=two_sockets, first=2)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(KernelError, match="this system does not pin threads"):
        pins(1, asked=True, root=two_sockets)


def test_a_laptop_with_fast_and_slow_cores(tmp_path: Path, allow: Allow) -> None:
    """Six fast cores with twins, eight slow ones without; all count, since fast threads take over from slow ones."""
    allow(range(20))
    write_twins(tmp_path, *(f"{cpu},{cpu + 1}" for cpu in range(0, 12, 2)), *map(str, range(12, 20)))
    write_nodes(tmp_path, "0-19")
    assert usable_cores(tmp_path) == 14 and pins(14, root=tmp_path) == []


def test_arm_without_twins(tmp_path: Path, allow: Allow) -> None:
    allow(range(80))
    write_twins(tmp_path, *map(str, range(80)))
    write_nodes(tmp_path, "0-79")
    assert usable_cores(tmp_path) == 80 and pins(80, root=tmp_path) == []


def test_a_container_with_three_cpus(two_sockets: Path, allow: Allow) -> None:
    allow({5, 6, 69})
    assert physical_cores({5, 6, 69}, two_sockets) == [Core(0, (5, 69)), Core(0, (6,))]
    assert usable_cores(two_sockets) == 2 and memory_nodes(two_sockets) == [0]


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "max 100000"}, 4),
        ({"": "250000 100000"}, 2),
        ({"a/b": "350000 100000"}, 3),
        ({"a/b": "max 100000", "a": "150000 100000"}, 1),
        ({"a/b": "50000 100000"}, 1),
        ({"a/b": "900000 100000"}, 4),
        ({"a/b": "nonsense"}, 4),
    ],
)
def test_limits_of_control_groups(root: Path, limits: dict[str, str], cores: int) -> None:
    write(root / "proc/self/cgroup", "0::/a/b")
    for group, text in limits.items():
        write(root / "sys/fs/cgroup" / group / "cpu.max", text)
    assert usable_cores(root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("-1", 4)])
@pytest.mark.parametrize("folder", ["", "docker/abc"])  # as a container sees its own group, and as the host does
def test_limits_of_control_groups_of_version_1(root: Path, folder: str, quota: str, cores: int) -> None:
    write(root / "proc/self/cgroup", "5:cpuset:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc")
    group = root / "sys/fs/cgroup/cpu,cpuacct" / folder
    write(group / "cpu.cfs_quota_us", quota)
    write(group / "cpu.cfs_period_us", "100000")
    assert usable_cores(root) == cores


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores(tmp_path) == os.cpu_count()
    assert pins(os.cpu_count() or 1, root=tmp_path) == []


COUNTED = Path("/proc/self/schedstat")  # nanoseconds on a core come first: 0 where nobody counts
IS_TOLD = COUNTED.exists() and not COUNTED.read_text("ascii").startswith("0 ")  # else it is wall time
own_time = step_clock(torch.device("cpu"))


def spend(seconds: float) -> tuple[float, float]:
    """Compute for so long -> seconds on the own clock, wall time."""
    wall, own = perf_counter(), own_time()
    while perf_counter() - wall < seconds:
        pass
    return own_time() - own, perf_counter() - wall


def beside_a_busy_process(cpu: int) -> tuple[float, float]:
    """On the same CPU; the calling thread stays there."""
    os.sched_setaffinity(0, {cpu})
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert busy.stdout is not None
    try:
        busy.stdout.readline()  # it runs
        return spend(0.4)
    finally:
        busy.kill()
        busy.wait()
        busy.stdout.close()


def test_the_clock_of_steps_stands_still_while_others_have_the_core() -> None:
    cpu = max(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1) as one:
        own_s, wall_s = one.submit(beside_a_busy_process, cpu).result()
    assert own_s > 0.0 and (own_s < 0.8 * wall_s) == IS_TOLD


def test_the_clock_of_steps_after_a_fork() -> None:
    """What was open told of the parent's thread."""
    own_time()
    cpu = max(os.sched_getaffinity(0))
    if (child := os.fork()) == 0:
        status = 2
        try:
            own_s, wall_s = beside_a_busy_process(cpu)
            status = 0 if own_s > 0.0 and (own_s < 0.8 * wall_s) == IS_TOLD else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_clock_of_steps_goes_on_while_a_thread_sleeps() -> None:
    own = own_time()
    sleep(0.05)
    assert own_time() - own >= 0.04


def test_the_clock_of_steps_never_goes_back() -> None:
    times = [own_time() for _ in range(20_000)]
    assert times == sorted(times)


def test_a_gpu_works_on_while_the_host_has_no_core() -> None:
    assert step_clock(torch.device("cuda")) is perf_counter
