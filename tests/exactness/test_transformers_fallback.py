"""Models forerun does not know natively run through transformers, as target or draft, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from tests.support import mini

PROMPTS = ([5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 1, 2, 3, 4, 9, 1, 2])


@pytest.fixture(scope="module", params=["gpt2", "bloom"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the embedded tokenizer: one over the pool, one that runs row by row."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    from forerun.weights.resolve import resolve_model

    torch.manual_seed(0)
    out = tmp_path_factory.mktemp(request.param)
    sizes = {"n_positions": 64, "seq_length": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    config = AutoConfig.for_model(request.param, vocab_size=8192, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("mini") / name, out / name)
    return out


@pytest.fixture
def pooled(folder: Path) -> bool:
    """Whether keys and values lie in the pool."""
    return folder.name.startswith("gpt2")


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Of greedy requests and of warm ones."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=12, seed=1, ignore_eos=True, top_k=3)
        for temperature in (0.0, 1.0, 1.0)
    ]
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


def test_as_target(folder: Path, pooled: bool) -> None:
    llm = LLM(str(folder))
    assert llm.loaded.implementation == "transformers" and bool(llm.loaded.kv_specs) == pooled
    plain = tokens(llm)
    own = str(folder)
    drafters: list[dict[str, Any]] = [
        {"drafter": "ngram", "ngram_min": 1, "adaptive": False},
        {"drafter": "draft", "draft_model": own, "adaptive": False, "num_kv_blocks": 5, "max_model_len": 40},
        {"drafter": "suffix", "adaptive": False, "max_num_batched_tokens": 7},
        {"drafter": "draft", "draft_model": own, "tree_width": 2, "max_draft_tokens": 6},
        {"drafter": "draft", "draft_model": "mini-draft", "adaptive": False, "max_draft_tokens": 3},
    ]
    for options in drafters if pooled else drafters[:2]:  # row by row takes its time
        assert tokens(llm.with_drafter(**options)) == plain


def test_alone_and_together(folder: Path) -> None:
    llm, params = LLM(str(folder), prefix_caching=False), SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    together = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    assert together == [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS]


def test_a_known_prefix_is_not_computed_again(folder: Path, pooled: bool) -> None:
    prompt, params = [*range(5, 40)], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    llm = LLM(str(folder), block_size=16)
    first, second = (llm.generate([prompt], params)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (second.outputs[0].stats.num_cached_tokens > 0) == pooled


def test_a_cache_of_another_precision(folder: Path, pooled: bool) -> None:
    if not pooled:
        with pytest.raises(
            ConfigError, match="'int8' was given, but .* runs through transformers row by row.*leave .* at 'auto'"
        ):
            LLM(str(folder), kv_cache_dtype="int8")
        return
    llm = LLM(str(folder), kv_cache_dtype="int8")
    assert tokens(llm.with_drafter("ngram", ngram_min=1, adaptive=False)) == tokens(llm)


def test_as_draft(folder: Path) -> None:
    plain = tokens(mini.plain())
    made = mini.drafting("draft", draft_model=str(folder), adaptive=False, max_draft_tokens=3)
    assert tokens(made) == plain
