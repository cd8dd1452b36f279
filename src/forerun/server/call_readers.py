"""Reads tool calls from text that arrives in pieces: the name as soon as it is certain, the arguments as they come.

Knows: how calls are written between a style's marks. Does not know: the marks, HTTP, tokens. A call is certain once its
name is complete and its arguments have begun; the arguments are passed on as the model wrote them. Text that is not a
call is kept as `rest`: nothing a model wrote is lost.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol


class CallPiece(NamedTuple):
    """New text of a call: a name begins the next call, None continues the last. `arguments` is a part of JSON."""

    name: str | None
    arguments: str = ""


class Prose(NamedTuple):
    """New text outside of calls."""

    text: str
    is_reasoning: bool = False  # in formats that have it between calls and text


OutputPiece = Prose | CallPiece


def prose(text: str) -> list[OutputPiece]:
    """The piece that a text is; none if it is empty."""
    return [Prose(text)] if text else []


class ToolParser(Protocol):
    """Reads one output piece by piece; what it finds keeps the order in which it was written."""

    def feed(self, text: str) -> list[OutputPiece]:
        """What is certain now."""

    def finish(self) -> list[OutputPiece]:
        """What was held back."""


class NoCalls:
    """Everything is content."""

    def feed(self, text: str) -> list[OutputPiece]:
        """The text as it is."""
        return prose(text)

    def finish(self) -> list[OutputPiece]:
        """Nothing was held back."""
        return []


class CallReader(Protocol):
    """Reads one stretch of text that should hold calls and nothing else."""

    rest: str | None  # text after which no calls follow; None while there may be more
    num_calls: int

    def feed(self, text: str) -> list[CallPiece]:
        """What is certain now."""

    def finish(self) -> list[CallPiece]:
        """The stretch is over; held back text that is not a call is in `rest`."""


class ReaderState(Enum):
    """What a reader is reading."""

    BETWEEN = "before a call"
    ARGUMENTS = "in the arguments of a call"
    AFTER = "behind the arguments, in the call's object"
    TAIL = "in further members of the call's object"


_HEADER = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_SEPARATORS = " \t\r\n;,[]"


@dataclass(slots=True)
class JsonEnd:
    """Finds where a JSON object or list ends."""

    depth: int = 0
    _in_string: bool = False
    _escaped: bool = False

    def find(self, text: str) -> int | None:
        """The index in `text` after the end; None if the end has not come yet."""
        for place, character in enumerate(text):
            if self._in_string:
                self._string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return place + 1
        return None

    def _string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        else:
            self._in_string = character != '"'


@dataclass(slots=True)
class JsonCalls:
    """Objects with `name` and `arguments` (or `parameters`), or lists of them, with blanks, "," or ";" between.

    `known`: the names that calls may have, where such an object may be an answer; None: any.
    """

    known: frozenset[str] | None = None
    rest: str | None = None
    num_calls: int = 0
    _held: str = ""
    _place: ReaderState = ReaderState.BETWEEN
    _end: JsonEnd = field(default_factory=JsonEnd)

    def feed(self, text: str) -> list[CallPiece]:
        """What is certain now."""
        if self.rest is not None:
            self.rest += text
            return []
        may_be_whole = "}" in text
        self._held += text
        pieces: list[CallPiece] = []
        while self.rest is None and self._advance(pieces, may_be_whole):
            pass
        return pieces

    def finish(self) -> list[CallPiece]:
        """No text follows; a call that was cut off stays as it is."""
        left = self._held if self._place is ReaderState.BETWEEN else ""
        if self.rest is None and (left.strip(_SEPARATORS) or not self.num_calls):
            self.rest = left
        return []

    def _advance(self, pieces: list[CallPiece], may_be_whole: bool) -> bool:
        """Read some of the held text; returns whether there may be more to read."""
        match self._place:
            case ReaderState.BETWEEN:
                return self._begin(pieces, may_be_whole)
            case ReaderState.ARGUMENTS:
                text = self._to_end(ReaderState.AFTER)
                pieces += [CallPiece(None, text)] if text else []
            case ReaderState.AFTER:
                return self._close()
            case ReaderState.TAIL:
                self._to_end(ReaderState.BETWEEN)
        return bool(self._held)

    def _begin(self, pieces: list[CallPiece], may_be_whole: bool) -> bool:
        body = self._held.lstrip(_SEPARATORS)
        if not body:
            return False
        header = _HEADER.match(body)
        if header is not None and (name := _name(header[1])) is not None:
            if not self._is_known(name):
                self._fail()
                return False
            self._held, self._place, self._end = body[header.end() :], ReaderState.ARGUMENTS, JsonEnd()
            pieces.append(self._opened(name))
            return True
        return self._whole(body, pieces) if body[0] == "{" and may_be_whole else self._stay(body)

    def _is_known(self, name: str) -> bool:
        return self.known is None or name in self.known

    def _stay(self, body: str) -> bool:
        """Wait for more text, unless no call begins like this."""
        if body[0] != "{":
            self._fail()
        return False

    def _whole(self, body: str, pieces: list[CallPiece]) -> bool:
        """A call written another way, such as without arguments: read when it is complete."""
        try:
            value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(body)
            call = _call(value)
        except (ValueError, RecursionError):
            return False
        if call is None or not self._is_known(call[0]):
            self._fail()
            return False
        pieces += [self._opened(call[0]), CallPiece(None, call[1])]
        self._held = body[end:]
        return True

    def _close(self) -> bool:
        body = self._held.lstrip()
        if body[:1] == "}":
            self._held, self._place = body[1:], ReaderState.BETWEEN
        elif body[:1] == ",":
            self._place, self._end = ReaderState.TAIL, JsonEnd(depth=1)
        elif body:
            self._fail()
        return bool(body)

    def _to_end(self, then: ReaderState) -> str:
        """Take the held text up to the end of what is being read."""
        end = self._end.find(self._held)
        text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if end is not None:
            self._place = then
        return text

    def _opened(self, name: str) -> CallPiece:
        self.num_calls += 1
        return CallPiece(name)

    def _fail(self) -> None:
        self.rest, self._held = self._held, ""


@dataclass(slots=True)
class MistralCalls:
    """A JSON list of calls, or since 2025 NAME[ARGS]{...}, the mark again before each further one."""

    mark: str
    rest: str | None = None
    num_calls: int = 0
    _held: str = ""
    _json: JsonCalls | None = None
    _end: JsonEnd | None = None  # in the arguments of a call

    def feed(self, text: str) -> list[CallPiece]:
        """What is certain now."""
        if self.rest is not None:
            self.rest += text
            return []
        self._held += text
        if self._json is None and not self.num_calls and self._held.lstrip()[:1] in ("[", "{"):
            self._json = JsonCalls()
        if self._json is not None:
            return self._delegated(self._json)
        pieces: list[CallPiece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def _delegated(self, reader: JsonCalls) -> list[CallPiece]:
        text, self._held = self._held, ""
        pieces = reader.feed(text)
        self.rest, self.num_calls = reader.rest, reader.num_calls
        return pieces

    def _advance(self, pieces: list[CallPiece]) -> bool:
        if self._end is not None:
            end = self._end.find(self._held)
            text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
            self._end = self._end if end is None else None
            pieces.append(CallPiece(None, text))
            return end is not None
        if self.num_calls and not self._next_mark():
            return False
        return self._begin(pieces)

    def _next_mark(self) -> bool:
        """Whether another call's mark follows; only a mark may follow a call. It is held until that call is certain."""
        body = self._held.lstrip()
        if not body.startswith(self.mark[: len(body)]):
            self.rest, self._held = self._held, ""
            return False
        return body.startswith(self.mark)

    def _begin(self, pieces: list[CallPiece]) -> bool:
        name, found, arguments = self._held.lstrip().removeprefix(self.mark).partition("[ARGS]")
        begun = arguments.lstrip()[:1]
        if found and begun == "{":
            self.num_calls += 1
            self._held, self._end = arguments.lstrip(), JsonEnd()
            pieces.append(CallPiece(name.partition("[CALL_ID]")[0].strip()))
            return True
        if begun:
            self.rest, self._held = self._held, ""
        return False

    def finish(self) -> list[CallPiece]:
        """No text follows."""
        if self._json is not None and self.rest is None:
            pieces = self._json.finish()
            self.rest = self._json.rest
            return pieces
        if self.rest is None and (self._held.strip() or not self.num_calls):
            self.rest = self._held
        return []


