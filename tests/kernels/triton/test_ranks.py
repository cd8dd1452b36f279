"""Two processes on Triton's kernels write what one process writes; interpreted on CPUs they exchange over gloo."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory

from forerun import LLM, SamplingParams

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, under the interpreter
    pytest.mark.skipif(0 < torch.cuda.device_count() < 2, reason="needs two GPUs, or none"),
]
PROMPT, PARAMS = [5, 9, 5, 9], SamplingParams(max_tokens=3, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers."""
    pytest.importorskip("triton")
    model = factory.random_hf_model("llama", {"vocab_size": 32})
    return factory.save_checkpoint(model, tmp_path_factory.mktemp("tiny"), torch.bfloat16)


def tokens(folder: Path, **options: Any) -> tuple[int, ...]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_model_len": 16, "block_size": 4, "max_num_seqs": 2, "rank_start_s": 60}
    with closing(LLM(str(folder), kernels="triton", device=device, keep_learned=False, **{**sizes, **options})) as llm:
        assert llm.kernels.name == "triton"
        return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    return tokens(folder)


@pytest.mark.parametrize("divided", ["tensor_parallel", "pipeline_parallel"])
def test_two_processes_write_what_one_writes(folder: Path, expected: tuple[int, ...], divided: str) -> None:
    drafts = {"drafter": "ngram", "adaptive": False, "ngram_min": 1, "max_draft_tokens": 2}
    assert tokens(folder, **{divided: 2}, **drafts) == expected
