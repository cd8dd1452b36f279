"""Models that run through transformers: exact trees, commits, restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.errors import CheckpointError, UnsupportedError
from forerun.models.base import CommittedPath, Model
from forerun.models.hf import HFModel
from forerun.models.hf_pooled import PooledHFModel
from forerun.models.loader import load_model
from forerun.models.overview import look_at
from tests.models import factory
from tests.models.factory import Runner

KNOWN = [5, 9, 40, 33, 7, 61, 62, 8, 90, 17, 21, 30]
POOLED: dict[str, dict[str, Any]] = {  # attention is forerun's
    "gpt2": {},
    "gpt_neox": {},
    "gpt_bigcode": {},  # one head for keys and values
    "olmo": {},  # norms without weights
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 5},
}
ROW_BY_ROW: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {},
    "mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 32},
}
MODELS = POOLED | ROW_BY_ROW


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = factory.random_hf_model(request.param, MODELS[request.param])
    return factory.save_checkpoint(module, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    loaded = load_model(folder, factory.make_kernels())
    assert loaded.implementation == "transformers" and loaded.config is None
    assert isinstance(loaded.model, PooledHFModel if folder.name[:-1] in POOLED else HFModel)
    return loaded.model


def test_logits_are_those_of_transformers(folder: Path, model: Model) -> None:
    found = Runner(model, 20, request_id="logits").span(KNOWN).logits
    assert torch.allclose(found.double(), factory.hf_logits(folder, KNOWN, torch.float64), atol=1e-4)


def test_sizes_are_those_of_transformers(folder: Path, model: Model) -> None:
    parameters = list(factory.hf_model(folder, torch.float32).parameters())
    assert model.num_parameters == sum(p.numel() for p in parameters)
    assert model.weight_bytes >= sum(p.nbytes for p in parameters)  # matrices are packed in panels


def test_a_tree_has_the_bits_of_its_paths(model: Model) -> None:
    whole = Runner(model, 20, request_id="whole").span(KNOWN).logits
    runner = Runner(model, 20, request_id="tree")
    tree = [KNOWN[5], 11, KNOWN[6], 12, KNOWN[7], KNOWN[8]]
    logits = runner.tree(tree, [-1, 0, 0, 1, 2, 4], 5, KNOWN[:5])
    assert torch.equal(logits[[0, 2, 4, 5]], whole[5:9])
    model.commit([CommittedPath("tree", (0, 2, 4))])
    if runner.kvs:
        kernels = factory.make_kernels()
        kernels.move_rows(runner.kvs, *torch.tensor([[7, 9], [6, 7]], dtype=torch.int32))
    after = runner.tree([KNOWN[8], KNOWN[9]], [-1, 0], 8)
    assert torch.equal(after, whole[8:10])


def test_a_tree_may_grow_over_several_calls(model: Model) -> None:
    whole = Runner(model, 20, request_id="whole2").span(KNOWN).logits
    runner = Runner(model, 20, request_id="grow")
    runner.root(KNOWN[3], 3, KNOWN[:3])
    masks, depths = factory.tree_masks([-1, 0, 0])
    rows = factory.SequenceRows("grow", runner.table, 3, (), 3, (KNOWN[4], 50), (1, 2), masks[1:], depths[1:])
    out = model.forward(factory.ForwardBatch.build([rows], 4), runner.kvs)
    assert torch.equal(out.logits[0], whole[4])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 5, 1), (12, 3, 7)], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(model: Model, sizes: tuple[int, ...]) -> None:
    """Three texts side by side, each in parts of its own size, and each alone in one pass."""
    texts = [KNOWN, KNOWN[::-1], KNOWN[6:] + KNOWN[:6]]
    runner, found = Runner(model, 48, block_size=16), [torch.empty(0, model.vocab_size)] * len(texts)
    while running := [index for index, text in enumerate(texts) if len(found[index]) < len(text)]:
        batch = []
        for index in running:
            start = len(found[index])
            *span, root = texts[index][start : start + sizes[index]]
            end = start + len(span)
            batch.append(
                factory.SequenceRows(str(index), [index], start, span, end, (root,), (0,), (1,), (0,), span_logits=True)
            )
        made = model.forward(factory.ForwardBatch.build(batch, 16), runner.kvs).logits
        model.commit([CommittedPath(rows.request_id, (0,)) for rows in batch])
        for index, logits in zip(running, made.split([len(rows.span) + 1 for rows in batch]), strict=True):
            found[index] = torch.cat([found[index], logits])
    for index, text in enumerate(texts):
        model.release(str(index))
        assert torch.equal(found[index], Runner(model, 20, request_id=f"alone {index}").span(text).logits)
        model.release(f"alone {index}")


def test_sixteen_bits_stay_sixteen_bits(tmp_path: Path) -> None:
    """Matrices and keys and values are bfloat16, all between them float32."""
    folder = factory.save_checkpoint(factory.random_hf_model("gpt_neox"), tmp_path, torch.bfloat16)
    model = load_model(folder, factory.make_kernels()).model
    assert {spec.dtype for spec in model.kv_specs} == {torch.bfloat16} and look_at(folder).kv_specs == model.kv_specs
    exact = factory.hf_logits(folder, KNOWN, torch.float64)
    found, theirs = Runner(model, 20).span(KNOWN).logits.double(), factory.hf_logits(folder, KNOWN, torch.bfloat16)
    assert (found - exact).abs().max() <= (theirs - exact).abs().max()


def test_what_is_said_before_loading_is_what_runs(folder: Path, model: Model) -> None:
    assert look_at(folder).kv_specs == model.kv_specs


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
