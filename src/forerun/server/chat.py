"""POST /v1/chat/completions: from a request to prompts, from deltas to answers.

Knows: OpenAI's chat answers, whole and streamed. Does not know: the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from forerun.core import GrammarMask, SamplingParams
from forerun.server.answers import Account, chat_logprob, head, prompt_logprobs, token_counts
from forerun.server.call_readers import NoCalls, ToolParser
from forerun.server.chat_choice import ChatChoice
from forerun.server.context import ServerContext, dropped_fields
from forerun.server.conversation import continues, num_calls, render, said_so_far
from forerun.server.errors import ApiError, unsupported
from forerun.server.functions import old_finish_reason, old_message, with_tools
from forerun.server.generation import Event, Generation
from forerun.server.grammar_masks import AfterThinking, PrefixMask
from forerun.server.harmony import FINAL, MESSAGE, Harmony
from forerun.server.params import check_fields, engine_options, sampling_params, token_limit
from forerun.server.reasoning import ReasoningSplitter, may_think, starts_inside
from forerun.server.schema import ChatBody, NamedToolChoice, Tool
from forerun.server.structured import GrammarSpec, grammar_spec, json_spec
from forerun.server.tools import (
    BARE,
    HARMONY,
    MARKS,
    STYLES,
    ForcedArguments,
    ForcedCalls,
    calls_schema,
)

MAX_TOP_LOGPROBS = 20


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
        self._splitter = _splitter(context, text := render(context.tokenizer, body, self._tools), said_so_far(body))
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
        call_id, started = self._opening_of_calls(spec), perf_counter()
        mask = self._context.grammars.mask(spec, deadline_s)
        self.grammar_s = perf_counter() - started
        return self._after_thinking(mask, call_id)

    def _opening_of_calls(self, spec: GrammarSpec) -> int | None:
        """The token that begins a call in place of a text in the response format; None where none is to come.

        Raises ApiError 400 where calls begin with text, which the format would forbid. Harmony has calls before it.
        """
        marks = MARKS.get(self._style)
        if not self._reads_calls or spec.param != "response_format" or marks is None:
            return None
        opening = None if self._style in BARE else self._context.tokenizer.token_id(marks[0])
        if opening is None:
            raise unsupported(
                "response_format",
                "response_format beside tools would let this model call none, because its calls may begin with text: "
                "leave one out, or use tool_choice none",
            )
        return opening

    def _after_thinking(self, mask: PrefixMask, call_id: int | None) -> GrammarMask:
        """The mask after the thinking; from the start if no token ends thinking, and then the model cannot think."""
        splitter, tokenizer = self._splitter, self._context.tokenizer
        if self._style == HARMONY and not continues(self._body) and tokenizer.token_id(MESSAGE) is not None:
            marks = (tokenizer.encode(mark, add_special_tokens=False) for mark in (FINAL, MESSAGE))
            return AfterThinking(mask, None, *marks)
        end = None if splitter is None else tokenizer.token_id(splitter.end)
        start = None if splitter is None or splitter.inside else tokenizer.token_id(splitter.start)
        if splitter is None or end is None or (start is None and not splitter.inside):
            return mask if call_id is None else AfterThinking(mask, None, call_id=call_id)
        return AfterThinking(mask, start, [end], call_id=call_id)

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
        marks = [*(MARKS.get(self._style, ()) if self._reads_calls else ())]
        marks += [] if self._splitter is None else [self._splitter.end]
        ids, special = map(self._context.tokenizer.token_id, marks), self._context.tokenizer.special_ids
        return self._style == HARMONY or any(token in special for token in ids)

    def _unheld_functions(self, path: str) -> list[str]:
        """Fields that asked for `strict` where no grammar enforces it, because the model decides if and how it calls.

        `path`: the field's path in the request's own API.
        """
        if not self._reads_calls:
            return []
        path = "functions.{}.strict" if self._body.functions else path
        return [path.format(i) for i, tool in enumerate(self._tools) if tool.function.strict]

    def _choice(self, index: int) -> ChatChoice:
        splitter = self._splitter
        own = splitter and ReasoningSplitter(splitter.marks, splitter.inside)
        only_one = self._body.parallel_tool_calls is False
        return ChatChoice(index, own, self._parser(), self._style, num_calls(self._body), only_one)

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
            self.take(event)
        choices = [self._whole_choice(choice) for choice in self._choices]
        first = head("chat.completion", "chatcmpl", self._context.name_of(self._body), self._body.request_id)
        return {**first, **self._prompt_ids, **self._prompt_logprobs, "choices": choices, **self.ends()}

    def ends(self) -> dict[str, Any]:
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

    def _usage_so_far(self, choice: ChatChoice) -> dict[str, Any]:
        """Usage of one choice so far, for a stream piece, where `continuous_usage_stats` was asked for."""
        options = self._body.stream_options
        if options is None or not options.continuous_usage_stats:
            return {}
        return {"usage": token_counts(len(self._prompt), len(choice.token_ids))}

    def take(self, event: Event) -> tuple[ChatChoice, list[dict[str, Any]], list[dict[str, Any]]]:
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
            new = [part for part in new if "reasoning_content" not in part]
        return choice, new, logprobs

    def _whole_choice(self, choice: ChatChoice) -> dict[str, Any]:
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

    def _finish_reason(self, choice: ChatChoice) -> str | None:
        return old_finish_reason(choice.finish_reason) if self._body.functions else choice.finish_reason

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in pieces."""
        first = head("chat.completion.chunk", "chatcmpl", self._context.name_of(self._body), self._body.request_id)
        for choice in self._choices:
            opening = _chunk_choice(choice.index, {"role": "assistant", "content": ""})
            yield {**first, **self._prompt_ids, "choices": [opening], **self._usage_so_far(choice)}
        async for event in generation.events():
            choice, new, logprobs = self.take(event)
            ids = {"token_ids": event.delta.token_ids} if self._body.return_token_ids else {}
            for made in self._chunks(choice, new, logprobs, ids):
                yield {**first, "choices": [made], **self._usage_so_far(choice)}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**first, "choices": [], **self.ends()}

    def _chunks(
        self, choice: ChatChoice, new: list[dict[str, Any]], logprobs: list[dict[str, Any]], ids: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """A chunk for each part of the message; the first has the token ids, the last the finish reason.

        Log-probabilities belong to the first text, if there is one: the call before it has none.
        """
        if not (new or logprobs or ids or choice.finish_reason):
            return []
        parts = [old_message(part) for part in new] if self._body.functions else new
        made = [_chunk_choice(choice.index, part) for part in parts or [{}]]
        made[0] |= ids
        if self._body.logprobs:
            first_text = next((chunk for chunk in made if "content" in chunk["delta"]), made[0])
            first_text["logprobs"] = {"content": logprobs}
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


def _splitter(context: ServerContext, prompt: str, said: str | None) -> ReasoningSplitter | None:
    """The splitter an answer to this prompt needs; samples get copies. `said`: what the answer continues."""
    marks = context.reasoning_marks
    if marks is None or not may_think(prompt, marks):
        return None
    inside = starts_inside(prompt, marks, said)
    return None if said is not None and not inside else ReasoningSplitter(marks, inside)
