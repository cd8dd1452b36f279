"""What a measurement was taken on: processor, cores, versions, commit.

Knows: where a machine records such facts. Does not know: what is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from forerun import __version__
from forerun.kernels.cores import usable_cores
from forerun.kernels.ops import Kernels

PACKAGE = Path(__file__).resolve().parents[1]


def describe_machine(kernels: Kernels | None = None) -> dict[str, Any]:
    """Facts about the machine that go with every figure, as plain values."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "forerun": __version__,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if kernels is not None:
        facts["kernels"] = f"{kernels.name} ({kernels.reason})"
    return facts


def machine_line(facts: Mapping[str, Any]) -> str:
    """The facts that say how fast a machine is, and the code that was measured, in one line."""
    return f"{facts['cpu']}, {facts['cores']} cores, kernels {facts['kernels']}, commit {facts['commit']}"


def cpu_model() -> str:
    """The processor's name, as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return _said("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()  # macOS
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """The commit of the checkout forerun was installed from or runs in; None outside one."""
    for folder in (PACKAGE, Path.cwd()):
        git = ("git", "-C", str(folder))
        root = _said(*git, "rev-parse", "--show-toplevel")
        if root and (Path(root) / "src" / "forerun" / "core.py").exists():
            head = _said(*git, "rev-parse", "--short", "HEAD")
            dirty = _said(*git, "status", "--porcelain", "--untracked-files=no")
            return f"{head}+changes" if head and dirty else head
    return None


def _said(*command: str) -> str | None:
    """What a program printed; None if it failed or is missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
