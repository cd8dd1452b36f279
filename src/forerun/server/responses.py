"""POST /v1/responses: converts to a chat request, and its answer to the events of OpenAI's Responses API.

Knows: the response object and the order of its events. Does not know: prompts, sampling, the engine; chat.py does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import count
from time import time
from typing import Any

from forerun.server.chat import ChatJob
from forerun.server.context import ServerContext, dropped_fields
from forerun.server.errors import ApiError, unsupported
from forerun.server.generation import Generation, broken_off
from forerun.server.pieces import Pieces
from forerun.server.responses_input import FIELD_NAMES, ITEMS, chat_body, check_fields
from forerun.server.responses_output import Event, Output, new_id
from forerun.server.responses_schema import Item, ItemReference, MessageItem, ResponsesBody
from forerun.server.responses_store import ResponseStore
from forerun.server.schema import StreamOptions

SAID_BACK = {"text", "reasoning", "tools", "tool_choice", "safety_identifier", "prompt_cache_key"}
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # others: server_error


class ResponseJob:
    """One request, checked: what to generate, and how to answer."""

    def __init__(self, context: ServerContext, store: ResponseStore, body: ResponsesBody) -> None:
        """Raises ApiError or PromptError for whatever is wrong with the request. Takes a while: not for event loops."""
        check_fields(body)
        if body.store and not store.keeps:
            raise unsupported("store", "store: this server keeps no responses: leave it out")
        self._store = store if body.store is not False and store.keeps else None
        items = _items(body, store)
        chat = chat_body(body, items)
        chat.stream, chat.stream_options = True, StreamOptions(include_usage=True)
        try:
            self._chat = ChatJob(context, chat, dropped_fields(body))
        except ApiError as error:
            raise error.renamed(FIELD_NAMES) from error
        keeps = self._store is not None  # after the checks, so that a conversation that is too long is not stored
        self._items = ITEMS.dump_json(items, by_alias=True, exclude_none=True) if keeps else b""
        self.groups, self.constrained = self._chat.groups, self._chat.constrained
        self.grammar_s = self._chat.grammar_s
        self._pieces = Pieces(context.end_of_reasoning)
        self._output = Output(body.reasoning is not None and _wants_summary(body))
        self._finish_reason: str | None = None
        self._response = _begun(context, body, self._store is not None)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The response in one piece."""
        async for _ in self._events(generation):
            pass
        return self._response

    async def chunks(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """The response in events; a failure is the last of them."""
        numbers = count()
        try:
            async for event in self._events(generation):
                yield {**event, "sequence_number": next(numbers)}
        except Exception as error:
            yield {**self._failed(broken_off(error)), "sequence_number": next(numbers)}

    async def _events(self, generation: Generation) -> AsyncGenerator[Event, None]:
        yield self._lifecycle("created")
        yield self._lifecycle("in_progress")
        async for chunk in self._chat.chunks(generation):
            for event in self._take(chunk):
                yield event
        for event in self._end():
            yield event

    def _take(self, chunk: dict[str, Any]) -> Iterator[Event]:
        for choice in chunk["choices"]:
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            for piece in self._pieces.take(choice):
                yield from self._output.take(piece)
        if chunk.get("usage"):
            self._response["usage"], self._response["forerun"] = usage(chunk["usage"]), chunk["forerun"]

    def _end(self) -> Iterator[Event]:
        for piece in self._pieces.finish():
            yield from self._output.take(piece)
        status = "incomplete" if self._finish_reason == "length" else "completed"
        yield from self._output.close(status)
        self._response |= {"status": status, "output": self._output.items, "completed_at": int(time())}
        if status == "incomplete":
            self._response |= {"incomplete_details": {"reason": "max_output_tokens"}, "completed_at": None}
        if self._store is not None:
            self._store.add(self._response, self._items)
        yield self._lifecycle(status)

    def _failed(self, error: ApiError) -> Event:
        code = FAILURE_CODES.get(error.status_code, "server_error")
        told = {"code": code, "message": error.message}
        self._response |= {"status": "failed", "error": told, "output": self._output.items}
        return self._lifecycle("failed")

    def _lifecycle(self, kind: str) -> Event:
        return {"type": f"response.{kind}", "response": {**self._response}}


def usage(given: dict[str, Any]) -> dict[str, Any]:
    """The usage of a chat completion in this API's fields."""
    return {
        "input_tokens": given["prompt_tokens"],
        "input_tokens_details": {
            **given["prompt_tokens_details"],
            "cache_write_tokens": 0,
        },  # writing is free
        "output_tokens": given["completion_tokens"],
        "output_tokens_details": given["completion_tokens_details"],
        "total_tokens": given["total_tokens"],
    }


def _items(body: ResponsesBody, store: ResponseStore) -> list[Item]:
    """The whole conversation: what came before, and what is new, references looked up."""
    given: list[Item] = _as_items(body.input)
    found = _looked_up(given, store)
    if body.previous_response_id is None:
        if not found:
            raise ApiError(400, "input is missing: give a text or items", param="input")
        return found
    before = store.conversation(body.previous_response_id)
    if before is None:
        message = f"previous_response_id: there is no response {body.previous_response_id[:100]!r} here (any more)"
        raise ApiError(
            400, f"{message}: send the whole conversation as input", param="previous_response_id",
            code="previous_response_not_found",
        )  # fmt: skip
    return [*ITEMS.validate_python(before), *found]


def _as_items(given: str | list[Item] | None) -> list[Item]:
    return [MessageItem(role="user", content=given)] if isinstance(given, str) else given or []


def _looked_up(given: list[Item], store: ResponseStore) -> list[Item]:
    """The items with references replaced from the store. Each may occur once: a reference costs few bytes to send."""
    names = [item.id for item in given if isinstance(item, ItemReference)]
    if len(set(names)) < len(names):
        raise ApiError(400, "input: an item is referenced twice: send it again as an item", param="input")
    known = store.items(set(names))
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise ApiError(
            404, f"input: there is no item {missing[:100]!r} here (any more): send the item itself", param="input",
            code="item_not_found",
        )  # fmt: skip
    found = iter(ITEMS.validate_python([known[name] for name in names]))
    return [next(found) if isinstance(item, ItemReference) else item for item in given]


def _wants_summary(body: ResponsesBody) -> bool:
    asked = body.reasoning and (body.reasoning.summary or body.reasoning.generate_summary)
    return asked is not None


def _begun(context: ServerContext, body: ResponsesBody, stored: bool) -> dict[str, Any]:
    """The response before anything is written: it repeats the request's fields."""
    given = body.model_dump(mode="json", include=SAID_BACK, by_alias=True, exclude_unset=True)
    text = {"format": {"type": "text"}, **(given.get("text") or {})}
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": context.name_of(body),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(given.get("reasoning") or {})},
        "store": stored,
        "temperature": body.temperature,
        "text": text,
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": [{"strict": None, "parameters": None, **tool} for tool in given.get("tools") or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        **({} if body.service_tier is None else {"service_tier": "default"}),
        **{name: given[name] for name in ("safety_identifier", "prompt_cache_key") if name in given},
    }
