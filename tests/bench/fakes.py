"""A stand-in for LLM whose answers are a formula, for tests of what measures and compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.core import CompletionOutput, RequestOutput, RequestStats, SamplingParams


class FakeTokenizer:
    """One token a character; chats are the contents with a mark in front of each."""

    chat_template: str | None = "fake"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{m['role'][0]}>{m['content']}" for m in messages))


class FakeLLM:
    """Answers with letters that depend on the prompt's length and the seed; `wrong_at` spoils one position."""

    adapters: Mapping[str, object] = {}

    def __init__(self, seconds_a_token: float = 0.01, wrong_at: int | None = None, max_model_len: int = 1000) -> None:
        self.tokenizer = FakeTokenizer()
        self.max_model_len = max_model_len
        self.prompts: list[str] = []
        self.batch_sizes: list[int] = []
        self.loras: list[str | None] = []
        self._seconds_a_token = seconds_a_token
        self._wrong_at = wrong_at

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], lora: Sequence[str | None]
    ) -> list[RequestOutput]:
        self.loras += lora
        self.batch_sizes.append(len(prompts))
        self.prompts += ["".join(map(chr, prompt)) for prompt in prompts]
        return [self._output(prompt, given) for prompt, given in zip(prompts, params, strict=True)]

    def _output(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        num_tokens = params.max_tokens or 1
        token_ids = [97 + (len(prompt) + (params.seed or 0) + i) % 26 for i in range(num_tokens)]
        if self._wrong_at is not None and self._wrong_at < num_tokens:
            token_ids[self._wrong_at] = 33
        seconds = self._seconds_a_token
        stats = RequestStats(num_tokens=num_tokens, num_first=1, num_steps=num_tokens, ttft_s=seconds)
        stats.decode_s = seconds * (num_tokens - 1)
        text = "".join(map(chr, token_ids))
        answer = CompletionOutput(0, text, tuple(token_ids), "length", None, params.seed or 0, ("",) * num_tokens)
        answer.stats = stats
        return RequestOutput("0", None, tuple(prompt), [answer], finished=True)
