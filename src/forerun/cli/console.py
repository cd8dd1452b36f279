"""How commands print: two consoles, one-line errors, progress, one way to write JSON.

Knows: terminals. Does not know: commands. What is printed is mostly data, such as paths and parts of chat templates:
the consoles read no [marks] and :names: in it. Spinners do, so that they are given data as `Text`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forerun.progress import progress_bar, progress_lines


def out() -> Console:
    """The console on standard output."""
    return Console(highlight=False, markup=False, emoji=False)


def err() -> Console:
    """The console on standard error: errors, progress, notes."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_error(message: str) -> None:
    """One line on standard error."""
    err().print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def print_note(message: str) -> None:
    """One dim line on standard error."""
    err().print(message, style="dim", soft_wrap=True)


def progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """`total` things that are being done, on standard error: a bar on a terminal, else a line now and then."""
    shown = err().is_terminal
    return progress_bar(what, total, shown) if shown else progress_lines(what, total, print_note)


def print_json(value: Any) -> None:
    """Print a value as JSON, the only thing on standard output."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False))


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table: the first column to the left, figures to the right; wide cells and headers wrap."""
    result = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False, padding=(0, 1))
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return result