_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^<>{}\s]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_KIMI_END = "<|tool_call_end|>"


@dataclass(slots=True)
class KimiCalls:
    """Calls between marks of their own: functions.NAME:NUMBER, a mark, the arguments as a JSON object (Kimi K2)."""

    rest: str | None = None
    num_calls: int = 0
    _held: str = ""
    _end: JsonEnd | None = None  # in the arguments of a call
    _is_open: bool = False  # behind the arguments, before the call's end

    def feed(self, text: str) -> list[CallPiece]:
        """What is certain now."""
        if self.rest is not None:
            self.rest += text
            return []
        self._held += text
        pieces: list[CallPiece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def _advance(self, pieces: list[CallPiece]) -> bool:
        if self._end is not None:
            end = self._end.find(self._held)
            text, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
            self._end, self._is_open = (self._end, False) if end is None else (None, True)
            pieces.append(CallPiece(None, text))
            return end is not None
        return self._close() if self._is_open else self._begin(pieces)

    def _close(self) -> bool:
        body = self._held.lstrip()
        if not body.startswith(_KIMI_END[: len(body)]):
            self.rest, self._held = self._held, ""
        elif body.startswith(_KIMI_END):
            self._held, self._is_open = body.removeprefix(_KIMI_END), False
        return self.rest is None and not self._is_open

    def _begin(self, pieces: list[CallPiece]) -> bool:
        found = _KIMI_CALL.match(self._held)
        if found is None:
            return False
        self.num_calls += 1
        self._held, self._end = self._held[found.end() :], JsonEnd()
        pieces.append(CallPiece(found[1]))
        return True

    def finish(self) -> list[CallPiece]:
        """No text follows; a call that was cut off stays as it is."""
        if self.rest is None and (self._held.strip() or not self.num_calls):
            self.rest = self._held
        return []


def _call(value: Any) -> tuple[str, str] | None:
    """An object's name and arguments (or tool_name and parameters), else None; raises ValueError as `written_json`."""
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else written_json(arguments)
    f"{name}{text}".encode()
    return name, text


def written_json(value: Any) -> str:
    """JSON text; raises ValueError for what answers cannot hold: numbers that are not finite, lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def read_json(text: str) -> Any:
    """The value of JSON text a model wrote. Raises ValueError if it is not JSON that an answer can hold."""
    from pydantic_core import from_json  # of the extra `server`

    value = from_json(text, allow_inf_nan=False)
    written_json(value)
    return value


def _name(quoted: str) -> str | None:
    try:
        return str(read_json(quoted))
    except ValueError:
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
