"""Drafts change no token of a model whose last layers read the keys and values of earlier ones."""

from __future__ import annotations

from itertools import product

import pytest

from forerun import LLM, SamplingParams
from tests.models import factory

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 10, 11, 9, 10, 11, 9], list(range(20, 43)), [5, 6, 7, 8, 5])
ENGINES: dict[str, dict[str, object]] = {
    "plain": {},
    "without a prefix cache": {"prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 5},
    "preempted": {"num_kv_blocks": 16, "block_size": 4, "max_model_len": 64},
}
DRAFTERS = ("none", "suffix", "recycling", "layer_skip", "portfolio=ngram+recycling")


@pytest.fixture(scope="module", params=["gemma4", "gemma4-experts"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = factory.make_checkpoint(request.param, tmp_path_factory.mktemp("gemma4"))
    return LLM(str(folder), max_num_seqs=1, threads=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_token(llm: LLM, temperature: float) -> None:
    """Every drafter in every engine, half of the pairs at each temperature."""
    params, accepted = SamplingParams(temperature=temperature, max_tokens=24, seed=1, ignore_eos=True, top_k=4), 0
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    pairs = product(enumerate(DRAFTERS), enumerate(ENGINES.items()))
    for drafter, name, options in [(d, *e) for (i, d), (j, e) in pairs if (i + j) % 2 == temperature]:
        own = {} if drafter == "none" else {"adaptive": False}
        made = llm.with_drafter(drafter, **own, **{"max_num_seqs": 4, **options})
        for _ in range(2):  # the second time prompts are in the prefix cache
            found = [output.outputs[0] for output in made.generate(PROMPTS, params)]
            assert [answer.token_ids for answer in found] == expected, (drafter, name)
        assert any(answer.stats.num_preemptions for answer in found) == (name == "preempted"), (drafter, name)
        accepted += sum(map(bool, (source for answer in found for source in answer.token_sources)))
    assert accepted > 0


def test_an_int8_cache_is_as_exact(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=1, ignore_eos=True)
    plain, drafted = (llm.with_drafter(name, kv_cache_dtype="int8", block_size=4) for name in ("none", "layer_skip"))
    answers = [[output.outputs[0].token_ids for output in each.generate(PROMPTS, params)] for each in (plain, drafted)]
    assert answers[0] == answers[1]
