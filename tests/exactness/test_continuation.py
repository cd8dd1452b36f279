"""A request that another engine goes on with: the rest is what the first would have written, from every token on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core import CompletionOutput, PositionLogprobs, TokenBits
from forerun.engine.outputs import RequestGroup
from forerun.errors import PromptError
from forerun.server.streams import Sent, delta_of
from tests.support import mini

PROMPT = mini.PROMPTS[0]
NUM_TOKENS = 14
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7},
    "filters": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bad words": {"temperature": 0.7, "bad_words": ("the", "little fox")},
    "log-probabilities": {"temperature": 0.7, "logprobs": 2},
    "prompt log-probabilities": {"temperature": 0.7, "logprobs": 1, "prompt_logprobs": 1},
    "stop strings": {"temperature": 0.7, "stop": ("zzz", "qqq")},
    "samples": {"temperature": 0.9, "n": 2},
    "late end": {"temperature": 1.0, "min_tokens": 8, "ignore_eos": False},
}


class Spaced:
    """A mask that depends on the whole prefix: bits of every third token, by the sum of those before."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBits:
        packed = bytearray((self._vocab_size + 31) // 32 * 4)
        for token in range(sum(output_token_ids) % 3, self._vocab_size, 3):
            packed[token // 8] |= 1 << token % 8
        return TokenBits(bytes(packed))


@pytest.fixture(scope="module", params=["none", "suffix", "draft", "eagle"])
def other(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The engine that goes on, with a drafter of its own."""
    options = {"draft_model": "mini-draft"} if request.param == "draft" else {}
    yield mini.drafting(request.param, **options)


def answered(llm: LLM, groups: list[RequestGroup]) -> list[list[CompletionOutput]]:
    for group in groups:
        llm.start(group)
    while not all(group.finished for group in groups):
        llm.step()
    return [group.output().outputs for group in groups]


def rest_of(entries: tuple[PositionLogprobs, ...] | None, num_tokens: int) -> tuple[PositionLogprobs, ...] | None:
    return None if entries is None else entries[num_tokens:]


def check(other: LLM, params: SamplingParams) -> list[CompletionOutput]:
    """Every place where it may be cut, all at once -> the whole answer."""
    plain = mini.plain()
    (whole,) = plain.generate([PROMPT], params)
    seeded = params.with_seed(whole.outputs[0].seed)
    places = [
        {sample.index: sample.token_ids[:cut] for sample in whole.outputs if cut < len(sample.token_ids)}
        for cut in range(max(len(sample.token_ids) for sample in whole.outputs))
    ]
    groups = [other.prepare(PROMPT, seeded, written=written) for written in places]
    for group, written, found in zip(groups, places, answered(other, groups), strict=True):
        assert [sample.index for sample in found] == sorted(written)
        for sample in found:
            expected, num = whole.outputs[sample.index], len(written[sample.index])
            assert sample.token_ids == expected.token_ids
            assert sample.text == expected.text
            assert (sample.finish_reason, sample.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert sample.logprobs == rest_of(expected.logprobs, num)
            assert len(sample.token_sources) == len(sample.token_ids) == sample.stats.num_tokens
            assert sample.stats.num_cached_tokens <= sample.stats.num_prompt_tokens
        if 0 in written:
            assert group.output().prompt_logprobs == whole.prompt_logprobs
    return whole.outputs


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_rest_is_the_same_wherever_the_answer_is_cut(other: LLM, kind: str) -> None:
    check(other, SamplingParams(**{**LONG, **KINDS[kind]}))


def test_under_a_grammar(other: LLM) -> None:
    grammar = Spaced(other.vocab_size)
    check(other, SamplingParams(**LONG, temperature=0.8, grammar=grammar))


def test_a_stop_string_that_began_before_the_cut_ends_the_answer(other: LLM) -> None:
    text = mini.plain().generate([PROMPT], SamplingParams(**LONG, temperature=0.7))[0].outputs[0].text
    for stop in (text[9:15], text[6:24]):  # over several tokens, one of them over more
        for shown in (False, True):
            params = SamplingParams(**LONG, temperature=0.7, stop=(stop,), include_stop_str_in_output=shown)
            assert check(other, params)[0].finish_reason == "stop"


def test_pieces_of_the_text_are_those_an_unbroken_stream_would_have_brought() -> None:
    """What a server sends of the rest continues what was sent, held-back text included."""
    plain = mini.plain()
    text = plain.generate([PROMPT], SamplingParams(**LONG, temperature=0.7))[0].outputs[0].text
    almost = text[5:11] + "~"  # begins in the text, and never ends there
    params = SamplingParams(**LONG, temperature=0.7, stop=(almost,), logprobs=1)
    (whole,) = plain.generate([PROMPT], params)
    tokens = whole.outputs[0].token_ids
    for cut in range(len(tokens)):
        first = plain.prepare(PROMPT, replace(params, max_tokens=None), written={0: tokens[:cut]}).samples[0]
        sent = Sent(len(first.text.visible()), first.request.num_output)
        before = first.text.visible()
        group = plain.prepare(PROMPT, params, written={0: tokens[:cut]})
        answered(plain, [group])
        delta = delta_of(group.samples[0], sent)
        assert before + delta.text == whole.outputs[0].text
        assert delta.token_ids == tokens[cut:] and len(delta.logprobs) == len(tokens) - cut


def test_nothing_follows_an_answer_that_has_ended() -> None:
    plain = mini.plain()
    for params in (SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=9, seed=1, stop=(" ",))):
        tokens = plain.generate([PROMPT], params)[0].outputs[0].token_ids
        with pytest.raises(PromptError, match="ends the answer"):
            plain.prepare(PROMPT, params, written={0: (*tokens, 5)})
