"""From a /v1/responses request to the chat request that means the same.

Knows: items and how they make up the messages of a conversation. Does not know: answers, the store, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from forerun.server.errors import ApiError, unsupported
from forerun.server.responses_schema import (
    INCLUDED,
    INSTEAD,
    LOGPROBS,
    NOT_SERVED,
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    FunctionTool,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
    TextPart,
)
from forerun.server.schema import (
    MAX_MESSAGES,
    CalledFunction,
    ChatBody,
    ContentPart,
    FunctionDefinition,
    JsonSchema,
    Message,
    MessageToolCall,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    Unserved,
    check_served,
    shared_fields,
)

ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
FIELD_NAMES = {  # chat completions' field -> this API's, for error messages
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


def check_fields(body: ResponsesBody) -> None:
    """Raise ApiError 400 for what is known but not served."""
    check_served(body, NOT_SERVED, INSTEAD)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options", "stream_options.include_obfuscation is not supported: leave it out")
    for name in body.include or ():
        if name not in INCLUDED:
            listed = ", ".join(INCLUDED)
            raise unsupported("include", f"include: {name[:60]!r} is not had here; there is {listed}")


def chat_body(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """The chat request for a conversation of `items`. Raises ApiError 400 for items and tools that are not served."""
    messages = messages_of(items, body.instructions)
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"the conversation has {len(messages)} messages, those before it and the instructions "
                            f"included; the most is {MAX_MESSAGES}: leave old ones out", param="input")  # fmt: skip
    given: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "tools": [_tool(tool, index) for index, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format) if body.text and body.text.format else None,
        "verbosity": body.text.verbosity if body.text else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        **logprobs_fields(body),
    }
    return ChatBody(**shared_fields(body), **{name: value for name, value in given.items() if value is not None})


def logprobs_fields(body: ResponsesBody) -> dict[str, Any]:
    """Whether log-probabilities are asked for, and of how many tokens."""
    if LOGPROBS not in (body.include or ()) and body.top_logprobs is None:
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}


def _tool(tool: FunctionTool | Unserved, index: int) -> Tool:
    if isinstance(tool, Unserved):
        raise unsupported(
            "tools",
            f"tools.{index}: tools of type {tool.type[:40]!r} are not served here: only functions",
        )
    definition = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=definition)


def _tool_choice(body: ResponsesBody) -> Any:
    choice = body.tool_choice
    if isinstance(choice, Unserved):
        raise unsupported(
            "tool_choice", f"tool_choice of type {choice.type[:40]!r} is not supported here: name a function"
        )
    if isinstance(choice, FunctionChoice):
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema_ is None:
        raise ApiError(400, "text.format of type json_schema needs a schema", param="text.format")
    schema = JsonSchema(
        name=form.name or "output", description=form.description, schema=form.schema_, strict=form.strict
    )
    return ResponseFormat(type="json_schema", json_schema=schema)


# -- items --------------------------------------------------------------------------------------------------------


def messages_of(items: Sequence[Item], instructions: str | None) -> list[Message]:
    """The messages that `items` make up: reasoning, text and calls of one turn of the model are one message."""
    turns = _Turns([] if instructions is None else [Message(role="system", content=instructions)])
    for index, item in enumerate(items):
        match item:
            case MessageItem(role="assistant"):
                turns.say(_said(item.content, index))
            case MessageItem():
                turns.messages.append(Message(role=item.role, content=_content(item.content, index)))
            case FunctionCallItem():
                turns.call(item)
            case FunctionOutputItem():
                output = _content(item.output, index)
                turns.messages.append(Message(role="tool", tool_call_id=item.call_id, content=output))
            case ReasoningItem():
                turns.think(_thought(item, index))
            case _:
                raise unsupported("input", f"input.{index}: items of type {item.type[:40]!r} are not supported here")
    return turns.messages


class _Turns:
    """Messages of a conversation; items of one model turn are added to its last message."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    @property
    def _last(self) -> Message | None:
        """The last message if it is the model's."""
        return self.messages[-1] if self.messages and self.messages[-1].role == "assistant" else None

    def _begin(self) -> Message:
        self.messages.append(Message(role="assistant"))
        return self.messages[-1]

    def think(self, text: str) -> None:
        """Reasoning begins a turn."""
        last = self._last
        if last is None or last.content is not None or last.tool_calls:
            last = self._begin()
        last.reasoning_content = (last.reasoning_content or "") + text

    def say(self, text: str) -> None:
        """Text begins a turn unless reasoning came before it, or calls that have not returned."""
        last = self._last
        if last is None or (last.content is not None and not last.tool_calls):
            last = self._begin()
        last.content = text if last.content is None else f"{last.content}{text}"

    def call(self, item: FunctionCallItem) -> None:
        """A call belongs to the model's last message."""
        last = self._last or self._begin()
        function = CalledFunction(name=item.name, arguments=item.arguments)
        last.tool_calls = [*(last.tool_calls or ()), MessageToolCall(id=item.call_id, function=function)]


def _content(content: str | list[Part], index: int) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [ContentPart(type="text", text=_part_text(part, index)) for part in content]


def _said(content: str | list[Part], index: int) -> str:
    return content if isinstance(content, str) else "".join(_part_text(part, index) for part in content)


def _part_text(part: Part, index: int) -> str:
    if isinstance(part, Unserved):
        raise unsupported(
            "input", f"input.{index}: content of type {part.type[:40]!r} is not supported: this model reads text only"
        )
    return part.text if isinstance(part, TextPart) else part.refusal


def _thought(item: ReasoningItem, index: int) -> str:
    if item.encrypted_content:
        raise unsupported(
            "input", f"input.{index}: encrypted reasoning cannot be read here: send its content, or leave the item out"
        )
    return "".join(part.text for part in item.content or item.summary or ())
