"""How many threads are used unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun.kernels.cores import usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight logical CPUs, 0 and 4 twins, 1 and 5, ...; this process may use all."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for cpu in range(8):
        twins = f"{cpu % 4},{cpu % 4 + 4}"
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", twins)
    return tmp_path


def test_twins_count_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(root) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5})
    assert usable_cores(root) == 2


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"": "max 100000"}, 4),
        ({"": "200000 100000"}, 2),
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


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cores(tmp_path) == os.cpu_count()
