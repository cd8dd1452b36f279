"""Models forerun does not know natively run through transformers, as target or draft, and nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from tests.support import mini

PROMPTS = ([5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 1, 2, 3, 4, 9, 1, 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random GPT-2 with the embedded tokenizer."""
    import shutil

    from transformers import GPT2Config, GPT2LMHeadModel

    from forerun.weights.resolve import resolve_model

    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(vocab_size=8192, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("mini") / name, out / name)
    return out


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Of greedy requests and of warm ones."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=12, seed=1, ignore_eos=True, top_k=3)
        for temperature in (0.0, 1.0, 1.0)
    ]
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


def test_as_target(folder: Path) -> None:
    llm = LLM(str(folder))
    assert llm.loaded.implementation == "transformers"
    plain = tokens(llm)
    drafters = [
        llm.with_drafter("ngram", ngram_min=1, adaptive=False),
        llm.with_drafter("draft", draft_model=str(folder), adaptive=False, max_draft_tokens=3),
        llm.with_drafter("draft", draft_model=str(folder), tree_width=2, max_draft_tokens=6),
        llm.with_drafter("draft", draft_model="mini-draft", adaptive=False, max_draft_tokens=3),
        llm.with_drafter("draft", draft_model=str(folder), adaptive=False, num_kv_blocks=5, max_model_len=40),
    ]
    for made in drafters:
        assert tokens(made) == plain


def test_a_cache_of_another_precision_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'int8' was given, but .* runs through transformers.*leave .* at 'auto'"):
        LLM(str(folder), kv_cache_dtype="int8")


def test_as_draft(folder: Path) -> None:
    plain = tokens(mini.plain())
    made = mini.drafting("draft", draft_model=str(folder), adaptive=False, max_draft_tokens=3)
    assert tokens(made) == plain
