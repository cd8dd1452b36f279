"""Models with recurrent layers on Triton's kernels: the reference's logits, and bits that do not depend on grouping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.models.base import CommittedPath
from forerun.models.loader import load_model
from forerun.speculation.verifier import CoupledVerifier

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("layer_types", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    "lfm2": ("layer_types", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "falcon-h1": ("", {"num_hidden_layers": 1}),
    "nemotron-h": (
        "layers_block_type",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 3},
    ),
}


SLOW = ("lfm2", "falcon-h1", "nemotron-h")


def small_hybrid(case: str, folder: Path) -> Path:
    """A checkpoint of this family with one recurrent layer."""
    pytest.importorskip("triton")
    (model_type, fields), (key, own) = factory.CASES[case], CASES[case]
    assert not key or key in fields
    return factory.save_checkpoint(factory.random_hf_model(model_type, {**fields, **own}), folder)


@pytest.mark.parametrize("case", ["qwen3.5", *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)])
def test_spans_trees_and_accepted_drafts(kernels: Any, case: str, tmp_path: Path) -> None:
    """Logits are the reference's but for rounding; those of drafts and states have the bits of plain decoding."""
    folder = small_hybrid(case, tmp_path)
    models = [load_model(folder, own).model for own in (kernels, factory.make_kernels("reference"))]
    drafted, plain, reference = (factory.Runner(model, 16) for model in (models[0], *models))
    tree, path = ([8, 9, 4], [-1, 0, 0]), (0, 2)  # numpy rounds rows of a tile as the first ones up to the sixth only
    found, expected = ([runner.span([5, 6], 0).logits, runner.tree(*tree, 2)] for runner in (drafted, reference))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)
    rows = torch.tensor([[2 + node for node in path], [2, 3]], dtype=torch.int32)
    kernels.move_rows(drafted.kvs, rows[0], rows[1])
    drafted.model.commit([CommittedPath("r", path)])
    plain.span([5, 6], 0)
    for offset, node in enumerate(path):
        assert torch.equal(plain.root(tree[0][node], 2 + offset), found[1][node])
    assert all(map(torch.equal, state_of(drafted), state_of(plain)))


def state_of(runner: factory.Runner) -> list[Tensor]:
    assert runner.states is not None
    return [tensor for layer in runner.states.layers for tensor in (layer.tails, layer.memory)]


def test_an_engine_writes_the_same_with_drafts_and_kept_states(kernels: Any, tmp_path: Path) -> None:
    folder = str(small_hybrid("qwen3.5", tmp_path))
    options: dict[str, Any] = {"max_model_len": 32, "block_size": 4, "max_num_seqs": 2}
    reference = LLM(folder, kernels="reference", device="cpu", **options)
    plain = LLM(folder, kernels="triton", device=kernels.device.type, **options)
    ngram = plain.with_drafter("ngram", adaptive=False, ngram_min=1, max_draft_tokens=3)
    ngram.engine.verifier = CoupledVerifier(plain.kernels, at_once=True)  # as on a GPU
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    answers = []
    for llm in (reference, ngram):
        outputs = [llm.generate([[5, 9, 5, 9, 5, *more]], params)[0].outputs[0] for more in ((), (9,))]
        answers.append([output.token_ids for output in outputs])
        assert outputs[1].stats.num_cached_tokens == 4
    assert answers[0] == answers[1] and not ngram.engine.runner.replays
