"""Heads of vLLM's speculators (lab/head_fixtures.py): logits and chains are the library's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import DrafterConfig
from forerun.core import SamplingParams
from forerun.kernels.ops import LayerKV
from forerun.models.base import BlockPasses, LayerSpec
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder
from forerun.models.heads.dflash import read_dflash
from forerun.models.heads.eagle import read_eagle
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from forerun.runtime.bind import bind_block
from forerun.runtime.blocks import BlockRunner
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.models import factory
from tests.support import harness, tiny
from tests.support.drafting import overhear
from tests.support.enqueued import Enqueued

FIXTURES, BLOCK_SIZE = Path(__file__).parent / "fixtures", 4
NAMES = ["dflash", "dflash2", "dspark", "xpress", "peagle"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = shutil.copytree(FIXTURES / "target", tmp_path_factory.mktemp("target") / "model")
    factory.write_tokenizer(folder, 64)
    model = load_model(str(folder), tiny.kernels()).model
    assert isinstance(model, Decoder)
    return model


def pool(specs: Any) -> list[LayerKV]:
    sizes = [(32 // BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.dtype) for spec in specs]
    return [LayerKV.zeros(*size) for size in sizes]


def states_of(target: Decoder, known: list[int], layers: tuple[int, ...]) -> Tensor:
    """The target's states of the tokens before the root [n - 1, W]."""
    rows = SequenceRows("", range(32 // BLOCK_SIZE), 0, known[:-1], len(known) - 1)
    hidden = target.forward(ForwardBatch.build([rows], BLOCK_SIZE), pool(target.kv_specs), layers).hidden
    return torch.cat([hidden[layer] for layer in layers], dim=1)


def head_of(name: str, target: Decoder) -> tuple[BlockPasses, tuple[int, ...], tuple[LayerSpec, ...]]:
    """A fixture's passes, the target's states it reads, and its layers' KV."""
    source = open_head(FIXTURES / name)
    if name == "peagle":
        eagle = read_eagle(source, target, tiny.kernels())
        assert eagle.blocks is not None
        return eagle.blocks, eagle.hidden_layers, eagle.kv_specs
    head = read_dflash(source, target, tiny.kernels())
    return head.passes, head.hidden_layers, head.kv_specs


def rows_of(name: str, known: list[int]) -> SequenceRows:
    """All known tokens, the last of which is the root."""
    first, root = int(name == "peagle"), len(known) - 1  # EAGLE has no row of the first token
    return SequenceRows("", range(32 // BLOCK_SIZE), first, known[first:root], root, known[root:], [0], [1], [0])


@pytest.mark.parametrize("name", NAMES)
def test_slots_have_the_librarys_logits(name: str, target: Decoder) -> None:
    passes, layers, specs = head_of(name, target)
    for case in json.loads((FIXTURES / name / "expected.json").read_text()):
        known, runner = case["known"], bind_block(passes, tiny.kernels(), pool(specs), BLOCK_SIZE)
        assert isinstance(runner, BlockRunner)
        rows = rows_of(name, known)
        states, wanted = states_of(target, known, layers), torch.tensor(case["logits"])
        (found,), _ = runner.guess([rows], states, [len(wanted)])
        known_tokens = (found[0] > -torch.inf).nonzero()[:, 0]
        assert len(known_tokens) == wanted.shape[1]
        torch.testing.assert_close(found[:, known_tokens], wanted, rtol=2e-4, atol=2e-4)
        if "chain" in case:
            params = tiny.groups(1, temperature=0.0)[0].samples[0].request.params
            request = harness.request(0, known, params, tiny.MAX_LEN).samples[0].request
            noise = TreeGrower(tiny.kernels(), coupled=True).noise([Draft(request, len(wanted) + 1)])
            (tree,) = runner.draw([rows], states, noise, 1)
            assert tree.tokens == case["chain"]


@pytest.mark.parametrize("name", NAMES)
def test_captured_blocks_of_any_size_have_the_same_logits(name: str, target: Decoder) -> None:
    """As on a GPU, where batches are filled up to the sizes of graphs, unless rows read those above them."""
    passes, layers, specs = head_of(name, target)
    known, capture = json.loads((FIXTURES / name / "expected.json").read_text())[0]["known"], Enqueued()
    states = states_of(target, known, layers)
    plain = bind_block(passes, tiny.kernels(), pool(specs), BLOCK_SIZE)
    captured = bind_block(passes, tiny.kernels(), pool(specs), BLOCK_SIZE, capture)
    assert isinstance(plain, BlockRunner) and isinstance(captured, BlockRunner)
    for num_drafts in range(1, passes.shape.num_depths + 1):
        wanted, found = (runner.guess([rows_of(name, known)], states, [num_drafts])[0] for runner in (plain, captured))
        assert torch.equal(found, wanted), num_drafts
    assert (capture.num_captures > 0) == (
        name in ("dflash", "dspark", "xpress")
    )  # P-EAGLE reads known tokens in the same batch


def test_eagle_drafts_the_librarys_chains(target: Decoder) -> None:
    """In an engine, behind the token that the target says first."""
    options = DrafterConfig(
        name="eagle", model=str(FIXTURES / "eagle3"), max_draft_tokens=4, tree_width=1, adaptive=False
    )
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for case in json.loads((FIXTURES / "eagle3" / "expected.json").read_text()):
        made = tiny.engine(target, options, max_model_len=64)
        ear, prompt = overhear(made, stride=1), case["known"][:-1]
        tiny.run(made, [harness.request(0, prompt, params, 64)])
        rows = [(path, row) for known, path, row in ear.heard if known == case["known"]]
        assert [path for path, _ in rows] == [case["chain"][:depth] for depth in range(4)]
        for (_, row), wanted in zip(rows, torch.tensor(case["logits"]), strict=True):
            torch.testing.assert_close(row[row > -torch.inf], wanted, rtol=2e-4, atol=2e-4)
        assert int(rows[-1][1].argmax()) == case["chain"][-1]
