"""From a /v1/messages request to the chat request that means the same.

Knows: blocks and how they make up the messages of a conversation. Does not know: answers, HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from forerun.server.errors import ApiError, unsupported
from forerun.server.messages_schema import (
    NOT_SERVED,
    Block,
    CountTokensBody,
    CustomTool,
    MessagesBody,
    MessageTurn,
    OutputConfig,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
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

FIELD_NAMES = {  # chat completions' field -> this API's, for error messages
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# How Claude Code's first system block begins. It differs in every request, so no prompt would find its prefix cached.
BILLING = "x-anthropic-billing-header:"
SWITCH = "enable_thinking"  # the variable's name in templates that have it


def chat_body(body: CountTokensBody, template: str, thinks: bool) -> ChatBody:
    """The chat request for `body`; `thinks`: the model's template knows reasoning. Raises ApiError 400."""
    check_served(body, NOT_SERVED)
    config = body.output_config
    form = body.output_format or (config and config.format)
    messages = [*_system(body.system), *(m for i, turn in enumerate(body.messages) for m in _messages(turn, i))]
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"the conversation has {len(messages)} messages, the system's and each tool's result "
                            f"included; the most is {MAX_MESSAGES}: leave old ones out", param="messages")  # fmt: skip
    given: dict[str, Any] = {
        "messages": messages,
        "tools": [_tool(tool, index) for index, tool in enumerate(body.tools or ())] or None,
        "response_format": form and _format(form.schema_),
        "reasoning_effort": config and _effort(config, template),
        "chat_template_kwargs": body.chat_template_kwargs,
        "continue_final_message": (body.messages and body.messages[-1].role == "assistant") or None,
        **_tool_choice(body),
        **_thinking(body, template, thinks),
    }
    if isinstance(body, MessagesBody):
        given |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences, **shared_fields(body)}
    return ChatBody(**{name: value for name, value in given.items() if value is not None})


def _format(schema: dict[str, Any]) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(name="output", schema=schema))


def _tool(tool: CustomTool | Unserved, index: int) -> Tool:
    if isinstance(tool, Unserved):
        raise unsupported(
            "tools", f"tools.{index}: tools of type {tool.type[:40]!r} are not served here: only those you run yourself"
        )
    definition = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=definition)


def _tool_choice(body: CountTokensBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type != "tool":
        return {"tool_choice": TOOL_CHOICES[choice.type], "parallel_tool_calls": parallel}
    if choice.name is None:
        raise ApiError(400, "tool_choice of type tool needs a name", param="tool_choice")
    named = NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return {"tool_choice": named, "parallel_tool_calls": parallel}


def _thinking(body: CountTokensBody, template: str, thinks: bool) -> dict[str, Any]:
    """The template option that switches thinking on or off. Raises ApiError 400 for what the model cannot do."""
    asked = body.thinking
    if asked is None:
        return {}
    if asked.budget_tokens is not None:
        raise unsupported(
            "thinking", "thinking.budget_tokens cannot be kept here: bound the answer by max_tokens, or say adaptive"
        )
    wanted = asked.type != "disabled"
    if asked.type == "enabled" and not thinks:  # "adaptive" leaves it to the model, even to one that never thinks
        raise unsupported("thinking", "this model's chat template knows no thinking: leave it out")
    if not wanted and thinks and SWITCH not in template:
        raise unsupported("thinking", "this model's chat template cannot switch thinking off: leave it out")
    switched = {SWITCH: wanted} if SWITCH in template else {}
    return {**switched, **({"include_reasoning": False} if asked.display == "omitted" else {})}


def _effort(config: OutputConfig, template: str) -> str | None:
    """The effort for templates that know it; for others "high", the default, is left out."""
    return None if config.effort == "high" and "reasoning_effort" not in template else config.effort


# -- blocks -------------------------------------------------------------------------------------------------------


def _system(system: str | list[TextBlock] | None) -> Iterator[Message]:
    if isinstance(system, list):
        system = [block for block in system if not block.text.startswith(BILLING)]
    if system:
        yield Message(role="system", content=system if isinstance(system, str) else _parts(system, "system"))


def _messages(turn: MessageTurn, index: int) -> Iterator[Message]:
    """A turn as messages: results of tools are messages of their own."""
    where = f"messages.{index}"
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
    elif turn.role == "assistant":
        yield _said(turn.content, where)
    else:
        results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
        for result in results:
            yield Message(role="tool", tool_call_id=result.tool_use_id, content=_result(result, where))
        rest = [block for block in turn.content if not isinstance(block, ToolResultBlock)]
        if rest or not results:
            yield Message(role=turn.role, content=_parts(rest, where))


def _said(blocks: Sequence[Block], where: str) -> Message:
    """What the model wrote: thinking, text and calls in one message."""
    text = [block.text for block in blocks if isinstance(block, TextBlock)]
    thought = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        MessageToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=json.dumps(block.input)))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    strange = [block for block in blocks if not isinstance(block, (TextBlock, ThinkingBlock, ToolUseBlock))]
    if strange:
        raise _refused(strange[0], where)
    message = Message(role="assistant", content="".join(text) if text or not calls else None)
    message.tool_calls = calls or None
    message.reasoning_content = "".join(thought) or None
    return message


def _result(result: ToolResultBlock, where: str) -> str | list[ContentPart]:
    """The result's text; templates have no field for errors, so the text begins with "Error:"."""
    content = result.content or ""
    if isinstance(content, str):
        return f"Error: {content}" if result.is_error else content
    parts = _parts(content, where)
    return [ContentPart(type="text", text="Error:"), *parts] if result.is_error else parts


def _parts(blocks: Sequence[Any], where: str) -> list[ContentPart]:
    strange = next((block for block in blocks if not isinstance(block, TextBlock)), None)
    if strange is not None:
        raise _refused(strange, where)
    return [ContentPart(type="text", text=block.text) for block in blocks]


def _refused(block: Any, where: str) -> ApiError:
    return unsupported("messages", f"{where}: a block of type {block.type[:40]!r} is not supported here")
