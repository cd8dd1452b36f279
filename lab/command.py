"""What the commands of this folder share: an error of the user's is one line, not a traceback."""

from __future__ import annotations

from collections.abc import Callable

import typer

from forerun.cli.app import EXIT_USER_ERROR
from forerun.cli.console import print_error
from forerun.errors import ForerunError


def run(command: Callable[..., None]) -> None:
    """Call `command` with the options of this process's command line."""
    try:
        typer.run(command)
    except ForerunError as error:
        print_error(str(error))
        raise SystemExit(EXIT_USER_ERROR) from error
