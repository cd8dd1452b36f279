"""Reads the harmony format of gpt-oss: messages in channels, of which an answer has several.

Knows: headers and channels. analysis is reasoning, a message to functions.NAME a call, everything else text. Does not
know: tokens, requests. An answer begins behind "<|start|>assistant", which the prompt ends with. What does not begin
like a header is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.server.call_readers import CallPiece, Parsed, ToolParser
from forerun.server.reasoning import held_back

MESSAGE = "<|message|>"
FINAL = "<|channel|>final"  # begins the header of the answer proper, which MESSAGE ends
MAX_HEADER = 200  # characters; nothing longer is a header
_CHANNELS = ("", "analysis", "commentary", "final")
_FUNCTION = "functions."
_GAP = "\n\n"  # between two messages of one kind
_STARTS = ("<|start|>", "<|channel|>", "to=", MESSAGE)
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")  # a header needs no end before it
_HEADER = re.compile(  # of a header with single blanks
    r"(?:<\|start\|>assistant)? ?(?:to=([^ <]+))? ?"
    r"(?:<\|channel\|>(\w*) ?(?:to=([^ <]+))?)? ?(?:<\|constrain\|>)? ?\w*"
)


@dataclass(slots=True)
class Harmony:
    """Reads one output. `inner` reads the answer proper; without `reads_calls` calls are text, too."""

    inner: ToolParser
    reads_calls: bool
    _held: str = ""
    _in_header: bool = True
    _channel: str = ""  # of the message that is being read
    _call: str | None = None  # its function
    _gap: str = ""  # to be written before the message's text
    _has_arguments: bool = False
    _has_reasoned: bool = False
    _has_said: bool = False
    _has_called: bool = False

    def feed(self, text: str) -> Parsed:
        """What is certain now."""
        self._held += text
        parts: list[Parsed] = []
        while self._header(parts) if self._in_header else self._message(parts):
            pass
        return _joined(parts)

    def finish(self) -> Parsed:
        """What was held back; the beginning of a header is nothing. No call is forced where the model wrote one."""
        text, self._held = self._held, ""
        if self._in_header:
            text = "" if text.lstrip().startswith("<|") and _parsed(text) else text
            self._open("", "")
        parts = [self._said(text)] if text else []
        return _joined([*parts, self._ended(), Parsed() if self._has_called else self.inner.finish()])

    def _header(self, parts: list[Parsed]) -> bool:
        """Read a header if it is complete; returns whether there may be more to read."""
        begun = self._held.lstrip()
        if any(start.startswith(begun) and start != begun for start in _STARTS):
            return False
        at = self._held.find(MESSAGE, 0, MAX_HEADER + len(MESSAGE))
        if at < 0 and begun.startswith(_STARTS) and len(self._held) < MAX_HEADER + len(MESSAGE):
            return False
        self._in_header = False
        found = _parsed(self._held[:at]) if at >= 0 and begun.startswith(_STARTS) else None
        if found is None or (found[2] or "") not in _CHANNELS:
            self._open("", "")
            first, self._held = self._held[:1], self._held[1:]  # so that the mark it begins with is none
            parts.append(self._said(first))
            return True
        self._held = self._held[at + len(MESSAGE) :]
        parts.append(self._open(found[2] or "", found[1] or found[3] or ""))
        return True

    def _open(self, channel: str, recipient: str) -> Parsed:
        is_call = self.reads_calls and recipient.startswith(_FUNCTION)
        self._call = recipient.removeprefix(_FUNCTION) if is_call else None
        self._has_called |= is_call
        self._channel, self._has_arguments = channel, False
        self._gap = _GAP if (self._has_reasoned if channel == "analysis" else self._has_said) else ""
        return Parsed() if self._call is None else Parsed(calls=(CallPiece(self._call),))

    def _message(self, parts: list[Parsed]) -> bool:
        """Read a message's text up to its end, if that has come."""
        end = _END.search(self._held)
        keep = 0 if end else max(held_back(self._held, mark) for mark in _ENDS)
        until = end.start() if end else len(self._held) - keep
        text, self._held = self._held[:until], self._held[end.end() if end else until :]
        parts += [self._said(text)] if text else []
        if end is not None:
            parts.append(self._ended())
            self._in_header = True
        return end is not None

    def _said(self, text: str) -> Parsed:
        """Text of the message that is being read."""
        if self._call is not None:
            self._has_arguments = True
            return Parsed(calls=(CallPiece(None, text),))
        text, self._gap = self._gap + text, ""
        if self._channel == "analysis":
            self._has_reasoned = True
            return Parsed(reasoning=text)
        self._has_said = True
        return Parsed(text) if self._channel == "commentary" else self.inner.feed(text)

    def _ended(self) -> Parsed:
        """The message is over; a call needs arguments."""
        is_bare = self._call is not None and not self._has_arguments
        self._call = None
        return Parsed(calls=(CallPiece(None, "{}"),)) if is_bare else Parsed()


def _parsed(header: str) -> re.Match[str] | None:
    """Groups 1 and 3: the recipient; 2: the channel."""
    return _HEADER.fullmatch(" ".join(header.split()))


def _joined(parts: list[Parsed]) -> Parsed:
    return Parsed(
        "".join(part.content for part in parts),
        tuple(piece for part in parts for piece in part.calls),
        "".join(part.reasoning for part in parts),
    )
