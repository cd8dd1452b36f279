"""A real process of `forerun serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, list[dict[str, Any]]]]:
    """A server of mini of its own -> the process, its address, what it logged up to there; it is ended afterwards."""
    command = [sys.executable, "-m", "forerun.cli", "serve", "mini", "--port", "0", "--log-format", "json", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    try:
        logged = []
        for line in process.stderr:
            logged += [json.loads(line)] if line.startswith("{") else []
            if logged and logged[-1]["event"] == "listening":
                break
        yield process, logged[-1]["api"].removesuffix("/v1"), logged
    finally:
        process.terminate()
        process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=60) == 0
