"""A progress bar on the terminal, or lines of a log, or nothing; and how much time is left.

Knows: how many things are done. Does not know: what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

SECONDS_A_LINE = 10.0


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


class TimeLeft:
    """Says how long the rest will take if it goes on as it did since this was made."""

    def __init__(self, total: int, done: int = 0) -> None:
        """`done` of `total` things were done before."""
        self._total = total
        self._before = done
        self._started = monotonic()

    def __call__(self, done: int) -> str:
        """ "64 of 128, 0:01:30 left", once `done` things are done."""
        pace = (monotonic() - self._started) / max(done - self._before, 1)
        return f"{done} of {self._total}, {timedelta(seconds=round(pace * (self._total - done)))} left"


@contextmanager
def progress_lines(what: str, total: int, say: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Say how many of `total` things are done, every ten seconds at most; call what is yielded as `progress_bar`'s."""
    done, said, left = 0, monotonic(), TimeLeft(total)

    def advance(num: int) -> None:
        nonlocal done, said
        done += num
        if done < total and monotonic() - said >= SECONDS_A_LINE:
            said = monotonic()
            say(f"{what}: {left(done)}")

    yield advance
