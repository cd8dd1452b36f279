"""Functions, as OpenAI's API called tools until November 2023: converts requests and answers between both forms.

Knows: the fields of both. Does not know: models, text.
"""

from __future__ import annotations

from typing import Any

from forerun.server.errors import ApiError
from forerun.server.schema import ChatBody, NamedFunction, NamedToolChoice, Tool


def with_tools(body: ChatBody) -> ChatBody:
    """The request with its functions as tools, one call at most; raises ApiError 400 if it has functions and tools."""
    called, functions = body.function_call, body.functions
    if not functions:
        if isinstance(called, NamedFunction):
            raise ApiError(400, "function_call was given without functions: list them", param="function_call")
        return body
    if body.tools or body.tool_choice is not None:
        raise ApiError(400, "functions and tools were given: give one of them", param="functions")
    choice = NamedToolChoice(type="function", function=called) if isinstance(called, NamedFunction) else called
    tools = [Tool(type="function", function=function) for function in functions]
    return body.model_copy(update={"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})


def old_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message or a delta of one, with its call as `function_call`."""
    if not message.get("tool_calls"):
        return message
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "function_call": message["tool_calls"][0]["function"]}


def old_finish_reason(reason: str | None) -> str | None:
    """The finish reason in the old API's terms."""
    return "function_call" if reason == "tool_calls" else reason
