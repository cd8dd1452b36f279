"""Files of offline batches: a file of rows, and files of answers and errors to which a later run can add.

Knows: lines, torn ones, which rows are done. Does not know: requests, engines.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from uuid import uuid4

from forerun.errors import ConfigError, DataError, ResourceError
from forerun.server.batches import BadRow, BatchRow, Shard, read_row

# Rows, and their bytes, that are sorted by their prompts, so that those that begin alike share a prefix.
WINDOW, WINDOW_BYTES = 2048, 32 << 20
BEGINNING: Final = b'{"id": "batch_req_'  # of every answer


class _RowPlace(NamedTuple):
    line: int
    offset: int
    size: int  # in bytes, unless the line is too long


@dataclass(slots=True)
class BatchInput:
    """The rows of a file that are still to do, read when they are needed."""

    path: Path
    places: list[_RowPlace] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    num_done: int = 0  # rows of this shard that earlier runs answered

    @classmethod
    def scan(
        cls, path: Path, max_bytes: int, shard: Shard, done: set[str], url: str | None = None,
        most: int | None = None, is_over: Callable[[], bool] = bool,
    ) -> BatchInput:  # fmt: skip
        """Read a file once: where its rows are, and which are none. Raises DataError if it cannot be read.

        `url`: that of all rows; None: each has its own. `most`: lines; DataError for more. Reading ends once `is_over`.
        """
        found, first_lines = cls(path), dict[str, int]()
        for number, (place, line) in enumerate(_lines(path, max_bytes), 1):
            if is_over():
                break
            if most is not None and number > most:
                raise DataError(f"the file has more than {most} rows: divide it")
            row = BadRow(place.line, None, f"line {place.line} has more than {max_bytes} bytes") if line is None else (
                read_row(line, place.line)
            )  # fmt: skip
            name = row.custom_id
            if name is not None and name in first_lines:
                row = BadRow(place.line, name, f"line {first_lines[name]} has the same custom_id; the first one counts")
            if isinstance(row, BatchRow) and url not in (None, row.url):
                row = BadRow(place.line, name, f"the batch is for {url}, this row for {row.url}")
            if isinstance(row, BatchRow):
                first_lines[row.custom_id] = place.line
            found._sort(row, place, shard, done)
        return found

    def _sort(self, row: BatchRow | BadRow, place: _RowPlace, shard: Shard, done: set[str]) -> None:
        if not shard.has(row.custom_id if row.custom_id is not None else str(place.line)):
            return
        if row.answer_id in done:
            self.num_done += 1
        elif isinstance(row, BadRow):
            self.bad.append(row)
        else:
            self.places.append(place)

    def rows(self) -> Generator[BatchRow, None, None]:
        """The rows to do; those of a window whose prompts begin alike follow each other."""
        with self.path.open("rb") as file:
            for places in self._windows():
                rows = [self._read(file, place) for place in places]
                yield from sorted(rows, key=lambda row: row.prompt_key)

    def _windows(self) -> Iterator[list[_RowPlace]]:
        window: list[_RowPlace] = []
        num_bytes = 0
        for place in self.places:
            if window and (len(window) == WINDOW or num_bytes + place.size > WINDOW_BYTES):
                yield window
                window, num_bytes = [], 0
            window.append(place)
            num_bytes += place.size
        if window:
            yield window

    def _read(self, file: BinaryIO, place: _RowPlace) -> BatchRow:
        file.seek(place.offset)
        row = read_row(file.read(place.size), place.line)
        if isinstance(row, BadRow):
            raise DataError(f"{self.path} was changed while it was read: {row.message}")
        return row


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[_RowPlace, bytes | None]]:
    """Every line that is not blank; None for one that is too long, which is never held in memory whole."""
    try:
        with path.open("rb") as file:
            number = offset = 0
            while line := file.readline(max_bytes + 1):
                number, place = number + 1, _RowPlace(number + 1, offset, len(line))
                offset += len(line)
                if len(line) <= max_bytes or line.endswith(b"\n"):
                    if line.strip():
                        yield place, line
                    continue
                while (more := file.readline(max_bytes)) and not more.endswith(b"\n"):
                    offset += len(more)
                offset += len(more)
                yield place, None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


class AnswerFile:
    """A file of answers, a line each, that always ends with a whole line."""

    def __init__(self, path: Path, then: str = "") -> None:
        """then: what to do when there is room again, as the end of an error."""
        self.path, self._then = path, then
        self.ids: set[str] = set()  # of the answers it has
        self.num_new = 0
        self._file: FileIO | None = None

    def resume(self, check: Callable[[], None] | None = None) -> None:
        """Read what is there, and cut off a last line that was not written to its end.

        With `check`, which raises if this process may not write, a copy takes the file's place: a process that had the
        file open adds nothing to it any more. Raises DataError if it is no file of answers.
        """
        if not self.path.exists():
            return
        end = 0
        with self.path.open("r+b") as file:
            for number, line in enumerate(file, 1):
                answer_id = _id_in(line)
                if not line.startswith(BEGINNING[: len(line)]) or (answer_id is None and line.endswith(b"\n")):
                    raise DataError(f"line {number} of {self.path} is no answer of a batch: choose another path")
                if answer_id is None or not line.endswith(b"\n"):
                    break
                end += len(line)
                self.ids.add(answer_id)
            if check is None:
                file.truncate(end)
        if check is not None:
            self._replace(end, check)

    def _replace(self, size: int, check: Callable[[], None]) -> None:
        """Put a copy of the file's first bytes in its place."""
        fresh = self.path.with_name(f"{uuid4().hex}.new")
        try:
            with self.path.open("rb") as file, fresh.open("wb") as copy:
                shutil.copyfileobj(file, copy)
                copy.truncate(size)
                copy.flush()
                os.fsync(copy.fileno())
            check()
            fresh.replace(self.path)
        finally:
            fresh.unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete the file: its rows are done again."""
        self.path.unlink(missing_ok=True)

    def open(self) -> None:
        """Have it open: what is added from now on goes to this file, though a copy takes its place. Raises OSError."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)

    def write(self, answer: dict[str, Any]) -> None:
        """Add an answer; a process that is killed afterwards does not lose it. Raises ResourceError if it cannot."""
        line = memoryview(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        try:
            self.open()
            assert self._file is not None
            end = self._file.tell()
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(end)  # a full disk may have taken a part of the line
                raise
        except OSError as error:
            raise self._cannot_write(error) from error
        self.num_new += 1

    def begin(self) -> None:
        """Have the file there, though it may get no line. Raises ResourceError if it cannot be."""
        try:
            self.open()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> ResourceError:
        return ResourceError(f"cannot write {self.path}: {error.strerror or error}; make room{self._then}")

    def close(self) -> None:
        """Everything is on the disk when this returns. Raises ResourceError if it is not."""
        file, self._file = self._file, None
        if file is not None:
            try:
                with file:
                    os.fsync(file.fileno())
            except OSError as error:
                told = f"{self.path} may not be whole: {error.strerror or error}; make room{self._then}"
                raise ResourceError(told) from error


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """What is written of a batch: a file of answers, and one of errors."""

    answers: AnswerFile
    errors: AnswerFile

    def file(self, succeeded: bool) -> AnswerFile:
        """Where a row's line goes."""
        return self.answers if succeeded else self.errors

    @property
    def ids(self) -> set[str]:
        """Those of all lines that were there when it was resumed."""
        return self.answers.ids | self.errors.ids

    def exists(self) -> bool:
        """Whether one of them is there."""
        return self.answers.path.exists() or self.errors.path.exists()

    def resume(self, check: Callable[[], None] | None = None) -> None:
        """See `AnswerFile.resume`."""
        self.answers.resume(check)
        self.errors.resume(check)

    def close(self) -> None:
        """See `AnswerFile.close`."""
        with ExitStack() as stack:
            stack.callback(self.answers.close)
            stack.callback(self.errors.close)


def _id_in(line: bytes) -> str | None:
    """The id of an answer, None if the line is none."""
    try:
        answer = json.loads(line)
        return str(answer["id"]) if {"custom_id", "response", "error"} <= set(answer) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def errors_path(answers: Path) -> Path:
    """The file of errors beside a file of answers."""
    return answers.with_name(f"{answers.stem}.errors{answers.suffix}")


@dataclass(frozen=True, slots=True)
class MadeWith:
    """What answers depend on besides their rows: it is kept beside them, so that a later run can compare."""

    model: str  # as given
    seed: int

    def check(self, path: Path) -> None:
        """Raise ConfigError if the file beside the answers in `path` says otherwise; none, or a torn one, does not."""
        try:
            before = MadeWith(**json.loads(made_with_path(path).read_bytes()))
        except (OSError, ValueError, TypeError):
            return
        for name, now in asdict(self).items():
            if (was := getattr(before, name)) != now:
                raise ConfigError(
                    f"{path} was begun with --{name} {was}, this run has {now}, whose answers differ: give --{name} "
                    f"{was}, or choose another path (if both mean the same, delete {made_with_path(path)})"
                )

    def keep(self, path: Path) -> None:
        """Write it beside the answers in `path`. Raises ResourceError."""
        file = made_with_path(path)
        try:
            file.write_text(json.dumps(asdict(self)) + "\n", "utf-8")
        except OSError as error:
            raise ResourceError(f"cannot write {file}: {error.strerror or error}; make room") from error


def made_with_path(answers: Path) -> Path:
    """The file beside a file of answers that says what they were made with."""
    return answers.with_name(f"{answers.name}.made-with")


def open_answers(path: Path, resume: bool, retry_errors: bool) -> BatchOutput:
    """The files of answers and of errors. Raises ConfigError if they exist and are not to be added to."""
    then = ", then go on with --resume"
    output = BatchOutput(AnswerFile(path, then), AnswerFile(errors_path(path), then))
    if path.stem.endswith(".errors"):
        raise ConfigError(f"{path.name} is the name of a file of errors: choose another one for the answers")
    if retry_errors and not resume:
        raise ConfigError("--retry-errors goes together with --resume: give both, or neither")
    there = [file.path for file in (output.answers, output.errors) if file.path.exists()]
    if there and not resume:
        raise ConfigError(f"{there[0]} is there: --resume goes on with it; else delete it or choose another path")
    output.resume()
    if retry_errors:
        output.errors.ids.clear()
    return output
