"""POST /v1/messages: converts to a chat request, and its answer to the events of Anthropic's Messages API.

Knows: the message object and the order of its events. Does not know: prompts, sampling, the engine; chat.py does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any
from uuid import uuid4

from forerun.server.call_readers import read_json
from forerun.server.chat import ChatJob, usable_tools
from forerun.server.context import ServerContext, dropped_fields
from forerun.server.conversation import render
from forerun.server.errors import ApiError, anthropic_body
from forerun.server.generation import Generation, broken_off
from forerun.server.messages_input import FIELD_NAMES, chat_body
from forerun.server.messages_schema import CountTokensBody, MessagesBody
from forerun.server.pieces import Pieces, TextPiece
from forerun.server.schema import ChatBody, StreamOptions

Event = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageJob:
    """One request, checked: what to generate, and how to answer."""

    def __init__(self, context: ServerContext, body: MessagesBody) -> None:
        """Raises ApiError or PromptError for whatever is wrong with the request. Takes a while: not for event loops."""
        chat = _chat_body(context, body)
        chat.model, chat.stream, chat.stream_options = body.model, True, StreamOptions(include_usage=True)
        try:
            self._chat = ChatJob(context, chat, dropped_fields(body))
        except ApiError as error:
            raise error.renamed(FIELD_NAMES) from error
        self.groups, self.constrained = self._chat.groups, self._chat.constrained
        self.grammar_s = self._chat.grammar_s
        self._pieces = Pieces(None)
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the call being written
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": context.name_of(body),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._chat.num_prompt_tokens, "output_tokens": 0},
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The message in one piece."""
        async for _ in self._events(generation):
            pass
        return {**self._message, "content": self._blocks}

    async def chunks(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """The message in events; a failure is the last of them."""
        try:
            async for event in self._events(generation):
                yield event
        except Exception as error:
            yield anthropic_body(broken_off(error))

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        yield {"type": "message_start", "message": {**self._message}}
        async for chunk in self._chat.chunks(generation):
            for event in self._take(chunk):
                yield event
        for event in self._end():
            yield event

    def _take(self, chunk: dict[str, Any]) -> Iterator[Event]:
        for choice in chunk["choices"]:
            for piece in self._pieces.take(choice):
                yield from self._add(piece)
            if choice["finish_reason"] is not None:
                self._message |= _stop(choice["finish_reason"], choice["stop_reason"])
        if chunk.get("usage"):
            self._message |= {"usage": usage(chunk["usage"]), "forerun": chunk["forerun"]}

    def _add(self, piece: TextPiece) -> Iterator[Event]:
        if piece.begins:
            yield from self._close()
            self._blocks.append(_block(piece))
            yield self._event("content_block_start", content_block={**self._blocks[-1]})
        if not piece.text:
            return
        block = self._blocks[-1]
        match piece.kind:
            case "text":
                block["text"] += piece.text
                yield self._event("content_block_delta", delta={"type": "text_delta", "text": piece.text})
            case "reasoning":
                block["thinking"] += piece.text
                yield self._event("content_block_delta", delta={"type": "thinking_delta", "thinking": piece.text})
            case "call":
                self._arguments += piece.text
                yield self._event("content_block_delta", delta={"type": "input_json_delta", "partial_json": piece.text})

    def _close(self) -> Iterator[Event]:
        if not self._blocks:
            return
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _input(self._arguments)
            self._arguments = ""
        yield self._event("content_block_stop")

    def _end(self) -> Iterator[Event]:
        yield from self._close()
        ends = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        told = {name: self._message[name] for name in ("usage", "forerun")}
        yield {"type": "message_delta", "delta": ends, **told}
        yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def count_tokens(context: ServerContext, body: CountTokensBody) -> dict[str, Any]:
    """How many tokens the prompt of such a request has. Raises ApiError or PromptError as the request would."""
    chat = _chat_body(context, body)
    try:
        text = render(context.tokenizer, chat, usable_tools(chat))
    except ApiError as error:
        raise error.renamed(FIELD_NAMES) from error
    return {"input_tokens": len(context.encode(text, add_special_tokens=False))}


def usage(given: dict[str, Any]) -> dict[str, Any]:
    """The usage of a chat completion in this API's fields, which count cached tokens separately."""
    cached = given["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": given["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": given["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": given["completion_tokens_details"]["reasoning_tokens"]},
    }


def _chat_body(context: ServerContext, body: CountTokensBody) -> ChatBody:
    lists_tools = body.tools and (body.tool_choice is None or body.tool_choice.type != "none")
    template = context.tokenizer.tool_template if lists_tools else context.tokenizer.chat_template
    return chat_body(body, template or "", context.thinks)


def _stop(finish_reason: str, stop_reason: int | str | None) -> dict[str, Any]:
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": STOP_REASONS.get(finish_reason, finish_reason)}


def _block(piece: TextPiece) -> dict[str, Any]:
    match piece.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}  # nothing is signed here
    return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": {}}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; text that is cut off or not JSON is kept under INVALID_JSON, as Anthropic documents."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
