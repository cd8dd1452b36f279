"""Models that run through transformers: exact trees, commits, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import CheckpointError, UnsupportedError
from forerun.models.base import CommittedPath, Model
from forerun.models.hf import HFModel
from forerun.models.loader import load_model
from tests.models import factory
from tests.models.factory import Runner

KNOWN = [5, 9, 40, 33, 7, 61, 62, 8, 90, 17, 21, 30]
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {},
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = factory.random_hf_model(request.param, MODELS[request.param])
    return factory.save_checkpoint(module, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    loaded = load_model(folder, factory.make_kernels())
    assert loaded.implementation == "transformers" and loaded.config is None
    return loaded.model


def test_logits_are_those_of_transformers(folder: Path, model: Model) -> None:
    found = Runner(model, 20, request_id="logits").span(KNOWN).logits
    assert torch.allclose(found.double(), factory.hf_logits(folder, KNOWN, torch.float64), atol=1e-4)


def test_a_tree_has_the_bits_of_its_paths(model: Model) -> None:
    whole = Runner(model, 20, request_id="whole").span(KNOWN).logits
    runner = Runner(model, 20, request_id="tree")
    tree = [KNOWN[5], 11, KNOWN[6], 12, KNOWN[7], KNOWN[8]]
    logits = runner.tree(tree, [-1, 0, 0, 1, 2, 4], 5, KNOWN[:5])
    assert torch.equal(logits[[0, 2, 4, 5]], whole[5:9])
    model.commit([CommittedPath("tree", (0, 2, 4))])
    after = runner.tree([KNOWN[8], KNOWN[9]], [-1, 0], 8)
    assert torch.equal(after, whole[8:10])


def test_a_tree_may_grow_over_several_calls(model: Model) -> None:
    whole = Runner(model, 20, request_id="whole2").span(KNOWN).logits
    runner = Runner(model, 20, request_id="grow")
    runner.root(KNOWN[3], 3, KNOWN[:3])
    masks, depths = factory.tree_masks([-1, 0, 0])
    rows = factory.SequenceRows("grow", runner.table, 3, (), 3, (KNOWN[4], 50), (1, 2), masks[1:], depths[1:])
    out = model.forward(factory.ForwardBatch.build([rows], 4), [])
    assert torch.equal(out.logits[0], whole[4])


def test_release_and_restart(model: Model) -> None:
    runner = Runner(model, 20, request_id="again")
    first = runner.span(KNOWN[:6]).logits
    assert torch.equal(runner.span(KNOWN[:6]).logits, first)  # preempted, then computed again from 0
    model.release("again")
    model.release("never seen")
    assert torch.equal(runner.span(KNOWN[:6]).logits, first)


def test_hidden_states(model: Model) -> None:
    out = Runner(model, 20, request_id="hidden").span(KNOWN[:4], hidden=(0, 1))
    assert out.hidden[1].shape == (4, 32)
    with pytest.raises(UnsupportedError, match="layers 0 to 1"):
        Runner(model, 20, request_id="hidden2").span(KNOWN[:4], hidden=(2,))


def test_frequencies_that_follow_the_longest_text_are_each_rows_own() -> None:
    """Transformers keeps those of the longest text seen: whatever ran before would change the logits of this one."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = HFModel(factory.random_hf_model("llama", {"rope_parameters": rope, "max_position_embeddings": 16}))
    tokens = [KNOWN[i % len(KNOWN)] for i in range(40)]
    first = Runner(model, 20, request_id="first").span(tokens[:20]).logits
    Runner(model.with_own_state(), 40, request_id="long").span(tokens)
    assert torch.equal(Runner(model, 20, request_id="again").span(tokens[:20]).logits, first)
    whole = torch.cat([Runner(model, 20, request_id=str(n)).span(tokens[:n]).logits[-1:] for n in (16, 17, 20)])
    assert torch.equal(whole, first[[15, 16, 19]])


def test_known_families_run_through_transformers_too(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("qwen3", tmp_path)
    kernels = factory.make_kernels()
    theirs = load_model(folder, kernels, implementation="transformers").model
    ours = load_model(folder, kernels, implementation="forerun").model
    assert torch.allclose(Runner(theirs, 20).span(KNOWN).logits, Runner(ours, 20).span(KNOWN).logits, atol=1e-5)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    module = factory.random_hf_model("gpt2")
    state = {name: tensor for name, tensor in module.state_dict().items() if "h.1.mlp" not in name}
    module.save_pretrained(tmp_path, state_dict=state)
    factory.write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks .* tensors"):
        load_model(tmp_path, factory.make_kernels())


def test_no_causal_model_is_refused(tmp_path: Path) -> None:
    factory.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="no-such-model"):
        load_model(tmp_path, factory.make_kernels())
