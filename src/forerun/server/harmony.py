"""Reads the harmony format of gpt-oss: messages in channels, of which an answer has several.

Knows: headers and channels. analysis is reasoning, a message to functions.NAME a call, everything else text. Does not
know: tokens, requests. An answer begins behind "<|start|>assistant", which the prompt ends with. What does not begin
like a header is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.server.call_readers import CallPiece, OutputPiece, Prose, ToolParser, prose
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

    def feed(self, text: str) -> list[OutputPiece]:
        """What is certain now."""
        self._held += text
        pieces: list[OutputPiece] = []
        while self._header(pieces) if self._in_header else self._message(pieces):
            pass
        return pieces

    def finish(self) -> list[OutputPiece]:
        """What was held back; the beginning of a header is nothing. No call is forced where the model wrote one."""
        text, self._held = self._held, ""
        if self._in_header:
            text = "" if text.lstrip().startswith("<|") and _parsed(text) else text
            self._open("", "")
        pieces = [*(self._said(text) if text else ()), *self._ended()]
        return pieces if self._has_called else [*pieces, *self.inner.finish()]

    def _header(self, pieces: list[OutputPiece]) -> bool:
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
            pieces += self._said(first)
            return True
        self._held = self._held[at + len(MESSAGE) :]
        pieces += self._open(found[2] or "", found[1] or found[3] or "")
        return True

    def _open(self, channel: str, recipient: str) -> list[OutputPiece]:
        is_call = self.reads_calls and recipient.startswith(_FUNCTION)
        self._call = recipient.removeprefix(_FUNCTION) if is_call else None
        self._has_called |= is_call
        self._channel, self._has_arguments = channel, False
        self._gap = _GAP if (self._has_reasoned if channel == "analysis" else self._has_said) else ""
        return [] if self._call is None else [CallPiece(self._call)]

    def _message(self, pieces: list[OutputPiece]) -> bool:
        """Read a message's text up to its end, if that has come."""
        end = _END.search(self._held)
        keep = 0 if end else max(held_back(self._held, mark) for mark in _ENDS)
        until = end.start() if end else len(self._held) - keep
        text, self._held = self._held[:until], self._held[end.end() if end else until :]
        pieces += self._said(text) if text else []
        if end is not None:
            pieces += self._ended()
            self._in_header = True
        return end is not None

    def _said(self, text: str) -> list[OutputPiece]:
        """Text of the message that is being read."""
        if self._call is not None:
            self._has_arguments = True
            return [CallPiece(None, text)]
        text, self._gap = self._gap + text, ""
        if self._channel == "analysis":
            self._has_reasoned = True
            return [Prose(text, is_reasoning=True)]
        self._has_said = True
        return prose(text) if self._channel == "commentary" else self.inner.feed(text)

    def _ended(self) -> list[OutputPiece]:
        """The message is over; a call needs arguments."""
        is_bare = self._call is not None and not self._has_arguments
        self._call = None
        return [CallPiece(None, "{}")] if is_bare else []


def _parsed(header: str) -> re.Match[str] | None:
    """Groups 1 and 3: the recipient; 2: the channel."""
    return _HEADER.fullmatch(" ".join(header.split()))
