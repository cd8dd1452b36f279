"""One sample of a chat answer: its text becomes reasoning, content and calls, in the order in which they were written.

Knows: the message of OpenAI's chat answers, and the deltas of its stream. Does not know: requests, prompts, chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.server.call_readers import CallPiece, OutputPiece, Prose, ToolParser
from forerun.server.reasoning import ReasoningSplitter
from forerun.server.streams import Delta
from forerun.server.tools import call_id
from forerun.weights.tokenizer import Tokenizer


@dataclass(slots=True)
class ChatChoice:
    """One sample's answer as it grows."""

    index: int
    splitter: ReasoningSplitter | None
    parser: ToolParser
    style: str
    num_before: int  # calls of the conversation so far
    only_one_call: bool
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0  # including calls that are left out
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Read new text -> the message's changes as the deltas of a stream, in order.

        A call begins with {index, id, type, function: {name, arguments: ""}}; deltas with {index, function:
        {arguments}} continue it with the next characters of the arguments as the model wrote them.
        """
        pieces = self._read(*self._split(delta.text)) if delta.text else []
        if delta.finish_reason is not None:
            rest = self._read(*self.splitter.finish()) if self.splitter else []
            pieces += [*rest, *self.parser.finish()]
        new = self._add(pieces)
        if delta.finish_reason is not None:
            ended_well = self.calls and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if ended_well else delta.finish_reason
        return new

    def _split(self, text: str) -> tuple[str, str]:
        return self.splitter.feed(text) if self.splitter else ("", text)

    def _read(self, reasoning: str, content: str) -> list[OutputPiece]:
        thought = [Prose(reasoning, is_reasoning=True)] if reasoning else []
        return [*thought, *(self.parser.feed(content) if content else ())]

    def _add(self, pieces: list[OutputPiece]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, CallPiece):
                made += ({"tool_calls": [call]} for call in self._add_call(piece))
                continue
            if piece.is_reasoning:
                self.reasoning += piece.text
            else:
                self.content += piece.text
            name = "reasoning_content" if piece.is_reasoning else "content"
            if made and name in made[-1]:
                made[-1][name] += piece.text
            else:
                made.append({name: piece.text})
        return made

    def _add_call(self, piece: CallPiece) -> list[dict[str, Any]]:
        """The deltas of a piece of a call; none if only one call is allowed and this is another."""
        made: list[dict[str, Any]] = []
        self.num_calls += piece.name is not None
        if self.only_one_call and self.num_calls > 1:
            return made
        index = self.num_calls - 1
        if piece.name is not None:
            opening = {"id": call_id(self.style, piece.name, self.num_before + index), "type": "function"}
            self.calls.append({**opening, "function": {"name": piece.name, "arguments": ""}})
            made.append({"index": index, **opening, "function": {"name": piece.name, "arguments": ""}})
        if piece.arguments:
            self.calls[index]["function"]["arguments"] += piece.arguments
            made.append({"index": index, "function": {"arguments": piece.arguments}})
        return made

    def num_reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens up to the one that ends the thinking, or all; without such a token, those of the reasoning's text."""
        end = tokenizer.token_id(self.splitter.end) if self.splitter and self.reasoning else None
        if end is None:
            return len(tokenizer.encode(self.reasoning, add_special_tokens=False)) if self.reasoning else 0
        return self.token_ids.index(end) + 1 if end in self.token_ids else len(self.token_ids)

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message
