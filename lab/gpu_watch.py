"""Keeps a run of gpu.py going: its parts run in a process that may crash or hang, as one with a broken kernel does.

Knows: processes, the file of a run's state. Does not know: parts, GPUs. After an illegal access nothing of a process
can use the GPU any more, and a kernel that never ends cannot be stopped from inside; a new process goes on with the
parts that are left, and the part in question is named with what it had found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 0.5
MOST_STARTS = 8
STOPPED, ORPHANED = -1000, 4  # the first is no status a process ends with
Found = dict[str, Any]  # of a part: "rows", names "left_out", "errors" by name


@dataclass(frozen=True, slots=True)
class Noted:
    """Where a part's figures go the moment they are there."""

    found: Found
    keep: Callable[[], None]

    def rows(self, *rows: dict[str, Any]) -> None:
        """More figures."""
        self.found["rows"] += rows
        self.keep()

    def left_out(self, name: str) -> None:
        """A case there was no time for."""
        self.found["left_out"].append(name)

    def error(self, name: str, why: str) -> None:
        """A case that failed."""
        self.found["errors"][name] = why[-2000:]
        self.keep()


def read_state(path: Path) -> dict[str, Any]:
    """What a run had found when it last wrote; empty before that."""
    try:
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return state


def write_state(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(state), "utf-8")
    part.replace(path)


def end_with_parent() -> None:
    """In the process that works: end when the one that watches is gone, however it went."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(ORPHANED)

    threading.Thread(target=wait, daemon=True).start()


def supervise(command: Sequence[str], path: Path) -> int:
    """Start the command until it ends by itself -> its status, 1 if it had to be started again.

    The command ends by `end_with_parent`.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as `timeout` asks: clean up first
    for start in range(MOST_STARTS):
        status = _run(command, path)
        running = read_state(path).get("running")
        if running is None:  # all parts are done, or none was begun
            return status if status >= 0 and not start else 1
        _give_up(running["part"], status, path)
    return 1


def _run(command: Sequence[str], path: Path) -> int:
    """One process, stopped when its part is overdue -> its status."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        while process.poll() is None:
            time.sleep(LOOK_EVERY_S)
            running = read_state(path).get("running")
            if running is not None and time.time() > running["until"]:
                return STOPPED
        return process.returncode
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The process and those it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _give_up(part: str, status: int, path: Path) -> None:
    """Name the part that was going on, so that the next process goes on behind it."""
    state = read_state(path)
    why = "stopped: it took too long" if status == STOPPED else f"its process ended with status {status}"
    found = state["parts"].setdefault(part, {"rows": [], "left_out": [], "errors": {}})
    found["errors"].setdefault(part, why)
    state["running"] = None
    write_state(state, path)
