"""LLM: the offline API. Load a model once, generate for many prompts.

Knows: text, chat, loading. Does not know: how requests are prepared, how a step works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Self

import torch

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import RequestOutput, SamplingParams
from forerun.drafters.base import DrafterHealth
from forerun.drafters.named import engine_config, is_chosen_by_target
from forerun.drafters.registry import check_heads, draft_models, named_heads
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.errors import ConfigError, RankLost, SamplingError
from forerun.frontend import Frontend, Prompt
from forerun.kernels.ops import Kernels
from forerun.models.adapted import LoraAdapter
from forerun.models.loader import LoadedModel
from forerun.models.trimmed import check_draft_vocabularies
from forerun.opening import SharedModel, check_ranks, open_shared
from forerun.progress import progress_bar
from forerun.tiering import check_tiers, check_unchanged
from forerun.weights.corpus import open_corpus
from forerun.weights.resolve import find_local, resolve_model
from forerun.weights.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM(Frontend):
    """A loaded model and an engine that runs it.

    `options` are the fields of EngineConfig and DrafterConfig; `drafter` is the drafter's name and `draft_model` its
    model. Raises ConfigError, ModelError and ResourceError before any work starts.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = engine_config(model, options)
        if is_chosen_by_target(options.get("drafter")) and find_local(model) is None:
            resolve_model(model)  # what it offers is known once it is here
            config = engine_config(model, options)
        self._open(config, None)

    def _open(self, config: EngineConfig, shared: SharedModel | None) -> None:
        Frontend.__init__(self, config)
        check_ranks(config)
        check_heads(config.drafter)
        check_draft_vocabularies(config.drafter, config.model)
        check_tiers(config)
        self._shared = shared or open_shared(config)
        loaded, drafts = self._shared.loaded, self._shared.drafts
        try:
            self.engine: Engine = assemble(
                config, loaded.model, self._shared.kernels, named_heads(drafts.load), loaded.folder,
                partial(open_corpus, tokenizer=loaded.tokenizer), drafts.translation,
            )  # fmt: skip
            check_unchanged(config, [loaded, *drafts.among(draft_models(config.drafter))])
        except BaseException:
            if shared is None:
                self.close()  # nobody else has the other ranks
            raise

    def with_drafter(self, drafter: str | DrafterConfig, **options: Any) -> LLM:
        """Another engine with another drafter (and other engine options) on the same weights and kernels.

        Read as in the constructor; engine options not given stay. Those weights and kernels depend on may not change.
        """
        kept = {
            f.name: getattr(self.config, f.name) for f in fields(EngineConfig) if f.name not in ("model", "drafter")
        }
        config = engine_config(self.config.model, {**kept, **options, "drafter": drafter})
        config.check_loaded_as(self.config)
        other = object.__new__(LLM)
        other._open(config, self._shared)
        return other

    def close(self) -> None:
        """End the processes of other ranks, where there are any, for all engines on these weights."""
        if self._shared.crew is not None:
            self._shared.crew.close()

    def __enter__(self) -> Self:
        """`with LLM(...) as llm:` closes it at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_rank_lost(self, tell: Callable[[RankLost], None]) -> None:
        """Have `tell` called, on another thread, when another rank is lost; this engine cannot go on then."""
        if self._shared.crew is not None:
            self._shared.crew.on_failure.append(tell)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._shared.loaded.tokenizer

    @property
    def loaded(self) -> LoadedModel:
        """The target: model, configuration and tokenizer."""
        return self._shared.loaded

    @property
    def kernels(self) -> Kernels:
        """The op table in use."""
        return self._shared.kernels

    @property
    def vocab_size(self) -> int:
        """Rows of the model's logits."""
        return self._shared.loaded.model.vocab_size

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's own sampling parameters."""
        return self._shared.loaded.sampling

    @property
    def max_model_len(self) -> int:
        """Tokens a request may have, prompt and output together."""
        return self.engine.scheduler.max_model_len

    @property
    def timings(self) -> dict[str, float]:
        """Cumulative seconds by phase of the step, and the number of steps."""
        clock = self.engine.timings
        return {f.name: getattr(clock, f.name) for f in fields(clock) if not f.name.startswith("_")}

    # -- adapters -----------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, LoraAdapter]:
        """The LoRA adapters that are loaded, by name."""
        return self._shared.adapters

    def load_adapter(self, name: str, path: str, in_place: bool = False) -> None:
        """Load a folder that PEFT saved, for requests that name it, of all engines on these weights.

        in_place: it may replace an adapter of this name; requests that have that one keep it to their end. Not beside a
        running step. Raises ConfigError for a name that is taken, and ModelError.
        """
        if name in self.adapters and not in_place:
            raise ConfigError(f"there is an adapter {name!r} already, from {self.adapters[name].path}: unload it first")
        adapter = self._shared.read_adapter(name, path)
        self._shared.adapters = {**self.adapters, name: adapter}  # others may be reading the old one

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it keep it to their end. Raises UnknownAdapterError."""
        gone = self._adapter(name)
        self._shared.adapters = {own: adapter for own, adapter in self.adapters.items() if adapter is not gone}

    # -- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        lora: str | Sequence[str | None] | None = None,
        prediction: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text, or token ids) -> one output a prompt, in order.

        lora: the name of an adapter, or one a prompt, None for the model alone. prediction: text that the answer is
        expected to repeat in large part, or one a prompt; it changes the speed, never the answer. Raises PromptError,
        ConfigError and QueueFullError before any work starts. A request that fails while running ends with
        finish_reason "error"; the others go on.
        """
        listed = _as_prompts(prompts)
        given = self.sampling_params() if sampling_params is None else sampling_params
        params = _each(given, SamplingParams, len(listed), "sampling parameters")
        names = _each(lora, (str, type(None)), len(listed), "adapters")
        texts = _each(prediction, (str, type(None)), len(listed), "predictions")
        groups = [self._group(*each) for each in zip(listed, params, names, texts, strict=True)]
        self._queue(groups)
        self._run(groups, progress)
        return [group.output() for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        lora: str | Sequence[str | None] | None = None,
        prediction: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        is_one = isinstance(messages, str | Mapping) or (messages and isinstance(messages[0], Mapping))
        conversations: Any = [messages] if is_one else messages
        return self.generate([self.render_chat(c) for c in conversations], sampling_params, progress, lora, prediction)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        lora: str | None = None,
        prediction: str | None = None,
    ) -> Generator[RequestOutput]:
        """Complete one prompt or conversation -> an output whenever there is more of it. Closing the generator aborts.

        The request is queued at once. Streams may be read in turns, and beside calls of `generate`: whoever steps
        steps for all, and what a stream was given meanwhile comes with its next output.
        """
        given: Any = prompt
        if isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            given = self.render_chat(given)
        group = self._group(given, sampling_params or self.sampling_params(), lora, prediction)
        self.engine.add(group)
        outputs = self._stream(group)
        next(outputs)  # only what has begun is told when it is closed
        return outputs

    def _stream(self, group: RequestGroup) -> Generator[RequestOutput]:
        """What the request is before its first step, then each change of it."""
        num_seen = group.num_events
        try:
            yield group.output()
            while num_seen < group.num_events or not group.finished:
                if num_seen == group.num_events:
                    self.step()
                else:
                    num_seen = group.num_events
                    yield group.output()
        finally:
            self.engine.abort(group.request_id)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the answer begins."""
        return self.tokenizer.encode_chat(messages)

    def _queue(self, groups: Sequence[RequestGroup]) -> None:
        """All of them or none."""
        try:
            for group in groups:
                self.engine.add(group)
        except BaseException:
            for group in groups:
                self.engine.abort(group.request_id)
            raise

    def _run(self, groups: Sequence[RequestGroup], progress: bool) -> None:
        own, left = {group.request_id for group in groups}, deque(groups)
        with progress_bar("requests", len(groups), progress) as advance:
            try:
                while left:
                    if left[0].finished:
                        left.popleft()
                    else:
                        advance(sum(group.finished and group.request_id in own for group in self.step()))
            except BaseException:
                for group in groups:
                    self.engine.abort(group.request_id)
                raise

    # -- for servers: requests come and go while the engine runs; one thread starts, steps and aborts ------------

    def start(self, group: RequestGroup) -> None:
        """Queue a prepared request."""
        self.engine.add(group)

    def step(self) -> list[RequestGroup]:
        """Advance what is running by one pass of the target -> the requests that changed."""
        with torch.inference_mode():
            return self.engine.step()

    def drafter_health(self) -> Mapping[str, DrafterHealth]:
        """How the drafters fare, by name."""
        return self.engine.drafter.health

    def abort(self, request_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored."""
        self.engine.abort(request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, bytes | Mapping)
    found: list[Any] = list(prompts) if is_list else [prompts]
    if is_list and found and all(isinstance(p, int) for p in found):
        return [found]
    return found


def _each(given: Any, kinds: type | tuple[type, ...], num: int, what: str) -> list[Any]:
    """One for every prompt, from one for all or a list."""
    if isinstance(given, kinds):
        return [given] * num
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise SamplingError(f"{what} are {names}, or a list of these, not {type(given).__name__} ({given!r:.60})")
    if len(given) != num:
        raise SamplingError(f"{len(given)} {what} were given for {num} prompts: give one, or one each")
    return list(given)
