"""POST /v1/completions: from a request to prompts, from deltas to answers.

Knows: OpenAI's completion answers, whole and streamed. Does not know: the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.core import PositionLogprobs
from forerun.server.answers import Account, completion_logprobs, head
from forerun.server.context import ServerContext
from forerun.server.errors import ApiError
from forerun.server.generation import Event, Generation
from forerun.server.params import check_fields, engine_options, sampling_params
from forerun.server.schema import CompletionBody
from forerun.server.structured import grammar_spec

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_LOGPROBS = 20


@dataclass(slots=True)
class _Choice:
    """One sample's answer as it grows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionJob:
    """One completion request, checked: what to generate, and how to answer."""

    def __init__(self, context: ServerContext, body: CompletionBody) -> None:
        """Raises ApiError or PromptError for whatever is wrong with the request. Takes a while: not for event loops."""
        check_fields(body)
        self._context = context
        self._body = body
        self._check()
        spec = grammar_spec(body)
        logprobs = {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
        others = {"max_tokens": self._max_tokens, **logprobs}
        options = engine_options(body, context.drafter, context.settings.timeout_s)
        context.check_samples((body.n or 1) * len(prompts_of(body)))
        self._prompts = [self._encode(prompt) for prompt in prompts_of(body)]
        self.groups = []
        for prompt in self._prompts:
            params = sampling_params(body, **others, grammar=context.grammars.mask(spec) if spec else None)
            self.constrained = context.is_constrained(params)
            self.groups.append(context.llm.prepare(prompt, params, **options))
        self._num_samples = params.n
        self._choices = [_Choice(i) for i in range(params.n * len(self._prompts))]
        self._account = Account(len(self._prompts))

    def _check(self) -> None:
        body = self._body
        if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"logprobs must be from 0 to {MAX_LOGPROBS}, got {body.logprobs}", param="logprobs")
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs cannot be streamed: leave one out", param="echo")
        if body.max_tokens == 0 and (not body.echo or body.stream):
            raise ApiError(400, "max_tokens 0 is for echo without stream; give at least 1", param="max_tokens")

    @property
    def _max_tokens(self) -> int:
        """At least one: the model always chooses a token, which max_tokens 0 then leaves out."""
        return DEFAULT_MAX_TOKENS if self._body.max_tokens is None else self._body.max_tokens or 1

    def _encode(self, prompt: str | list[int]) -> list[int]:
        add_special = self._body.add_special_tokens is not False
        tokens = self._context.tokenizer.encode(prompt, add_special) if isinstance(prompt, str) else prompt
        self._context.check_prompt(tokens)
        return tokens

    # -- how to answer ------------------------------------------------------------------------------------------

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        async for event in generation.events():
            self._take(event)
        choices = [self._whole_choice(choice) for choice in self._choices]
        first = head("text_completion", "cmpl", self._context.model_name)
        return {**first, "choices": choices, "usage": self._account.usage(), "forerun": self._account.forerun()}

    def _take(self, event: Event) -> _Choice:
        delta = event.delta
        choice = self._choices[event.prompt_index * self._num_samples + delta.index]
        self._account.add(event.prompt_index, delta)
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.finish_reason, choice.stop_reason = delta.finish_reason, self._context.stop_reason(delta)
        return choice

    def _whole_choice(self, choice: _Choice) -> dict[str, Any]:
        text, logprobs = self._echoed(choice) if self._body.echo else (choice.text, self._logprobs(choice))
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **(self._ids(choice) if self._body.return_token_ids else {}),
        }

    def _ids(self, choice: _Choice) -> dict[str, Any]:
        """What vLLM's `return_token_ids` asks for; an answer nobody wanted (`max_tokens` 0) has none."""
        written = [] if self._body.max_tokens == 0 else choice.token_ids
        return {"token_ids": written, "prompt_token_ids": self._prompts[choice.index // self._num_samples]}

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return completion_logprobs(self._context.tokenizer, choice.token_ids, choice.logprobs, 0)

    def _echoed(self, choice: _Choice) -> tuple[str, dict[str, Any] | None]:
        """Prompt and answer together, and the log-probabilities of both."""
        place = choice.index // self._num_samples
        prompt_text = self._prompt_text(place)
        nothing = self._body.max_tokens == 0
        text = prompt_text if nothing else prompt_text + choice.text
        if self._body.logprobs is None:
            return text, None
        prompt_entries: Sequence[PositionLogprobs | None] = self.groups[place].output().prompt_logprobs or ()
        tokens = [*self._prompts[place], *(() if nothing else choice.token_ids)]
        entries = [*prompt_entries, *(() if nothing else choice.logprobs)]
        return text, completion_logprobs(self._context.tokenizer, tokens, entries, 0)

    def _prompt_text(self, place: int) -> str:
        given = prompts_of(self._body)[place]
        return given if isinstance(given, str) else self._context.tokenizer.decode(given)

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in pieces."""
        first = head("text_completion", "cmpl", self._context.model_name)
        if self._body.echo:
            for choice in self._choices:
                text = self._prompt_text(choice.index // self._num_samples)
                yield {**first, "choices": [_piece(choice.index, text)]}
        async for event in generation.events():
            yield {**first, "choices": [self._chunk(event)]}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**first, "choices": [], "usage": self._account.usage(), "forerun": self._account.forerun()}

    def _chunk(self, event: Event) -> dict[str, Any]:
        delta, offset = event.delta, len(self._choices[self._place(event)].text)
        choice = self._take(event)
        made = _piece(choice.index, delta.text, delta.finish_reason)
        if self._body.logprobs is not None:
            made["logprobs"] = completion_logprobs(self._context.tokenizer, delta.token_ids, delta.logprobs, offset)
        if delta.finish_reason is not None:
            made["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            is_first = len(choice.token_ids) == len(delta.token_ids)
            made |= {**(self._ids(choice) if is_first else {}), "token_ids": delta.token_ids}
        return made

    def _place(self, event: Event) -> int:
        return event.prompt_index * self._num_samples + event.delta.index


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a request, one or many, as texts or token ids. Raises ApiError 400 if there is none."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "prompt is an empty list: give at least one prompt", param="prompt")
    if isinstance(given[0], int):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise ApiError(400, f"{len(given)} prompts; the most in one request is {MAX_PROMPTS}", param="prompt")
    return list(given)


def _piece(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
