"""Server-sent events as OpenAI-compatible servers send them: bytes in, pieces of an answer out.

Knows: the event stream format (WHATWG HTML, 9.2.6), chunks of chat and text completions, errors inside a stream. Does
not know: HTTP, clocks, what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forerun.errors import ForerunError

MAX_EVENT_BYTES: Final = 16 << 20
BOM: Final = b"\xef\xbb\xbf"
DONE: Final = "[DONE]"
MAX_SHOWN: Final = 200  # characters of an answer shown in a message
TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "refusal")


class AnswerError(ForerunError):
    """A server answered with an error or not at all; `kind` is the category it is counted in."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class EventParser:
    """Cuts a stream into the data of its events, wherever its bytes were split."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # lines of the unfinished event
        self._num_bytes = 0  # of the unfinished event
        self._after_cr = False  # a line feed now belongs to the line end before it
        self._begun = False

    def feed(self, piece: bytes) -> list[str]:
        """The next bytes -> the data of the events that ended in them.

        Raises AnswerError for an event that is not UTF-8 or has more than MAX_EVENT_BYTES.
        """
        if not piece:
            return []
        fresh = piece.removeprefix(b"\n") if self._after_cr else piece
        self._after_cr = piece.endswith(b"\r")
        self._check_size(len(fresh))
        lines = (self._rest + fresh).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        return [data for line in lines if (data := self._line(line)) is not None]

    def _check_size(self, num_more: int) -> None:
        self._num_bytes += num_more
        if self._num_bytes > MAX_EVENT_BYTES + num_more:  # a piece may bring many small events at once
            raise AnswerError("bad answer", f"an event of more than {MAX_EVENT_BYTES} bytes")

    def _line(self, line: bytes) -> str | None:
        """Read one line; the event's data if it ends one that has any."""
        line = line if self._begun else line.removeprefix(BOM)
        self._begun = True
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        lines, self._data, self._num_bytes = self._data, [], 0
        return _decoded(b"\n".join(lines)) if lines else None


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AnswerError("bad answer", f"an event is not UTF-8: {error.reason}") from error


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """One event's part of an answer."""

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    num_steps: int | None  # passes of the target, where forerun serves


def read_piece(data: str) -> StreamPiece:
    """Read the data of an event. Raises AnswerError for an error, or for anything but a chunk."""
    chunk = _object(data)
    if chunk.get("error"):
        raise AnswerError("error in the stream", error_message(chunk))
    try:
        choice = (chunk.get("choices") or [{}])[0]
        steps = (chunk.get("forerun") or {}).get("num_steps")
        return StreamPiece(_text(choice), choice.get("finish_reason"), dict(chunk.get("usage") or {}) or None, steps)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise AnswerError("bad answer", f"an event is no chunk of an answer: {data[:MAX_SHOWN]}") from error


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnswerError("bad answer", f"an event is not JSON: {data[:MAX_SHOWN]}") from error
    if not isinstance(value, dict):
        raise AnswerError("bad answer", f"an event is not a JSON object: {data[:MAX_SHOWN]}")
    return value


def _text(choice: Mapping[str, Any]) -> str:
    """All text of a chunk's choice: answer, reasoning and calls of tools."""
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), *(delta.get(name) for name in TEXT_FIELDS)]
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    parts += [call.get(name) for call in calls for name in ("name", "arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def error_message(body: Mapping[str, Any]) -> str:
    """The message of an error body in OpenAI's form, or of one like it."""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or body)[:MAX_SHOWN]
