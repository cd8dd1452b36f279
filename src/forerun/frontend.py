"""From what users ask to requests of the engine: what is refused, which seed, where it ends.

Knows: prompts, sampling parameters, adapters' names, how far an answer has come elsewhere. Does not know: weights, an
engine: a process that only passes requests on to others prepares them here, too.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Any, Protocol

from forerun.config import EngineConfig
from forerun.core import Request, SamplingParams
from forerun.drafters.registry import check_prediction
from forerun.engine.outputs import RequestGroup, SampleRecord
from forerun.engine.stopping import OutputText
from forerun.errors import PromptError, SamplingError, UnknownAdapterError, suggestion
from forerun.weights.detokenizer import IncrementalDetokenizer
from forerun.weights.tokenizer import Tokenizer

Prompt = str | Sequence[int]
DRAWN_SEED_BITS = 53  # of seeds that nobody gave: answers report them, and JSON's numbers are exact up to there
CHARACTERS = 16  # that a token rarely has more of: texts far beyond what fits are not tokenized whole


class NamedAdapter(Protocol):
    """A LoRA adapter, as requests know it."""

    @property
    def path(self) -> str:
        """The folder it was read from."""


class Frontend(ABC):
    """Prepares the requests of one model."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._counter = count()
        self._seeds = random.Random(config.seed)

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Rows of the model's logits."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Tokens a request may have, prompt and output together."""

    @property
    @abstractmethod
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's own sampling parameters."""

    @property
    @abstractmethod
    def adapters(self) -> Mapping[str, NamedAdapter]:
        """The LoRA adapters that are loaded, by name."""

    def sampling_params(self, **given: Any) -> SamplingParams:
        """SamplingParams with the model's own defaults where none is given."""
        return SamplingParams(**{**self.sampling_defaults, **given})

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora: str | None = None,
        written: Mapping[int, Sequence[int]] | None = None,
        **options: Any,
    ) -> RequestGroup:
        """A checked request that is not queued yet; may be called beside a running step.

        `written`: the tokens that samples have had elsewhere, by their index: only those are made, and they go on
        behind these tokens as if all had been chosen here. `options` are fields of `Request`: speculate, drafter,
        max_nodes, priority, deadline_s, prediction (ids). Raises PromptError and SamplingError.
        """
        group = self._group(prompt, sampling_params or self.sampling_params(), lora)
        for sample in group.samples:
            for name, value in options.items():
                setattr(sample.request, name, value)
        if written is not None:
            group.samples = [group.samples[index] for index in sorted(written)]
            for sample in group.samples:
                sample.go_on_after(written[sample.request.sample_index])
        return group

    def predicted(self, text: str) -> tuple[int, ...]:
        """The ids of a prediction, as many as can be repeated. Raises ConfigError if no drafter would read it."""
        check_prediction(self.config.drafter)
        ids = self.tokenizer.encode(text[: CHARACTERS * self.max_model_len], add_special_tokens=False)
        return tuple(islice(filter(self._has_row, ids), self.max_model_len))

    def _adapter(self, name: str | None) -> NamedAdapter | None:
        if name is None:
            return None
        adapters = self.adapters  # read once: other threads may load and unload meanwhile
        if name not in adapters:
            known = ", ".join(adapters) or "none"
            raise UnknownAdapterError(
                f"there is no adapter {name!r:.100}; loaded are {known}: load it with the option lora or load_adapter"
                f"{suggestion(str(name), adapters)}"
            )
        return adapters[name]

    def _group(
        self, prompt: Prompt, params: SamplingParams, lora: str | None, prediction: str | None = None
    ) -> RequestGroup:
        if isinstance(prompt, Mapping) and len(prompt) == 1:  # vLLM's forms of a text and of token ids
            prompt = prompt.get("prompt", prompt.get("prompt_token_ids", prompt))
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
            raise PromptError(f"a prompt is text or a list of token ids, not {type(prompt).__name__} ({prompt!r:.60})")
        if not isinstance(params, SamplingParams):
            raise SamplingError(f"sampling parameters are SamplingParams, not {type(params).__name__} ({params!r:.60})")
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_prompt(token_ids, params)
        self._check_params(params)
        group_id = str(next(self._counter))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(DRAWN_SEED_BITS)
        words = self._bad_word_ids(params.bad_words)
        expected = () if prediction is None else self.predicted(prediction)
        given = tuple(token_ids), params, seed, words, self._adapter(lora), expected
        requests = [self._request(group_id, i, *given) for i in range(params.n)]
        samples = [SampleRecord(r, OutputText(r, self._detokenizer(r))) for r in requests]
        return RequestGroup(group_id, prompt if isinstance(prompt, str) else None, samples)

    def _request(
        self, group_id: str, index: int, token_ids: tuple[int, ...], params: SamplingParams, seed: int,
        bad_word_ids: tuple[tuple[int, ...], ...], adapter: NamedAdapter | None, prediction: tuple[int, ...],
    ) -> Request:  # fmt: skip
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        eos = () if params.ignore_eos else self.tokenizer.eos_token_ids
        return Request(
            request_id=f"{group_id}-{index}",
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            sample_index=index,
            parent_id=group_id,
            bad_word_ids=bad_word_ids,
            adapter=adapter,
            prediction=prediction[: 2 * max_tokens],  # more cannot be repeated, even if half of it is left out
            stop_token_ids=frozenset(filter(self._has_row, (*params.stop_token_ids, *eos))),
            max_len=len(token_ids) + max_tokens,
        )

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer:
        texts = self.tokenizer if request.params.skip_special_tokens else self.tokenizer.with_special_tokens()
        return IncrementalDetokenizer(texts, request.prompt_token_ids)

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at the start of a text and after a space."""
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        encoded = {tuple(self.tokenizer.encode(s, add_special_tokens=False)) for s in spellings}
        return tuple(sorted(ids for ids in encoded if ids and all(map(self._has_row, ids))))

    def _has_row(self, token_id: int) -> bool:
        """Whether the model can choose the token: special tokens may lie beyond its rows."""
        return token_id < self.vocab_size

    def _check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        vocab_size = self.vocab_size
        if not token_ids:
            raise PromptError("the prompt is empty: give at least one token (the tokenizer adds none by itself)")
        if len(token_ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(token_ids)} tokens, but the context holds {self.max_model_len} with at least one "
                "new token: shorten the prompt, or raise max_model_len (--max-model-len) as far as the model allows"
            )
        strange = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t < vocab_size), None)
        if strange is not None:
            raise PromptError(f"the prompt holds token id {strange!r}; the model knows 0 to {vocab_size - 1}")

    def _check_params(self, params: SamplingParams) -> None:
        named = (*params.logit_bias, *(params.allowed_token_ids or ()), *params.stop_token_ids)
        strange = next((t for t in named if t < 0 or not self._has_row(t)), None)
        if strange is not None:
            known = f"the model knows 0 to {self.vocab_size - 1}"
            raise SamplingError(f"a sampling parameter names token id {strange}; {known}")
