"""What clients may send to /v1/responses: every field, every item of a conversation, and which are refused.

Knows: names and types of OpenAI's Responses API. Does not know: models, engines, tensors, how items become prompts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from forerun.server.schema import MAX_MESSAGES, Body, FunctionName, SharedFields, Unserved, Whole, by_type

Status = Literal["in_progress", "completed", "incomplete"] | None


# -- input --------------------------------------------------------------------------------------------------------


class TextPart(Body):
    """Text of a message; the fields after `text` are those that clients copy back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(Body):
    """A refusal the model wrote."""

    type: Literal["refusal"]
    refusal: str


def _part_kind(value: Any) -> str:
    kind = by_type("input_text", "output_text", "text", "refusal")(value)
    return "text" if kind.endswith("_text") else kind


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[RefusalPart, Tag("refusal")] | Annotated[Unserved, Tag("unserved")],
    Discriminator(_part_kind),
]


class MessageItem(Body):
    """A turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: Status = None
    phase: str | None = None


class FunctionCallItem(Body):
    """A call the model made; `arguments` is JSON as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status = None
    caller: dict[str, Any] | None = None
    namespace: None = None


class FunctionOutputItem(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    name: str | None = None
    id: str | None = None
    status: Status = None
    caller: dict[str, Any] | None = None
    namespace: None = None


class ReasoningText(Body):
    """A piece of reasoning, whole or summed up."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought in an earlier turn, copied back."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None  # refused: this server encrypts nothing, and reads nothing encrypted
    status: Status = None


class ItemReference(Body):
    """An item of an earlier, stored response."""

    type: Literal["item_reference"]
    id: str


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[Unserved, Tag("unserved")],
    Discriminator(
        by_type(
            "message", "function_call", "function_call_output", "reasoning", "item_reference", default="message"
        )
    ),
]  # fmt: skip


# -- tools and formats --------------------------------------------------------------------------------------------


class FunctionTool(Body):
    """A function the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[Unserved, Tag("unserved")],
    Discriminator(by_type("function")),
]


class FunctionChoice(Body):
    """Call this function."""

    type: Literal["function"]
    name: str


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FunctionChoice, Tag("function")]
    | Annotated[Unserved, Tag("unserved")],
    Discriminator(lambda value: "word" if isinstance(value, str) else by_type("function")(value)),
]


class TextFormat(Body):
    """How the text is structured; `schema` and `name` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """What is asked of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Body):
    """How much to think, and whether the reasoning comes as `content` or as `summary` (both are the whole of it)."""

    effort: str | None = None
    summary: Literal["auto", "detailed", "concise"] | None = None
    generate_summary: Literal["auto", "detailed", "concise"] | None = None


class ResponseStreamOptions(Body):
    """Streams are not padded."""

    include_obfuscation: bool | None = None


# -- the request --------------------------------------------------------------------------------------------------


class ResponsesBody(SharedFields):
    """POST /v1/responses."""

    input: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[Item], Field(max_length=MAX_MESSAGES), Tag("items")],
            Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
        ]
        | None
    ) = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: Whole | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Without effect on the text.
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    max_tool_calls: Whole | None = None  # for hosted tools; there are none
    # See NOT_SERVED.
    background: bool | None = None
    background_options: dict[str, Any] | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[Any] | dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    truncation: str | None = None
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    response_format: dict[str, Any] | None = None
    n: Whole | None = None


# Field -> the values that match what this server does anyway; any other is refused.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "background_options": ({},),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "truncation": ("disabled",),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "n": (1,),
}
# What to do instead, where there is something.
INSTEAD = {
    "conversation": "give previous_response_id, or the items of the conversation as input",
    "max_tokens": "give max_output_tokens",
    "max_completion_tokens": "give max_output_tokens",
    "response_format": "give text.format",
    "background": "leave it out, and wait for the answer or stream it",
    "truncation": "leave it out, and shorten the input yourself",
}
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # the latter is null: reasoning is not encrypted
