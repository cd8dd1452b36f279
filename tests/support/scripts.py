"""Running a script of `lab/` inside the test process, as `python lab/NAME.py ARGUMENTS` does."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

LAB = Path(__file__).resolve().parents[2] / "lab"


class Printed(NamedTuple):
    """What a script wrote."""

    stdout: str
    stderr: str


def run_script(name: str, *arguments: str, status: int = 0) -> Printed:
    """Run `lab/NAME.py` and check its exit status."""
    out, err, ended = StringIO(), StringIO(), 0
    path = LAB / f"{name}.py"
    with patch.object(sys, "argv", [str(path), *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            ended = int(end.code or 0)
    printed = Printed(out.getvalue(), err.getvalue())
    assert ended == status, printed
    return printed
