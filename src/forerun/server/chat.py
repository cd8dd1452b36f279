"""POST /v1/chat/completions: from a request to prompts, from deltas to answers.

Knows: OpenAI's chat answers, whole and streamed. Does not know: the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from forerun.core import GrammarMask, SamplingParams
from forerun.server.answers import Account, chat_logprob, head, prompt_logprobs, token_counts
from forerun.server.call_readers import CallPiece, NoCalls, Parsed, ToolParser
from forerun.server.context import ServerContext, dropped_fields
from forerun.server.conversation import continues, num_calls, render
from forerun.server.errors import ApiError
from forerun.server.functions import old_finish_reason, old_message, with_tools
from forerun.server.generation import Event, Generation
from forerun.server.grammar_masks import AfterThinking, PrefixMask
from forerun.server.harmony import FINAL, MESSAGE, Harmony
from forerun.server.params import check_fields, engine_options, sampling_params, token_limit
from forerun.server.reasoning import ReasoningSplitter, may_think, starts_inside
from forerun.server.schema import ChatBody, NamedToolChoice, Tool
from forerun.server.streams import Delta
from forerun.server.structured import GrammarSpec, grammar_spec, json_spec
from forerun.server.tools import (
    HARMONY,
    MARKED_BY_SPECIAL_TOKENS,
    STYLES,
    ForcedArguments,
    ForcedCalls,
    call_id,
    calls_schema,
)
from forerun.weights.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20


@dataclass(slots=True)
class _ChatChoice:
    """One sample's answer as it grows."""

    index: int
    splitter: ReasoningSplitter | None
    parser: ToolParser
    style: str
    num_before: int  # calls of the conversation so far
    only_one_call: bool
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_calls: int = 0  # including calls that are left out
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Read new text -> the message's changes as the deltas of a stream, in order.

        A call begins with {index, id, type, function: {name, arguments: ""}}; deltas with {index, function:
        {arguments}} continue it with the next characters of the arguments as the model wrote them.
        """
        reasoning, content = self._split(delta.text) if delta.text else ("", "")
        parsed = self.parser.feed(content) if content else Parsed()
        content, pieces, reasoning = parsed.content, list(parsed.calls), reasoning + parsed.reasoning
        if delta.finish_reason is not None:
            more_reasoning, rest = self.splitter.finish() if self.splitter else ("", "")
            for last in (self.parser.feed(rest) if rest else Parsed(), self.parser.finish()):
                content, pieces = content + last.content, pieces + list(last.calls)
                more_reasoning += last.reasoning
            reasoning += more_reasoning
        new = self._add(reasoning, content, pieces)
        if delta.finish_reason is not None:
            ended_well = self.calls and delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if ended_well else delta.finish_reason
        return new

    def _split(self, text: str) -> tuple[str, str]:
        return self.splitter.feed(text) if self.splitter else ("", text)

    def _add(self, reasoning: str, content: str, pieces: list[CallPiece]) -> list[dict[str, Any]]:
        self.content += content
        self.reasoning += reasoning
        texts = {name: text for name, text in (("reasoning_content", reasoning), ("content", content)) if text}
        calls = [delta for piece in pieces for delta in self._add_piece(piece)]
        return [*([texts] if texts else []), *({"tool_calls": [call]} for call in calls)]

    def _add_piece(self, piece: CallPiece) -> list[dict[str, Any]]:
        """The deltas of a piece of a call; none if only one call is allowed and this is another."""
        made: list[dict[str, Any]] = []
        self.num_calls += piece.name is not None
        if self.only_one_call and self.num_calls > 1:
            return made
        index = self.num_calls - 1
        if piece.name is not None:
            opening = {"id": call_id(self.style, piece.name, self.num_before + index), "type": "function"}
            self.calls.append({**opening, "function": {"name": piece.name, "arguments": ""}})
            made.append({"index": index, **opening, "function": {"name": piece.name, "arguments": ""}})
        if piece.arguments:
            self.calls[index]["function"]["arguments"] += piece.arguments
            made.append({"index": index, "function": {"arguments": piece.arguments}})
        return made

    def num_reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens up to the one that ends the thinking, or all; without such a token, those of the reasoning's text."""
        end = tokenizer.token_id(self.splitter.end) if self.splitter and self.reasoning else None
        if end is None:
            return len(tokenizer.encode(self.reasoning, add_special_tokens=False)) if self.reasoning else 0
        return self.token_ids.index(end) + 1 if end in self.token_ids else len(self.token_ids)

    def message(self) -> dict[str, Any]:
        """The whole message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatJob:
    """One chat request, checked: what to generate, and how to answer."""

    def __init__(self, context: ServerContext, body: ChatBody, dropped: Sequence[str] | None = None) -> None:
        """Raises ApiError or PromptError for whatever is wrong with the request. Takes a while: not for event loops.

        `dropped`: unknown fields of the request that `body` is a translation of.
        """
        check_fields(body)
        self._context = context
        self._body = body = with_tools(body)
        options = engine_options(body, context.drafter, context.settings.timeout_s) | context.expected(body.prediction)
        self.grammar_s: float | None = None
        self._tools = usable_tools(body)
        self._splitter = _splitter(context, text := render(context.tokenizer, body, self._tools), continues(body))
        params = self._params(options.get("deadline_s"))
        whole = body.truncate_prompt_tokens is None
        token_ids = context.encode(text, body.add_special_tokens or False, whole=whole)
        self._prompt = token_ids = context.truncated(token_ids, body.truncate_prompt_tokens, params.max_tokens)
        context.check_prompt(token_ids)
        context.check_samples(params.n)
        self.constrained = context.is_constrained(params)
        self.groups = [context.llm.prepare(token_ids, params, context.adapter_of(body), **options)]
        self._choices = [self._choice(i) for i in range(params.n)]
        unheld = self._unheld_functions("tools.{}.function.strict" if dropped is None else "tools.{}.strict")
        dropped = dropped_fields(body) if dropped is None else dropped
        self._account = Account(1, self.grammar_s, [*dropped, *unheld])

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self._prompt)

    @property
    def thinking(self) -> dict[str, Any] | None:
        """How an answer marks its thinking: start, end, inside (the prompt has begun it); None if it has none."""
        marks = self._splitter
        return None if marks is None else {"start": marks.start, "end": marks.end, "inside": marks.inside}

    # -- what to generate ---------------------------------------------------------------------------------------

    def _params(self, deadline_s: float | None) -> SamplingParams:
        body = self._body
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ApiError(400, f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")
        if body.detokenize is False and self._tools:
            raise ApiError(
                400, "tools need texts, and detokenize false asks for none: leave one out", param="detokenize"
            )
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        others: dict[str, Any] = {"max_tokens": token_limit(limit, None), "grammar": self._grammar(deadline_s)}
        others["prompt_logprobs"] = body.prompt_logprobs
        if body.logprobs:
            others["logprobs"] = body.top_logprobs or 0
        if self._needs_special_tokens and body.skip_special_tokens is None:
            others["skip_special_tokens"] = False
        return sampling_params(body, self._context.llm.sampling_defaults, **others)

    def _grammar(self, deadline_s: float | None) -> GrammarMask | None:
        asked, forced = grammar_spec(self._body), self._forced_spec()
        if asked is not None and forced is not None:
            raise ApiError(
                400, "tool_choice and structured output both say what to write: give one", param="tool_choice"
            )
        spec = forced or asked
        if spec is None:
            return None
        started = perf_counter()
        mask = self._context.grammars.mask(spec, deadline_s)
        self.grammar_s = perf_counter() - started
        return self._after_thinking(mask)

    def _after_thinking(self, mask: PrefixMask) -> GrammarMask:
        """The mask after the thinking; from the start if no token ends thinking, and then the model cannot think."""
        splitter, tokenizer = self._splitter, self._context.tokenizer
        if self._style == HARMONY and not continues(self._body) and tokenizer.token_id(MESSAGE) is not None:
            marks = (tokenizer.encode(mark, add_special_tokens=False) for mark in (FINAL, MESSAGE))
            return AfterThinking(mask, None, *marks)
        if splitter is None or (end := tokenizer.token_id(splitter.end)) is None:
            return mask
        start = None if splitter.inside else tokenizer.token_id(splitter.start)
        return mask if start is None and not splitter.inside else AfterThinking(mask, start, [end])

    def _forced_spec(self) -> GrammarSpec | None:
        choice = self._body.tool_choice
        if isinstance(choice, NamedToolChoice):
            parameters = _find(self._tools, choice.function.name).function.parameters
            return json_spec("tools", parameters or {"type": "object"})
        if choice != "required":
            return None
        functions = [(tool.function.name, tool.function.parameters) for tool in self._tools]
        try:
            schema = calls_schema(functions, 1 if self._body.parallel_tool_calls is False else None)
        except ValueError as error:
            raise ApiError(400, f"tools: these parameters cannot be used: {error}", param="tools") from error
        return json_spec("tools", schema)

    @property
    def _style(self) -> str:
        return self._context.tool_style

    @property
    def _reads_calls(self) -> bool:
        """Whether the model's own text may contain calls."""
        return bool(self._tools) and self._body.tool_choice in (None, "auto")

    @property
    def _needs_special_tokens(self) -> bool:
        """Whether marks of calls or of thinking are special tokens, which texts usually omit."""
        tokenizer, splitter = self._context.tokenizer, self._splitter
        end = None if splitter is None else tokenizer.token_id(splitter.end)
        marks_thinking = end is not None and tokenizer.special_text(end) != ""
        marks_calls = self._reads_calls and self._style in MARKED_BY_SPECIAL_TOKENS
        return self._style == HARMONY or marks_calls or marks_thinking

    def _unheld_functions(self, path: str) -> list[str]:
        """Fields that asked for `strict` where no grammar enforces it, because the model decides if and how it calls.

        `path`: the field's path in the request's own API.
        """
        if not self._reads_calls:
            return []
        path = "functions.{}.strict" if self._body.functions else path
        return [path.format(i) for i, tool in enumerate(self._tools) if tool.function.strict]

    def _choice(self, index: int) -> _ChatChoice:
        splitter = self._splitter
        own = splitter and ReasoningSplitter(splitter.marks, splitter.inside)
        only_one = self._body.parallel_tool_calls is False
        return _ChatChoice(index, own, self._parser(), self._style, num_calls(self._body), only_one)

    def _parser(self) -> ToolParser:
        forced = self._forced_parser()
        if self._reads_calls:
            functions = {tool.function.name: tool.function.parameters or {} for tool in self._tools}
            return STYLES[self._style](functions)
        return Harmony(forced, reads_calls=bool(self._tools)) if self._style == HARMONY else forced

    def _forced_parser(self) -> ToolParser:
        choice = self._body.tool_choice
        if isinstance(choice, NamedToolChoice):
            return ForcedArguments(choice.function.name)
        return ForcedCalls() if choice == "required" else NoCalls()

    # -- how to answer ------------------------------------------------------------------------------------------

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        async for event in generation.events():
            self._take(event)
        choices = [self._whole_choice(choice) for choice in self._choices]
        first = head("chat.completion", "chatcmpl", self._context.name_of(self._body), self._body.request_id)
        return {**first, **self._prompt_ids, **self._prompt_logprobs, "choices": choices, **self._ends()}

    def _ends(self) -> dict[str, Any]:
        """Usage and figures of the answer."""
        thought = sum(choice.num_reasoning_tokens(self._context.tokenizer) for choice in self._choices)
        details = {"reasoning_tokens": thought, **self._account.predicted(len(self.groups[0].prediction))}
        usage = {**self._account.usage(), "completion_tokens_details": details}
        return {"usage": usage, "forerun": self._account.forerun()}

    @property
    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt} if self._body.return_token_ids else {}

    @property
    def _prompt_logprobs(self) -> dict[str, Any]:
        if self._body.prompt_logprobs is None:
            return {}
        entries, as_ids = self.groups[0].output().prompt_logprobs or (), self._body.return_tokens_as_token_ids or False
        return {"prompt_logprobs": prompt_logprobs(self._context.tokenizer, entries, as_ids)}

    def _usage_so_far(self, choice: _ChatChoice) -> dict[str, Any]:
        """Usage of one choice so far, for a stream piece, where `continuous_usage_stats` was asked for."""
        options = self._body.stream_options
        if options is None or not options.continuous_usage_stats:
            return {}
        return {"usage": token_counts(len(self._prompt), len(choice.token_ids))}

    def _take(self, event: Event) -> tuple[_ChatChoice, list[dict[str, Any]], list[dict[str, Any]]]:
        """Read an event -> the choice, the changes of its message, and its new log-probabilities."""
        delta = event.delta if self._body.detokenize is not False else replace(event.delta, text="")
        choice = self._choices[delta.index]
        self._account.add(0, delta)
        as_ids = self._body.return_tokens_as_token_ids or False
        logprobs = [chat_logprob(self._context.tokenizer, entry, as_ids) for entry in delta.logprobs]
        choice.logprobs += logprobs
        choice.token_ids += delta.token_ids
        new = choice.take(delta)
        choice.stop_reason = self._context.stop_reason(delta)
        if self._body.include_reasoning is False:
            new = [part for part in new if part.pop("reasoning_content", None) is None or part]
        return choice, new, logprobs

    def _whole_choice(self, choice: _ChatChoice) -> dict[str, Any]:
        message = choice.message()
        if self._body.include_reasoning is False:
            message.pop("reasoning_content", None)
        return {
            "index": choice.index,
            "message": old_message(message) if self._body.functions else message,
            "logprobs": {"content": choice.logprobs} if self._body.logprobs else None,
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if self._body.return_token_ids else {}),
        }

    def _finish_reason(self, choice: _ChatChoice) -> str | None:
        return old_finish_reason(choice.finish_reason) if self._body.functions else choice.finish_reason

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in pieces."""
        first = head("chat.completion.chunk", "chatcmpl", self._context.name_of(self._body), self._body.request_id)
        for choice in self._choices:
            opening = _chunk_choice(choice.index, {"role": "assistant", "content": ""})
            yield {**first, **self._prompt_ids, "choices": [opening], **self._usage_so_far(choice)}
        async for event in generation.events():
            choice, new, logprobs = self._take(event)
            ids = {"token_ids": event.delta.token_ids} if self._body.return_token_ids else {}
            for made in self._chunks(choice, new, logprobs, ids):
                yield {**first, "choices": [made], **self._usage_so_far(choice)}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**first, "choices": [], **self._ends()}

    def _chunks(
        self, choice: _ChatChoice, new: list[dict[str, Any]], logprobs: list[dict[str, Any]], ids: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """A chunk for each part of the message; the first has the token ids, the last the finish reason."""
        if not (new or logprobs or ids or choice.finish_reason):
            return []
        parts = [old_message(part) for part in new] if self._body.functions else new
        made = [_chunk_choice(choice.index, part) for part in parts or [{}]]
        made[0] |= ids
        if self._body.logprobs:
            made[0]["logprobs"] = {"content": logprobs}
        if choice.finish_reason is not None:
            made[-1] |= {"finish_reason": self._finish_reason(choice), "stop_reason": choice.stop_reason}
        return made


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def usable_tools(body: ChatBody) -> list[Tool]:
    """The tools that the prompt lists. Raises ApiError 400 if tool_choice does not fit them."""
    choice, tools = body.tool_choice, body.tools or []
    if choice not in (None, "none", "auto") and not tools:
        raise ApiError(400, "tool_choice was given without tools: list the tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice):
        _find(tools, choice.function.name)
    names = [tool.function.name for tool in tools]
    if len(names) != len(set(names)):
        raise ApiError(400, "two tools have the same name: names must differ", param="tools")
    return [] if choice == "none" else tools


def _find(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    listed = ", ".join(tool.function.name for tool in tools) or "none"
    raise ApiError(400, f"tool_choice names {name[:64]!r}; the tools are {listed}", param="tool_choice")


def _splitter(context: ServerContext, prompt: str, goes_on: bool) -> ReasoningSplitter | None:
    """The splitter an answer to this prompt needs; samples get copies. `goes_on`: the answer continues a message."""
    marks = context.reasoning_marks
    if marks is None or not may_think(prompt, marks):
        return None
    inside = starts_inside(prompt, marks)
    return None if goes_on and not inside else ReasoningSplitter(marks, inside)
