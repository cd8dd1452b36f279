"""A published text, reproduced: stories260K's greedy sample, with every drafter, on both backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from tests.support.stories import published_sample, stories260k

CPU = "auto"
# Tokens a step, of this one text: 1.35 by copying from it, 8.8 (7.5 of 30 tokens) with 8 drafts that are always right.
LEAST = {"none": 1.0, "ngram": 1.3, "draft": 7.0, "draft-tree": 5.0}
MOST = {"none": 1.0, "ngram": 1.5, "draft": 9.0, "draft-tree": 9.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stories260k(tmp_path_factory.mktemp("stories260K"))


@pytest.mark.parametrize(
    ("backend", "drafter", "num"),
    [(CPU, name, 256) for name in ("none", "ngram", "draft", "draft-tree")]
    + [("reference", "none", 30), ("reference", "draft", 30)],
)
def test_published_sample(folder: Path, backend: str, drafter: str, num: int) -> None:
    name, _, tree = drafter.partition("-")
    options = {"draft_model": str(folder), "tree_width": 2 if tree else 1} if name == "draft" else {}
    llm = LLM(str(folder), kernels=backend, drafter=name, adaptive=False, max_num_seqs=2, **options)
    start = [llm.tokenizer.bos_token_id]
    [output] = llm.generate([start], SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True))
    text, published = output.outputs[0].text.strip(), published_sample()
    assert text.startswith(published) if num == 256 else (published.startswith(text) and len(text) > 50)
    stats = output.outputs[0].stats
    assert LEAST[drafter] <= stats.acceptance_length <= MOST[drafter]
    if drafter == "draft":
        assert stats.trees.drafted == stats.trees.accepted > 0, "the model is its own draft: every guess is right"
