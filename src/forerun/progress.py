"""A progress bar on the terminal, or nothing.

Knows: how many things are done. Does not know: what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, total: int, shown: bool, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show `total` things being done on stderr, or bytes; call what is yielded with how many more are done."""
    if not shown:
        yield lambda num: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), *((DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num: progress.advance(task, num)
