"""What clients may send to /v1/messages: every field, every block of a message, and which are refused.

Knows: names and types of Anthropic's Messages API. Does not know: models, engines, tensors, how blocks become prompts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from forerun.server.schema import MAX_MESSAGES, Body, FunctionName, SharedFields, Unserved, Whole, by_type

CacheControl = dict[str, Any] | None  # prompts are cached anyway


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = None


class ThinkingBlock(Body):
    """What the model thought in an earlier turn, copied back."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Body):
    """A call the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


ResultPart = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[Unserved, Tag("unserved")], Discriminator(by_type("text"))
]


class ToolResultBlock(Body):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[Unserved, Tag("unserved")],
    Discriminator(by_type("text", "thinking", "tool_use", "tool_result")),
]


class MessageTurn(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class CustomTool(Body):
    """A tool the client runs; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they come


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[Unserved, Tag("unserved")],
    Discriminator(by_type("custom", default="custom")),
]


class MessagesToolChoice(Body):
    """Whether to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether to think."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """A JSON schema for the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is structured, and how much effort goes into it."""

    effort: str | None = None
    format: OutputFormat | None = None


class RequestMetadata(Body):
    """Who asks on whose behalf; has no effect."""

    user_id: str | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[MessageTurn], Field(max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the earlier name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None
    # Without effect on the text.
    cache_control: CacheControl = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # See NOT_SERVED.
    speed: str | None = None
    mcp_servers: list[Any] | None = None
    context_management: dict[str, Any] | None = None


class MessagesBody(SharedFields, CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: list[str] | None = None
    metadata: RequestMetadata | None = None
    service_tier: str | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    container: str | dict[str, Any] | None = None


# Field -> the values that match what this server does anyway; any other is refused.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "speed": ("standard",),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "container": (),
    "inference_geo": (),
    "diagnostics": (),
}
