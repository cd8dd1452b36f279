"""The items of a response as they grow, and the events that report it.

Knows: OpenAI's output items and their events. Does not know: requests, usage, where pieces come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from uuid import uuid4

from forerun.server.pieces import TextPiece

Event = dict[str, Any]


class _Form(NamedTuple):
    """The field in which an item keeps its text, and the names of its events."""

    field: str
    part_type: str
    text_event: str
    part_event: str
    index_name: str


_FORMS = {
    "text": _Form("content", "output_text", "output_text", "content_part", "content_index"),
    "reasoning": _Form("content", "reasoning_text", "reasoning_text", "content_part", "content_index"),
    "summary": _Form("summary", "summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary_index"),
}


class Output:
    """The items of one response, and their events."""

    def __init__(self, summarized: bool) -> None:
        """`summarized`: reasoning is written as `summary` (the whole of it), not as `content`."""
        self.items: list[dict[str, Any]] = []
        self._summarized = summarized
        self._form: _Form | None = None  # of the item being written; calls have none
        self._is_open = False

    def take(self, piece: TextPiece) -> Iterator[Event]:
        """The events of a piece."""
        if piece.begins:
            yield from self.close("completed")
            yield from self._begin(piece)
        if self._form is None:
            self._item["arguments"] += piece.text
            if piece.text:
                yield self._event("function_call_arguments.delta", delta=piece.text)
        elif piece.text or piece.logprobs:
            part = self._part(self._form)
            part["text"] += piece.text
            logprobs: dict[str, Any] = {}
            if piece.kind == "text":
                part["logprobs"] += piece.logprobs
                logprobs = {"logprobs": list(piece.logprobs)}
            yield self._text_event(self._form, f"{self._form.text_event}.delta", delta=piece.text, **logprobs)

    def close(self, status: str) -> Iterator[Event]:
        """The events that end the item being written, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item, form = self._item, self._form
        item["status"] = status
        if form is None:
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = self._part(form)
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._text_event(form, f"{form.text_event}.done", text=part["text"], **logprobs)
            yield self._text_event(form, f"{form.part_event}.done", part=part)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def _begin(self, piece: TextPiece) -> Iterator[Event]:
        self._is_open = True
        self._form = None if piece.kind == "call" else _FORMS[self._form_name(piece)]
        item = _new_item(piece)
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": _copy(item)}
        if self._form is not None:
            part: dict[str, Any] = {"type": self._form.part_type, "text": ""}
            part |= {"annotations": [], "logprobs": []} if piece.kind == "text" else {}
            item[self._form.field] = [part]
            yield self._text_event(self._form, f"{self._form.part_event}.added", part=_copy(part))

    def _form_name(self, piece: TextPiece) -> str:
        return "summary" if piece.kind == "reasoning" and self._summarized else piece.kind

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    @property
    def _item(self) -> dict[str, Any]:
        return self.items[-1]

    def _part(self, form: _Form) -> dict[str, Any]:
        part: dict[str, Any] = self._item[form.field][0]
        return part

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._item["id"], "output_index": self._index, **fields}

    def _text_event(self, form: _Form, kind: str, **fields: Any) -> Event:
        return self._event(kind, **{form.index_name: 0}, **fields)


def _new_item(piece: TextPiece) -> dict[str, Any]:
    begun = {"status": "in_progress"}
    if piece.kind == "call":
        names = {"call_id": piece.call_id, "name": piece.name, "arguments": ""}
        return {"id": new_id("fc"), "type": "function_call", **begun, **names}
    if piece.kind == "text":
        return {"id": new_id("msg"), "type": "message", **begun, "role": "assistant", "content": []}
    return {"id": new_id("rs"), "type": "reasoning", **begun, "summary": []}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """A copy that does not change while the item grows."""
    return {name: list(field) if isinstance(field, list) else field for name, field in value.items()}


def new_id(prefix: str) -> str:
    """A random id that cannot be guessed."""
    return f"{prefix}_{uuid4().hex}"
