"""From a chat request to a prompt: messages, tools and the model's template.

Knows: OpenAI's messages and what chat templates expect of them. Does not know: sampling, answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from forerun.errors import CheckpointError
from forerun.server.bodies import check_parts
from forerun.server.errors import ApiError, unsupported
from forerun.server.schema import TEMPLATE_FIELDS, CalledFunction, ChatBody, ContentPart, Message, Tool
from forerun.server.tools import describe_tools, takes_tools
from forerun.weights.tokenizer import Tokenizer

OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "self", "template", "chat_template")
GAP = "<forerun-goes-on-here> "  # ends the message to be continued; its space tells if the template strips
PART_KINDS = ("image_url", "input_audio", "video_url", "file")


def render(tokenizer: Tokenizer, body: ChatBody, tools: Sequence[Tool]) -> str:
    """The prompt's text. Raises PromptError or ApiError 400."""
    calls = [call for index, message in enumerate(body.messages) for call in _calls(message, index)]
    check_parts(*(function.arguments.encode() for _, function in calls))
    template = body.chat_template or (tokenizer.tool_template if tools else tokenizer.chat_template) or ""
    messages = [_message(message, index, template) for index, message in enumerate(body.messages)]
    variables = _variables(body, template)
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    if listed and takes_tools(template):
        variables["tools"] = listed
    elif listed:
        messages = _with_system(messages, describe_tools(listed))
    if continues(body):
        _check_continuation(body)
        messages[-1]["content"] += GAP
        return _before_gap(_apply(tokenizer, body, template, messages, False, variables))
    return _apply(tokenizer, body, template, messages, body.add_generation_prompt is not False, variables)


def _apply(
    tokenizer: Tokenizer, body: ChatBody, template: str, messages: list[dict[str, Any]], add_prompt: bool,
    variables: dict[str, Any],
) -> str:  # fmt: skip
    try:
        return tokenizer.apply_chat_template(messages, add_prompt, template=template, **variables)
    except CheckpointError as error:
        if body.chat_template is None:
            raise
        raise ApiError(400, str(error), param="chat_template") from error


def num_calls(body: ChatBody) -> int:
    """How many calls a conversation has."""
    return sum(len(_calls(message, index)) for index, message in enumerate(body.messages))


def continues(body: ChatBody) -> bool:
    """Whether the answer continues the last message instead of starting a new one."""
    return bool(body.continue_final_message or (body.messages and body.messages[-1].prefix))


def said_so_far(body: ChatBody) -> str | None:
    """The text that the answer continues; None where it starts a new message."""
    return _text(body.messages[-1], len(body.messages) - 1) if continues(body) else None


def _check_continuation(body: ChatBody) -> None:
    if not body.messages or body.messages[-1].role != "assistant" or body.messages[-1].tool_calls:
        raise ApiError(400, "continue_final_message needs a text of the assistant's as the last message",
                       param="messages")  # fmt: skip
    if body.add_generation_prompt:
        raise ApiError(400, "add_generation_prompt begins a new message and continue_final_message does not: give one",
                       param="add_generation_prompt")  # fmt: skip


def _before_gap(text: str) -> str:
    """A rendered conversation up to the end of its last message; trailing blanks only if the template keeps them."""
    before, found, after = text.rpartition(GAP.strip())
    if not found:
        raise unsupported("continue_final_message", "this model's chat template does not show the last message's text")
    return before if after.startswith(" ") else before.rstrip()


def _variables(body: ChatBody, template: str) -> dict[str, Any]:
    """The template variables of a request besides messages and tools."""
    variables = dict(body.chat_template_kwargs or {})
    own = [name for name in variables if name in OWN_VARIABLES]
    if own:
        raise ApiError(400, f"chat_template_kwargs may not set {own[0]!r}", param="chat_template_kwargs")
    for name in TEMPLATE_FIELDS:
        value = getattr(body, name)
        if value is None or value == []:
            continue
        if name not in template:
            raise unsupported(name, f"this model's chat template knows no {name}: leave it out")
        variables[name] = value
    return variables


def _message(message: Message, index: int, template: str) -> dict[str, Any]:
    """A message as templates want it: plain text, call arguments as objects, no empty fields."""
    if message.audio is not None:
        raise unsupported("messages", f"messages.{index}.audio is not supported")
    role = "system" if message.role == "developer" and "developer" not in template else message.role
    made: dict[str, Any] = {"role": role, "content": _text(message, index)}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    harmony = "reasoning_content" not in template and "message.thinking" in template
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        # gpt-oss's template refuses a call with both reasoning and a text, and shows either before the call
        "thinking" if harmony else "reasoning_content": None if harmony and message.content else reasoning,
    }
    made |= {name: value for name, value in optional.items() if value is not None}
    if calls := _calls(message, index):
        made["tool_calls"] = [
            {"id": name, "type": "function",
             "function": {"name": function.name, "arguments": _arguments(function.arguments)}}
            for name, function in calls
        ]  # fmt: skip
    if message.role == "function":
        made |= {"role": "tool", "tool_call_id": _legacy_id(index - 1)}
    return made


def _calls(message: Message, index: int) -> list[tuple[str, CalledFunction]]:
    """What an assistant called in a message, with the calls' ids."""
    calls = [(call.id, call.function) for call in message.tool_calls or ()]
    return calls if message.function_call is None else [*calls, (_legacy_id(index), message.function_call)]


def _legacy_id(index: int) -> str:
    """An id for the old function_call, which had none; its answer is always the next message."""
    return f"call{index:05d}"


def _text(message: Message, index: int) -> str:
    if message.content is None:
        if message.role in ("assistant", "tool", "function"):
            return message.refusal or ""
        raise ApiError(400, f"messages.{index}.content is missing: give a text", param="messages")
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(part, index) for part in message.content)


def _part(part: ContentPart, index: int) -> str:
    others = [name for name in PART_KINDS if getattr(part, name) is not None and part.type == "text"]
    if others:
        raise unsupported(
            "messages", f"messages.{index}: a part of type text holds {others[0]}, which is not supported"
        )
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
    """Arguments as an object: templates write them as JSON themselves."""
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
