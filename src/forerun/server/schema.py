"""What clients may send: every field of every request, its type, and which fields are refused.

Knows: names and types, after OpenAI's API and, where that has no name, vLLM's. Does not know: models, engines, tensors.
Unknown fields and fields this server cannot honour are refused; nothing is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenIds = list[int]
Fraction = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A request body or a part of one: no field but those listed, no type but the one named."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationChoice(Body):
    """Who drafts for this request, and how much."""

    drafter: str | None = None
    max_nodes: Annotated[int, Field(ge=1, le=64)] | None = None


Speculation = Literal["auto", "off"] | SpeculationChoice


class JsonSchema(Body):
    """A named JSON schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's structured output: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SharedFields(Body):
    """Fields with one name and one meaning in every API served here."""

    model: str | None = None
    stream: bool | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: int | None = None
    min_p: Fraction | None = None
    seed: int | None = None
    presence_penalty: Fraction | None = None
    frequency_penalty: Fraction | None = None
    repetition_penalty: Fraction | None = None
    logit_bias: dict[str, Fraction] | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculation: Speculation | None = None
    priority: int | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class SamplingBody(SharedFields):
    """Fields that completions and chat completions share."""

    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks on whose behalf; has no effect
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: Fraction | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ImageUrl(BaseModel):
    """Recognised, and refused by text models."""

    model_config = ConfigDict(extra="allow")


class ContentPart(Body):
    """A part of a message's content; `type` other than text is refused later, with a reason."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: dict[str, Any] | None = None
    video_url: dict[str, Any] | str | None = None
    file: dict[str, Any] | None = None


class CalledFunction(Body):
    """A function the model called: `arguments` is JSON as text."""

    name: str
    arguments: str


class MessageToolCall(Body):
    """A call in the conversation so far."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    annotations: list[Any] | None = None


class FunctionDefinition(Body):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool the model may use."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedToolChoice(Body):
    """Call this function."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    verbosity: str | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


# Field -> the values that mean "as it is here anyway"; anything else is refused.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "verbosity": (),
    "metadata": ({},),
}


def refused_fields(body: SamplingBody) -> list[str]:
    """Fields that are known but cannot be honoured with the value they were given."""
    given = {name: getattr(body, name) for name in body.model_fields_set if name in HARMLESS}
    return sorted(name for name, value in given.items() if value is not None and value not in HARMLESS[name])
