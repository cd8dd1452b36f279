"""The whole engine on Triton's kernels: its drafts change nothing, and the reference chooses the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory

from forerun import LLM, SamplingParams
from forerun.errors import KernelError, ResourceError
from forerun.kernels.select import select_kernels
from forerun.models.loader import load_model
from forerun.speculation.verifier import CoupledVerifier

PROMPTS = ([5, 9, 5, 9], [7, 7])
PARAMS = [SamplingParams(max_tokens=3, temperature=temperature, seed=3, ignore_eos=True) for temperature in (0.0, 0.9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer."""
    pytest.importorskip("triton")
    model = factory.random_hf_model("llama", {"num_hidden_layers": 1})
    return factory.save_checkpoint(model, tmp_path_factory.mktemp("tiny"), torch.bfloat16)


def open_llm(folder: Path, kernels: str = "triton", **options: Any) -> LLM:
    device = "cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu"
    return LLM(str(folder), kernels=kernels, device=device, max_model_len=32, block_size=4, **options)


def tokens(outputs: Any) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def num_nodes(outputs: Any, what: str) -> int:
    return sum(getattr(count, what) for o in outputs for count in o.outputs[0].stats.drafters.values())


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return open_llm(folder)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[tuple[int, ...]]:
    """What plain decoding writes."""
    return tokens(plain.generate(list(PROMPTS), PARAMS))


def test_the_reference_chooses_the_same_tokens(folder: Path, plain: LLM, expected: Any) -> None:
    assert set(plain.kernels.describe().values()) <= {"triton's interpreter", "triton sm_90"}
    assert tokens(open_llm(folder, "reference").generate(list(PROMPTS), PARAMS)) == expected


def test_drafts_of_ngrams_change_nothing(plain: LLM, expected: Any) -> None:
    ngram = plain.with_drafter("ngram", adaptive=False, ngram_min=1, max_draft_tokens=3)
    ngram.engine.verifier = CoupledVerifier(plain.kernels, at_once=True)  # as on a GPU
    outputs = ngram.generate(list(PROMPTS), PARAMS)
    assert tokens(outputs) == expected
    assert num_nodes(outputs, "drafted") > 0


def test_trees_of_a_draft_model_change_nothing(folder: Path, plain: LLM, expected: Any) -> None:
    drafted = plain.with_drafter("draft", draft_model=str(folder), adaptive=False, max_draft_tokens=3, tree_width=2)
    outputs = drafted.generate(list(PROMPTS), PARAMS)
    assert tokens(outputs) == expected
    assert num_nodes(outputs, "accepted") > 0


def test_embeddings_of_a_gguf_file_stay_in_their_blocks(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("gguf")
    from tests.weights import gguf_makers as makers

    model = factory.random_hf_model("llama", {**makers.SIZES, "num_hidden_layers": 1})
    folder, path = factory.save_checkpoint(model, tmp_path / "folder"), tmp_path / "model.gguf"
    table = makers.write_model(path, folder, model, "llama", "Q6_K")["model.embed_tokens.weight"]
    kernels = select_kernels("triton", device="cuda" if torch.cuda.is_available() else "cpu")
    embedding = load_model(path, kernels).model.parts.embedding
    assert torch.equal(embedding(torch.arange(len(table))).cpu(), table) and embedding.nbytes < table.nbytes / 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(ResourceError, match="sees no CUDA device.*device 'cpu'"):
        LLM(str(folder), device="cuda")
    assert select_kernels(device="auto").device.type == "cpu"


def test_contradictions_are_refused() -> None:
    for options, message in (
        ({"name": "cpu", "device": "cuda"}, "run on the CPU"),
        ({"name": "reference", "device": "cuda"}, "run on the CPU"),
        ({"device": "tpu"}, "not one of"),
    ):
        with pytest.raises(KernelError, match=message):
            select_kernels(**options)  # type: ignore[arg-type]
