"""Every family against transformers: logits, prefill and decode, trees, hidden states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.loader import LoadedModel, load_model
from tests.models import factory
from tests.models.factory import CASES, Runner

LENGTH = 20  # beyond every window and beyond the original context of the scaled ropes
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def tokens(length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, factory.VOCAB_SIZE, (length,), generator=generator).tolist()


BOTH = (
    "llama-tied-biased",
    "mistral-window",
    "qwen3",
    "phi3-longrope",
    "qwen2-moe",
    "deepseek",
    "gpt-oss",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-experts",
    "olmo2",
    "granite",
    "glm4",
    "cohere2",
    "qwen3-next",
    "nemotron-h-moe",
)  # cases that also run on the reference


@pytest.fixture(scope="module", params=[*CASES, *(f"{case} reference" for case in BOTH)])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    case, _, kernels = request.param.partition(" ")
    folder = factory.make_checkpoint(case, tmp_path_factory.mktemp("model"))
    return load_model(folder, factory.make_kernels(kernels or "auto"))


def assert_as_good_as_transformers(folder: Path, found: torch.Tensor, dtype: torch.dtype) -> None:
    """At most twice the error of transformers at the same dtype, over all positions and at several."""
    truth = factory.hf_logits(folder, tokens(), torch.float64)
    theirs = factory.hf_logits(folder, tokens(), dtype)
    assert factory.rms_error(found, truth) <= 2 * factory.rms_error(theirs, truth)
    for position in (0, 5, 11, LENGTH - 1):
        error = factory.rms_error(found[position], truth[position])
        typical = factory.rms_error(theirs, truth)
        assert error <= 3 * typical, f"position {position}"


def test_prefill_matches_transformers(loaded: LoadedModel, prefilled: torch.Tensor) -> None:
    assert_as_good_as_transformers(loaded.folder, prefilled, torch.float32)


@pytest.fixture(scope="module")
def prefilled(loaded: LoadedModel) -> torch.Tensor:
    return Runner(loaded.model, 40).span(tokens()).logits


def test_decode_gives_the_bits_of_prefill(loaded: LoadedModel, prefilled: torch.Tensor) -> None:
    runner = Runner(loaded.model, 40)
    for position, token in enumerate(tokens(4)):
        assert torch.equal(runner.root(token, position), prefilled[position]), position
    runner.span(tokens()[4:17], 4)
    for position, token in enumerate(tokens()[17:], 17):
        assert torch.equal(runner.root(token, position), prefilled[position]), position


def test_a_chunk_without_logits_leaves_the_same_bits(loaded: LoadedModel) -> None:
    whole, chunk, known = Runner(loaded.model, 40), Runner(loaded.model, 40), tokens()
    shown = whole.span(known, hidden=(0, 1))
    rows = SequenceRows("r", chunk.table, 0, known, len(known))
    out = chunk.model.forward(ForwardBatch.build([rows], chunk.block_size), chunk.kvs, (0, 1))
    assert out.logits.shape == (0, loaded.model.vocab_size)
    assert all(torch.equal(out.hidden[layer], shown.hidden[layer]) for layer in (0, 1))
    for ours, theirs in zip(chunk.kvs, whole.kvs, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_chunks_and_trees_give_the_bits_of_prefill(loaded: LoadedModel, prefilled: torch.Tensor) -> None:
    known, whole = tokens(), prefilled
    runner = Runner(loaded.model, 40)
    assert torch.equal(runner.span(known[:7]).logits, whole[:7])
    # root 12; 13 and a wrong token below it; 14 below 13, a wrong one below the wrong one; 15 below 14
    tree = [known[12], 5, known[13], 6, known[14], known[15]]
    logits = runner.tree(tree, [-1, 0, 0, 1, 2, 4], 12, known[7:12])
    assert torch.equal(logits[[0, 2, 4, 5]], whole[12:16])


def test_counts_are_those_of_transformers(loaded: LoadedModel) -> None:
    module = factory.hf_model(loaded.folder, torch.float32)
    read = (
        parameter for name, parameter in module.named_parameters() if not re.search(r"\.indexer\.|moe_statics", name)
    )
    assert loaded.model.num_parameters == sum(parameter.numel() for parameter in read) - factory.num_needless(module)
    assert loaded.model.weight_bytes >= 4 * loaded.model.num_parameters
    assert loaded.implementation == "forerun"


HALVES = (
    "llama-tied-biased", "mistral-window", "qwen2", "qwen3", "phi3", "llama3", "mixtral", "qwen3-moe", "deepseek",
    "gpt-oss", "glm4-moe", "glm4-moe-lite", "deepseek-v32", "gemma2", "gemma3", "gemma4", "gemma4-experts",
    "olmo3", "exaone4", "granite", "smollm3", "glm4", "cohere2", "minimax-m2", "llama4", "qwen3-next", "qwen3.5",
    "qwen3.5-moe", "lfm2", "lfm2-moe", "granite-hybrid", "falcon-h1", "nemotron-h", "nemotron-h-latent", "kimi-linear",
    "step3.5", "mimo-v2", "longcat",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("case", HALVES)
def test_half_precision_checkpoints(case: str, dtype: str, tmp_path: Path) -> None:
    folder = factory.make_checkpoint(case, tmp_path, DTYPES[dtype])
    model = load_model(folder, factory.make_kernels()).model
    assert model.kv_specs[0].dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert_as_good_as_transformers(folder, Runner(model, 40).span(tokens()).logits, DTYPES[dtype])


@pytest.mark.parametrize("stored", ["f32", "bf16"])
def test_dtype_option(stored: str, tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path, DTYPES[stored])
    kernels = factory.make_kernels()
    wide = load_model(folder, kernels, dtype="float32").model
    narrow = load_model(folder, kernels, dtype="bfloat16").model
    assert wide.kv_specs[0].dtype == torch.float32 and narrow.kv_specs[0].dtype == torch.bfloat16
    assert wide.weight_bytes > narrow.weight_bytes
    assert_as_good_as_transformers(folder, Runner(wide, 40).span(tokens()).logits, torch.float32)
    assert_as_good_as_transformers(folder, Runner(narrow, 40).span(tokens()).logits, torch.bfloat16)


def test_dynamic_rope_beyond_its_context_equals_decoding_token_by_token(tmp_path: Path) -> None:
    fields = {**CASES["llama-dynamic"][1], "max_position_embeddings": 8}
    folder = factory.save_checkpoint(factory.random_hf_model("llama", fields), tmp_path)
    model = load_model(folder, factory.make_kernels()).model
    assert model.max_position == 16  # 8 times factor 2
    known = tokens(16)
    found = Runner(model, 16).span(known).logits
    truth = factory.hf_logits_stepwise(folder, known, torch.float32)
    assert factory.rms_error(found, truth) < 1e-5


def test_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path)
    model = load_model(folder, factory.make_kernels()).model
    hidden = Runner(model, 40).span(tokens(), hidden=(0, 1, 2)).hidden
    module = factory.hf_model(folder, torch.float32)
    theirs = module(torch.tensor([tokens()]), output_hidden_states=True).hidden_states
    assert torch.allclose(hidden[0], theirs[0][0], atol=1e-5)
    assert torch.allclose(hidden[1], theirs[1][0], atol=1e-5)
    assert torch.allclose(module.model.norm(hidden[2]), theirs[2][0], atol=1e-4)


def test_only_the_wanted_rows_have_logits(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path)
    model = load_model(folder, factory.make_kernels()).model
    known = tokens()
    whole = Runner(model, 40).span(known).logits
    runner = Runner(model, 40)
    rows = factory.SequenceRows("r", runner.table, 0, known[:8], 9)
    silent = model.forward(factory.ForwardBatch.build([rows], 4), runner.kvs)
    assert silent.logits.shape == (0, factory.VOCAB_SIZE)
    assert torch.equal(runner.root(known[9], 9, known[8:9]), whole[9])
