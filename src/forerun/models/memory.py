"""Whether the machine has the memory for what is about to be loaded.

Knows: /proc/meminfo and sysconf. Does not know: models.
"""

from __future__ import annotations

import os
from pathlib import Path

from forerun.errors import ResourceError

MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, None where the system does not say."""
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return _from_sysconf()


def _from_sysconf() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def check_memory(needed: int, purpose: str) -> None:
    """Raise ResourceError if `needed` bytes are more than the machine has available."""
    available = available_bytes()
    if available is not None and needed > available:
        raise ResourceError(
            f"{purpose} needs about {needed / 1e9:.2f} GB of memory, {available / 1e9:.2f} GB are available; close "
            "other programs, load with dtype bfloat16, lower the context length, or choose a smaller model"
        )
