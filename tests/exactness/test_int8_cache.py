"""Losslessness with an 8-bit KV cache: every drafter still writes what plain decoding with that cache writes.

The cache rounds, so the text may differ from that of a float cache; what must not matter is who drafted.
"""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from tests.support import mini

DRAFTERS = {
    "ngram": {"ngram_min": 1, "adaptive": False},
    "draft": {"adaptive": False, "max_draft_tokens": 6},
    "draft-tree": {"tree_width": 3, "max_draft_tokens": 15, "adaptive": False},
}


@lru_cache(maxsize=1)
def plain() -> LLM:
    return mini.plain().with_drafter("none", kv_cache_dtype="int8")


def drafting(name: str, **options) -> LLM:  # type: ignore[no-untyped-def]
    return plain().with_drafter(name.split("-")[0], **{**DRAFTERS[name], **options})


def params(temperature: float, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=temperature, **{"max_tokens": 32, "seed": 5, "ignore_eos": True, **options})


def tokens(outputs) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return [sample.token_ids for output in outputs for sample in output.outputs]


def alone(prompts, sampling) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return mini.alone(plain(), prompts, sampling)


def test_target_and_drafter_layers_are_int8() -> None:
    layers = drafting("draft").engine.kv_cache.layers
    assert len(layers) > len(plain().loaded.model.kv_specs)
    assert all(kv.is_scaled for kv in layers)
    assert not any(kv.is_scaled for kv in mini.plain().engine.kv_cache.layers)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters(drafter: str) -> None:
    sampling = [params(i % 2) for i in range(len(mini.PROMPTS))]
    outputs = drafting(drafter).generate(mini.PROMPTS, sampling)
    assert tokens(outputs) == alone(mini.PROMPTS, sampling)
    accepted = sum(c.accepted for o in outputs for c in o.outputs[0].stats.drafters.values())
    assert accepted > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize("rows", (1, 16))
def test_chunks(rows: int) -> None:
    prompts = [" ".join([text] * 9) for text in mini.PROMPTS[:3]]
    sampling = params(0.7, max_tokens=8, prompt_logprobs=0, logprobs=2)
    chunked = drafting("draft", max_num_batched_tokens=rows).generate(prompts, sampling)
    whole = [plain().generate(prompt, sampling)[0] for prompt in prompts]
    assert tokens(chunked) == tokens(whole)
    assert [o.prompt_logprobs for o in chunked] == [o.prompt_logprobs for o in whole]
    assert [o.outputs[0].logprobs for o in chunked] == [o.outputs[0].logprobs for o in whole]


def test_preemption() -> None:
    prompts = [text * 4 for text in mini.PROMPTS]
    outputs = drafting("draft-tree", num_kv_blocks=16, max_model_len=256).generate(prompts, params(1.0, max_tokens=32))
    assert tokens(outputs) == alone(prompts, params(1.0, max_tokens=32))
    assert sum(o.outputs[0].stats.num_preemptions for o in outputs) > 0, "nothing was preempted"


@pytest.mark.parametrize("options", ({"block_size": 4}, {"block_size": 32}))
def test_block_size_does_not_matter(options) -> None:  # type: ignore[no-untyped-def]
    assert tokens(drafting("draft", **options).generate(mini.PROMPTS, params(1.0))) == alone(mini.PROMPTS, params(1.0))


def _logprobs(llm: LLM) -> torch.Tensor:
    """Of every prompt token but the first."""
    outputs = llm.generate([" ".join(mini.PROMPTS), *mini.PROMPTS], params(0.0, max_tokens=1, prompt_logprobs=0))
    return torch.tensor([place.chosen.logprob for output in outputs for place in output.prompt_logprobs[1:]])


def test_log_probabilities_stay_near_those_of_the_float_cache() -> None:
    coded, exact = _logprobs(plain()), _logprobs(mini.plain().with_drafter("none", kv_cache_dtype="float32"))
    difference = (coded - exact).abs()
    assert 0 < float(difference.max()) < 0.2 and float(difference.mean()) < 0.02
    assert math.isclose(float(coded.mean()), float(exact.mean()), abs_tol=0.005)  # 0.5 % in perplexity


def test_wider_caches_can_be_chosen_too() -> None:
    exact = mini.plain().with_drafter("draft", kv_cache_dtype="float32")
    assert {kv.keys.dtype for kv in exact.engine.kv_cache.layers} == {torch.float32}
    again = exact.with_drafter("none")  # options not given stay
    assert {kv.keys.dtype for kv in again.engine.kv_cache.layers} == {torch.float32}
    assert tokens(exact.generate(mini.PROMPTS, params(1.0))) == tokens(again.generate(mini.PROMPTS, params(1.0)))


def test_blocks_are_counted_in_their_own_size() -> None:
    budget = 1 << 20
    blocks = {
        dtype: mini.plain().with_drafter("none", kv_cache_dtype=dtype, kv_cache_bytes=budget, max_model_len=None)
        for dtype in ("int8", "bfloat16", "float32")
    }
    for llm in blocks.values():
        cache = llm.engine.kv_cache
        stored = sum(
            tensor.nbytes
            for kv in cache.layers
            for tensor in (kv.keys, kv.values, kv.key_scales, kv.value_scales)
            if tensor is not None
        )
        assert budget - stored // cache.num_blocks < stored <= budget
    num_blocks = {dtype: llm.engine.kv_cache.num_blocks for dtype, llm in blocks.items()}
    assert num_blocks["int8"] > 1.7 * num_blocks["bfloat16"] > 3 * num_blocks["float32"]


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, float32, bfloat16, int8; got 'int4'"):
        mini.plain().with_drafter("none", kv_cache_dtype="int4")
