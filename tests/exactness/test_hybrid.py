"""Drafts change no token of a model with recurrent layers, however requests are grouped, chunked and preempted."""

from __future__ import annotations

import pytest

from forerun import LLM, SamplingParams
from forerun.core import CompletionOutput
from tests.models import factory

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 10, 11, 9, 10, 11, 9], list(range(20, 43)), [5, 6, 7, 8, 5])
ENGINES: dict[str, dict[str, object]] = {
    "plain": {},
    "alone": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 5},
    "preempted": {"num_kv_blocks": 16, "block_size": 4, "max_model_len": 64},
}
DRAFTERS = ("none", "ngram", "suffix", "recycling", "portfolio=ngram+recycling")


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = factory.make_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"))
    return LLM(str(folder), max_num_seqs=1, threads=1)


def answers(llm: LLM, temperature: float) -> list[CompletionOutput]:
    params = SamplingParams(temperature=temperature, max_tokens=30, seed=1, ignore_eos=True, top_k=4)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_token(llm: LLM, temperature: float) -> None:
    expected, accepted = [answer.token_ids for answer in answers(llm, temperature)], 0
    for drafter in DRAFTERS:
        for options in ENGINES.values():
            own = {} if drafter == "none" else {"adaptive": False}
            made = llm.with_drafter(drafter, **own, **{"max_num_seqs": 4, **options})
            found = answers(made, temperature)
            assert [answer.token_ids for answer in found] == expected, (drafter, options)
            accepted += sum(map(bool, (source for answer in found for source in answer.token_sources)))
    assert accepted > 0
