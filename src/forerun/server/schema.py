"""What clients may send: every field of every request, its type, and which fields are refused.

Knows: names and types, after OpenAI's API and, where it has no such field, vLLM's. Does not know: models, engines,
tensors. Fields this server cannot honour are refused. Unknown ones are kept beside the known, for `unknown_fields` to
find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from forerun.server.errors import unsupported


def _whole(value: Any) -> Any:
    """20 for 20.0: JSON has one type of number, and some clients write integers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


TokenIds = list[int]
Whole = Annotated[int, BeforeValidator(_whole)]
Fraction = Annotated[float, Field(allow_inf_nan=False)]
MAX_MESSAGES = 4096  # of a conversation, in whatever format
MAX_ID = 128  # characters of a request's own id


def _stop_at_first_error(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("type") == "list":
            node["fail_fast"] = True
        for child in node.values():
            _stop_at_first_error(child)
    elif isinstance(node, list | tuple):
        for child in node:
            _stop_at_first_error(child)


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]  # Anthropic's limit; OpenAI's is 64


class Body(BaseModel):
    """A request body or a part of one: values must have the exact type. The API's document lists every field."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lists are read up to their first error: a long list of wrong values costs no more than a short one."""
        made = handler(source)
        _stop_at_first_error(made)
        return made


class Unserved(BaseModel):
    """A part, an item or a tool of a type that is not served here: refused later, by its type."""

    model_config = ConfigDict(extra="allow")

    type: str


def by_type(*known: str, default: str = "unserved") -> Callable[[Any], str]:
    """A discriminator: the value's `type` if it is one of `known`, `default` if it has none, else "unserved"."""

    def kind(value: Any) -> str:
        given = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        return default if given is None else given if given in known else "unserved"

    return kind


class StreamOptions(Body):
    """What a stream contains besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every event, not only in the last
    include_obfuscation: Literal[False] | None = None


class SpeculationChoice(Body):
    """The drafter for this request, and how much it drafts."""

    drafter: str | None = None
    max_nodes: Annotated[Whole, Field(ge=1, le=64)] | None = None


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
    top_k: Whole | None = None
    min_p: Fraction | None = None
    seed: Whole | None = None
    presence_penalty: Fraction | None = None
    frequency_penalty: Fraction | None = None
    repetition_penalty: Fraction | None = None
    logit_bias: dict[str, Fraction] | None = None
    min_tokens: Whole | None = None
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
    cache_salt: str | None = None
    priority: Whole | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class SamplingBody(SharedFields):
    """Fields that completions and chat completions share."""

    max_tokens: Whole | None = None
    n: Whole | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    best_of: Whole | None = None
    use_beam_search: bool | None = None
    length_penalty: Fraction | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1)] | None = None
    prompt_logprobs: Whole | None = None
    return_tokens_as_token_ids: bool | None = None
    detokenize: bool | None = None
    request_id: Annotated[str, Field(max_length=MAX_ID)] | None = None  # becomes part of the answer's id
    extra_body: dict[str, Any] | None = None
    # Fields for storing, billing or routing requests. They have no effect on the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: Whole | None = None
    suffix: str | None = None


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
    cache_control: Any = None  # for servers whose prompt cache is controlled by clients


class CalledFunction(Body):
    """A function the model called: `arguments` is JSON as text."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # what openai's client adds to an answer


class MessageToolCall(Body):
    """A call in the conversation so far."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Whole | None = None


class Message(Body):
    """One turn of the conversation. The last fields are copied by clients from earlier answers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    prefix: bool | None = None  # Mistral's and DeepSeek's continue_final_message
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same in newer versions of vLLM
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    id: Any = None
    annotations: Any = None
    cache_control: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None


class FunctionDefinition(Body):
    """A function the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool the model may use."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = None


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedToolChoice(Body):
    """Call this function."""

    type: Literal["function"]
    function: NamedFunction


class PredictedPart(Body):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the answer is expected to repeat in large part."""

    type: Literal["content"]
    content: str | list[PredictedPart]


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Literal[False] | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: Prediction | None = None
    web_search_options: dict[str, Any] | None = None
    # Passed to the chat template if it uses them: see TEMPLATE_FIELDS.
    reasoning_effort: str | None = None
    verbosity: str | None = None
    enable_thinking: bool | None = None
    documents: list[Any] | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None  # default: true for prompts, false for conversations
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class UnloadAdapterBody(Body):
    """What /v1/unload_lora_adapter accepts."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_int_id: int | None = None  # has no effect, as in vLLM


class LoadAdapterBody(Body):
    """What /v1/load_lora_adapter accepts."""

    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]  # a folder on the server's machine
    load_inplace: bool = False  # replace the adapter of this name, if there is one


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


TEMPLATE_FIELDS = ("reasoning_effort", "verbosity", "enable_thinking", "documents")

# Field -> the values that match what this server does anyway; any other is refused.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "extra_body": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
# What to do instead, where there is something.
INSTEAD = {"extra_body": "its fields belong beside the others; clients put them there"}


def check_served(
    body: Body, harmless: Mapping[str, tuple[Any, ...]] = HARMLESS, instead: Mapping[str, str] = INSTEAD
) -> None:
    """Raise ApiError 400 for a field that is known but cannot be honoured with the value it was given.

    `instead`: what to do about a field other than leave it out.
    """
    given = {name: getattr(body, name) for name in body.model_fields_set if name in harmless}
    refused = sorted(name for name, value in given.items() if value is not None and value not in harmless[name])
    if refused:
        what_to_do = instead.get(refused[0], "leave it out")
        raise unsupported(refused[0], f"{refused[0]} is not supported here: {what_to_do}")


def unknown_fields(part: Any, path: str = "") -> Iterator[str]:
    """Where a body has fields that are not listed here, as "messages.0.colour"."""
    if isinstance(part, Body):
        yield from (f"{path}{name}" for name in part.model_extra or ())
        for name in type(part).model_fields:
            yield from unknown_fields(getattr(part, name), f"{path}{name}.")
    elif isinstance(part, list) and part and isinstance(part[0], Body):
        for index, entry in enumerate(part):
            yield from unknown_fields(entry, f"{path}{index}.")


def shared_fields(body: SharedFields) -> dict[str, Any]:
    """The fields given that mean the same in every API."""
    return {name: getattr(body, name) for name in SharedFields.model_fields if name in body.model_fields_set}
