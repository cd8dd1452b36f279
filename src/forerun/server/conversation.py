"""From a chat request to a prompt: messages, tools and the model's template.

Knows: OpenAI's messages and what chat templates expect of them. Does not know: sampling, answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forerun.server.errors import ApiError, unsupported
from forerun.server.schema import ChatBody, ContentPart, Message, Tool
from forerun.server.tools import describe_tools
from forerun.weights.tokenizer import Tokenizer

MAX_MESSAGES = 4096
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "self", "template")


def render(tokenizer: Tokenizer, body: ChatBody, tools: Sequence[Tool]) -> str:
    """The prompt's text. Raises PromptError or ApiError 400."""
    if len(body.messages) > MAX_MESSAGES:
        raise ApiError(400, f"{len(body.messages)} messages; the most is {MAX_MESSAGES}", param="messages")
    template = tokenizer.chat_template or ""
    messages = [_message(message, index, template) for index, message in enumerate(body.messages)]
    variables = _variables(body, template)
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    if listed and "tools" in template:
        variables["tools"] = listed
    elif listed:
        messages = _with_system(messages, describe_tools(listed))
    add_prompt = body.add_generation_prompt is not False
    return tokenizer.apply_chat_template(messages, add_prompt, **variables)


def _variables(body: ChatBody, template: str) -> dict[str, Any]:
    """What the request hands to the template besides messages and tools."""
    variables = dict(body.chat_template_kwargs or {})
    own = [name for name in variables if name in OWN_VARIABLES]
    if own:
        raise ApiError(400, f"chat_template_kwargs may not set {own[0]!r}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in template:
            raise unsupported("reasoning_effort", "this model's chat template knows no reasoning_effort: leave it out")
        variables["reasoning_effort"] = body.reasoning_effort
    return variables


def _message(message: Message, index: int, template: str) -> dict[str, Any]:
    """A message as templates want it: plain text, call arguments as objects, no empty fields."""
    refused = [name for name in ("audio", "function_call") if getattr(message, name) is not None]
    if refused:
        raise unsupported("messages", f"messages.{index}.{refused[0]} is not supported")
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    made: dict[str, Any] = {"role": role, "content": _text(message, index)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]  # fmt: skip
    return made


def _text(message: Message, index: int) -> str:
    if message.content is None:
        if message.role in ("assistant", "tool"):
            return message.refusal or ""
        raise ApiError(400, f"messages.{index}.content is missing: give a text", param="messages")
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(part, index) for part in message.content)


def _part(part: ContentPart, index: int) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "refusal"):
        raise ApiError(400, f"messages.{index}: a part of type {part.type} has no {part.type}", param="messages")
    raise unsupported(
        "messages", f"messages.{index}: content of type {part.type[:40]!r} is not supported: this model reads text only"
    )


def _arguments(text: str) -> Any:
    """Templates write arguments as JSON themselves."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with `text` in its system message."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
