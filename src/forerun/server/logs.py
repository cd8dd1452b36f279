"""The server's log: one line per event, as JSON or as text, with the request's id.

Knows: formats. Does not know: what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, event, and whatever fields the event has."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _printable(json.dumps(entry, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """The same fields as text for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and a traceback below it where there is one."""
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {name}={_word(str(value))}" for name, value in _fields(record).items())
        line = f"{when} {record.levelname.lower()} {_printable(record.getMessage())}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    # A name with an underscore is a library's: Ray adds _ray_timestamp_ns to every record.
    return {
        name: value
        for name, value in vars(record).items()
        if value is not None and name not in _STANDARD and not name.startswith("_")
    }


def _word(value: str) -> str:
    """A field's value as one word: whatever could be taken for another field or line is quoted."""
    plain = value.isprintable() and not set(value) & set(' "=')
    return value if plain and value else _printable(json.dumps(value, ensure_ascii=False))


def _printable(text: str) -> str:
    """Escape line ends and control characters, which text from clients may hold."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] if ord(c) != 0x7F else "\\u007f" for c in text)


def configure(style: str, level: str) -> None:
    """Send forerun's log to standard error, `style` being json or text, and uvicorn's warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    quiet = level if level in ("debug", "error") else "warning"
    for name, least in (("forerun", level), ("uvicorn.error", quiet)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least.upper())
        logger.propagate = False
