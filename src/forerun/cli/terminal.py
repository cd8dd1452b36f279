"""The terminal that `forerun chat` talks in: lines with a history, and figures in the bottom corner.

Knows: readline, and the escape sequences for parts of a screen. Does not know: conversations.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TextIO

HISTORY_LINES = 1000
CORNER_S = 0.1  # between two changes of the corner


def enable_line_editing(history: Path, commands: Sequence[str]) -> None:
    """Let `input` edit lines, remember them in the file `history`, and complete `commands`, where the system can."""
    if not sys.stdin.isatty():
        return

    def completed(text: str, num: int) -> str | None:
        found: list[str | None] = [command for command in commands if text and command.startswith(text)]
        return [*found, None][num]

    with contextlib.suppress(ImportError):
        import readline

        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.read_history_file(history)
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer_delims("")
        readline.set_completer(completed)
        readline.parse_and_bind("tab: complete")
        atexit.register(_write_history, history)


def _write_history(history: Path) -> None:
    import readline

    with contextlib.suppress(OSError):
        readline.write_history_file(history)


def read_line(prompt: str) -> str | None:
    """The next line, and those after it while they end in a backslash; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input((prompt if not lines else "." * (len(prompt) - 1) + " ") if sys.stdin.isatty() else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        line = line.removesuffix("\r")  # of a file from Windows
        if not line.endswith("\\"):
            return "\n".join([*lines, line]).strip()
        lines.append(line[:-1])


class Corner:
    """The right end of the terminal's last line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._columns, self._lines = shutil.get_terminal_size()
        self._last = 0.0

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Nothing else is written to the last line meanwhile: the lines above it scroll alone."""
        self._write(f"\n\0337\033[1;{self._lines - 1}r\0338\033[A")
        try:
            yield
        finally:
            self._write(f"\0337\033[r\033[{self._lines};1H\033[2K\0338")

    def show(self, text: str) -> None:
        """Replace what is there, unless it changed just now."""
        if monotonic() - self._last < CORNER_S:
            return
        self._last = monotonic()
        shown = text[: self._columns - 1]
        place = f"\033[{self._lines};1H\033[2K\033[{self._lines};{self._columns - len(shown)}H"
        self._write(f"\0337{place}\033[2m{shown}\033[0m\0338")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
