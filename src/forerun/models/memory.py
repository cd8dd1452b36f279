"""Whether the machine, or its GPU, has the memory for what is about to be loaded.

Knows: /proc/meminfo, the limits of a container, sysconf; of a GPU what `kernels.device` says. Does not know: models.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from forerun.errors import ResourceError
from forerun.kernels.device import CPU, free_bytes

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
SHARE_OF_HOST = 0.25  # of the free memory that KV or recurrent states may take


def memory_of(device: torch.device) -> int | None:
    """Memory that is free on a GPU, or available on the host; None where the system does not say."""
    return available_bytes() if device.type == "cpu" else free_bytes(device)


def available_bytes() -> int | None:
    """Memory of the host that can be taken without swapping, None where the system does not say."""
    known = [size for size in (_of_machine(), _of_container()) if size is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return _from_sysconf()


def _of_container() -> int | None:
    """What a container's limit (cgroup v2) leaves, None without one; pages of files count as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max": no limit
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(limit - used + int(stat.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return None


def _from_sysconf() -> int | None:
    """The free pages, or all of them where nobody counts those (macOS)."""
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with suppress(ValueError, OSError, AttributeError):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def check_memory(needed: int, purpose: str, device: torch.device = CPU) -> None:
    """Raise ResourceError if `needed` bytes are more than `device` has available."""
    available = memory_of(device)
    if available is not None and needed > available:
        raise ResourceError(
            f"{purpose} needs about {needed / 1e9:.2f} GB of memory, {available / 1e9:.2f} GB are available; close "
            "other programs, load with dtype bfloat16, lower the context length, or choose a smaller model"
        )
