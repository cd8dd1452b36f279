"""POST /v1/completions: from a request to prompts, from deltas to answers.

Knows: OpenAI's completion answers, whole and streamed. Does not know: the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from forerun.core import PositionLogprobs
from forerun.server.answers import (
    Account,
    Offsets,
    completion_logprobs,
    head,
    prompt_logprobs,
    prompt_offsets,
    token_counts,
)
from forerun.server.context import ServerContext, dropped_fields
from forerun.server.errors import ApiError, unsupported
from forerun.server.generation import Event, Generation
from forerun.server.grammar_masks import PrefixMask
from forerun.server.params import check_fields, engine_options, sampling_params, token_limit
from forerun.server.schema import CompletionBody
from forerun.server.structured import grammar_spec

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_LOGPROBS = 20
FILL_MARKS = (  # marks before the prefix, before the suffix, and before the middle that the model writes
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)


@dataclass(slots=True)
class _CompletionChoice:
    """One sample's answer as it grows."""

    index: int
    offsets: Offsets
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionJob:
    """One completion request, checked: what to generate, and how to answer."""

    def __init__(self, context: ServerContext, body: CompletionBody) -> None:
        """Raises ApiError or PromptError for whatever is wrong with the request. Takes a while: not for event loops."""
        check_fields(body)
        self._context = context
        self._body = body
        options = engine_options(body, context.drafter, context.settings.timeout_s)
        self.grammar_s: float | None = None
        self._check()
        echoed = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
        logprobs = {"logprobs": body.logprobs, "prompt_logprobs": max(echoed, default=None)}
        others = {"max_tokens": self._max_tokens, **logprobs}
        context.check_samples((body.n or 1) * len(prompts_of(body)))
        self._prompts = [self._encode(prompt) for prompt in prompts_of(body)]
        masks = [self._mask(options.get("deadline_s")) for _ in self._prompts]
        params = sampling_params(body, context.llm.sampling_defaults, **others, grammar=masks[0])
        self.constrained = context.is_constrained(params)
        self.groups = [
            context.llm.prepare(prompt, replace(params, grammar=mask), context.adapter_of(body), **options)
            for prompt, mask in zip(self._prompts, masks, strict=True)
        ]
        self._num_samples = params.n
        self._choices = [self._choice(i) for i in range(params.n * len(self._prompts))]
        self._account = Account(
            len(self._prompts), self.grammar_s, dropped_fields(body), writes=not self._writes_nothing
        )

    def _mask(self, deadline_s: float | None) -> PrefixMask | None:
        """The mask of one prompt's samples."""
        spec = grammar_spec(self._body)
        if spec is None:
            return None
        started = perf_counter()
        mask = self._context.grammars.mask(spec, deadline_s)
        self.grammar_s = (self.grammar_s or 0.0) + perf_counter() - started
        return mask

    def _check(self) -> None:
        body = self._body
        if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"logprobs must be from 0 to {MAX_LOGPROBS}, got {body.logprobs}", param="logprobs")
        if body.echo and body.stream and body.logprobs is not None:
            raise ApiError(400, "echo with logprobs cannot be streamed: leave one out", param="echo")
        if body.max_tokens == 0 and (body.stream or not (body.echo or body.prompt_logprobs is not None)):
            says = "max_tokens 0 is for echo or prompt_logprobs, without stream; give at least 1"
            raise ApiError(400, says, param="max_tokens")
        if body.suffix and body.echo:
            raise ApiError(400, "suffix and echo contradict each other: leave one out", param="suffix")

    @property
    def _writes_nothing(self) -> bool:
        return self._body.max_tokens == 0

    @property
    def _max_tokens(self) -> int | None:
        """At least one: the model always chooses a token; with max_tokens 0 the answer leaves it out."""
        return 1 if self._writes_nothing else token_limit(self._body.max_tokens, DEFAULT_MAX_TOKENS)

    def _encode(self, prompt: str | list[int]) -> list[int]:
        body = self._body
        if body.add_special_tokens and not isinstance(prompt, str):
            raise ApiError(400, "add_special_tokens is for texts: put the tokens' ids into the prompt",
                           param="add_special_tokens")  # fmt: skip
        tokens = self._around(prompt) if body.suffix else self._plain(prompt, body.add_special_tokens is not False)
        tokens = self._context.truncated(tokens, body.truncate_prompt_tokens, self._max_tokens)
        self._context.check_prompt(tokens)
        return tokens

    def _plain(self, text: str | list[int], add_special_tokens: bool) -> list[int]:
        whole = self._body.truncate_prompt_tokens is None
        return self._context.encode(text, add_special_tokens, whole=whole) if isinstance(text, str) else text

    def _around(self, prompt: str | list[int]) -> list[int]:
        """The prompt of a request with `suffix`: the text before the gap, the text after it, and the gap's mark."""
        tokenizer = self._context.tokenizer
        found = ([tokenizer.token_id(name) for name in names] for names in FILL_MARKS)
        before, behind, gap = next((ids for ids in found if None not in ids), (None, None, None))
        if before is None or behind is None or gap is None:
            raise unsupported("suffix", "suffix: this model's tokenizer has no tokens for filling in: leave it out")
        start = self._plain("", self._body.add_special_tokens is not False)[:1]  # perhaps a start token
        start = start if start == [tokenizer.bos_token_id] else []
        suffix = self._plain(self._body.suffix or "", False)
        return [*start, before, *self._plain(prompt, False), behind, *suffix, gap]

    def _choice(self, index: int) -> _CompletionChoice:
        prompt = self._prompts[index // self._num_samples]
        return _CompletionChoice(
            index, Offsets(self._context.texts_after(prompt, self._body.skip_special_tokens is not False))
        )

    # -- how to answer ------------------------------------------------------------------------------------------

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""
        async for event in generation.events():
            self._take(event)
        choices = [self._whole_choice(choice) for choice in self._choices]
        first = self._head()
        return {**first, "choices": choices, "usage": self._account.usage(), "forerun": self._account.forerun()}

    def _head(self) -> dict[str, Any]:
        return head("text_completion", "cmpl", self._context.name_of(self._body), self._body.request_id)

    def _take(self, event: Event) -> _CompletionChoice:
        delta = event.delta
        choice = self._choices[self._place(event)]
        self._account.add(event.prompt_index, delta)
        choice.text += self._text(event)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        choice.text_offsets += choice.offsets.take(delta.token_ids) if self._body.logprobs is not None else ()
        choice.finish_reason, choice.stop_reason = delta.finish_reason, self._context.stop_reason(delta)
        return choice

    def _text(self, event: Event) -> str:
        return "" if self._body.detokenize is False else event.delta.text

    def _whole_choice(self, choice: _CompletionChoice) -> dict[str, Any]:
        text = "" if self._writes_nothing else choice.text
        text, logprobs = self._echoed(choice) if self._body.echo else (text, self._logprobs(choice))
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._prompt_logprobs(choice),
            **(self._ids(choice) if self._body.return_token_ids else {}),
        }

    def _ids(self, choice: _CompletionChoice) -> dict[str, Any]:
        """What vLLM's `return_token_ids` asks for; with `max_tokens` 0 there are no answer tokens."""
        written = [] if self._writes_nothing else choice.token_ids
        return {"token_ids": written, "prompt_token_ids": self._prompts[choice.index // self._num_samples]}

    def _logprobs(self, choice: _CompletionChoice) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        start = len(choice.token_ids) if self._writes_nothing else 0
        return self._positions(choice.token_ids[start:], choice.logprobs[start:], choice.text_offsets[start:])

    def _positions(
        self, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        as_ids = self._body.return_tokens_as_token_ids or False
        return completion_logprobs(self._context.tokenizer, token_ids, entries, offsets, as_ids)

    def _prompt_logprobs(self, choice: _CompletionChoice) -> dict[str, Any]:
        num_top, place = self._body.prompt_logprobs, choice.index // self._num_samples
        if num_top is None:
            return {}
        entries, as_ids = self._prompt_entries(place, num_top), self._body.return_tokens_as_token_ids or False
        return {"prompt_logprobs": prompt_logprobs(self._context.tokenizer, entries, as_ids)}

    def _prompt_entries(self, place: int, num_top: int) -> list[PositionLogprobs | None]:
        """The engine's entries cut to `num_top` alternatives: `logprobs` and `prompt_logprobs` may ask for more."""
        entries = self.groups[place].output().prompt_logprobs or ()
        return [entry and replace(entry, top=entry.top[:num_top]) for entry in entries]

    def _echoed(self, choice: _CompletionChoice) -> tuple[str, dict[str, Any] | None]:
        """Prompt and answer together, and the log-probabilities of both."""
        place = choice.index // self._num_samples
        prompt_text = self._prompt_text(place)
        text = prompt_text if self._writes_nothing else prompt_text + choice.text
        if self._body.logprobs is None:
            return text, None
        prompt, entries = self._prompts[place], self._prompt_entries(place, self._body.logprobs)
        offsets = prompt_offsets(self._context.tokenizer, prompt, prompt_text)
        if self._writes_nothing:
            return text, self._positions(prompt, entries, offsets)
        behind = [len(prompt_text) + offset for offset in choice.text_offsets]
        return text, self._positions([*prompt, *choice.token_ids], [*entries, *choice.logprobs], [*offsets, *behind])

    def _prompt_text(self, place: int) -> str:
        given = prompts_of(self._body)[place]
        is_whole = isinstance(given, str) and self._body.truncate_prompt_tokens is None
        return str(given) if is_whole else self._context.tokenizer.decode(self._prompts[place])

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in pieces."""
        first = self._head()
        if self._body.echo:
            for choice in self._choices:
                text = self._prompt_text(choice.index // self._num_samples)
                yield {**first, "choices": [_piece(choice.index, text)], **self._usage_so_far(choice)}
        async for event in generation.events():
            piece = self._chunk(event)
            yield {**first, "choices": [piece], **self._usage_so_far(self._choices[piece["index"]])}
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**first, "choices": [], "usage": self._account.usage(), "forerun": self._account.forerun()}

    def _usage_so_far(self, choice: _CompletionChoice) -> dict[str, Any]:
        """Usage of one choice so far, for a stream piece, where `continuous_usage_stats` was asked for."""
        options = self._body.stream_options
        if options is None or not options.continuous_usage_stats:
            return {}
        prompt = self._prompts[choice.index // self._num_samples]
        return {"usage": token_counts(len(prompt), len(choice.token_ids))}

    def _chunk(self, event: Event) -> dict[str, Any]:
        delta, choice = event.delta, self._take(event)
        made = _piece(choice.index, self._text(event), delta.finish_reason)
        if self._body.logprobs is not None:
            offsets = choice.text_offsets[len(choice.text_offsets) - len(delta.token_ids) :]
            made["logprobs"] = self._positions(delta.token_ids, delta.logprobs, offsets)
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
