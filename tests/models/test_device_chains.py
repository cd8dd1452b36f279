"""Chains whose passes are enqueued at once, as on a GPU: the tokens, q and KV of one pass a level, and one wait."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.drafters import draft_model
from forerun.kernels.ops import Kernels, LayerKV
from forerun.kernels.select import select_kernels
from forerun.kernels.triton.graphs import ROW_SIZES, Capture
from forerun.models.decoder import Decoder
from forerun.models.loader import load_model
from forerun.models.medusa_heads import load_medusa
from forerun.runtime.bind import bind_rows
from forerun.runtime.rows import RowRunner
from forerun.speculation import drawn
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.drafters import test_draft_chains as of_models
from tests.drafters import test_medusa
from tests.models import factory, test_device
from tests.models import test_recorded_heads as of_heads
from tests.support import mini, tiny
from tests.support.drafting import context_of
from tests.support.enqueued import Enqueued, as_on_a_gpu


class ModelSide(of_models.Side):
    """A draft model whose chains are enqueued; `capture` None: level by level."""

    def __init__(self, capture: Capture | None, coupled: bool) -> None:
        kernels, model = mini.plain().kernels, mini.plain().loaded.model
        self.kvs = factory.new_kvs(model, of_models.BLOCKS_EACH * len(of_models.LENGTHS), of_models.BLOCK_SIZE)
        grower, size = TreeGrower(kernels, coupled), of_models.BLOCK_SIZE
        bound = kernels if capture is not None else select_kernels("reference")  # which cannot record
        context = context_of(draft_model.SPEC, model, bound, grower, size, 1024, max_draft_tokens=16, tree_width=1)
        drafter = draft_model.build(context)
        with nullcontext() if capture is None else as_on_a_gpu(capture):
            drafter.attach((), self.kvs)
        self.drafter = drafter

    def accept(self, drafts: list[Draft], num_accepted: int) -> None:
        of_models.accept(self, drafts, num_accepted)


class HeadSide(of_heads.Side):
    """A head whose chains are enqueued; `capture` None: drawn by one native call, which gives those of the levels."""

    def __init__(self, made: of_heads.Case, capture: Capture | None, coupled: bool, width: int = 1) -> None:
        with nullcontext() if capture is None else as_on_a_gpu(capture):
            super().__init__(made, True, coupled, width)


def play(sides: list[Any], known: list[Any], module: Any, steps: Any = None) -> None:
    """The same steps on both sides, compared after each, and what they leave in their pools."""
    lengths = module.LENGTHS
    for wanted, num_accepted in steps or ((lengths, 2), (lengths[::-1], 0), ((2, 2, 2, 2), 8), (lengths, 1)):
        ours, theirs = (side.propose(mine, wanted) for side, mine in zip(sides, known, strict=True))
        module.check_equal(ours, theirs)
        for side, drafts in zip(sides, (ours, theirs), strict=True):
            side.accept(drafts, num_accepted)
    for mine, other in zip(sides[0].kvs, sides[1].kvs, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize(("temperature", "prompt_len"), [(0.0, 6), (0.7, ROW_SIZES[-1] // 4), (1.0, 6)])
def test_chains_of_a_model_are_the_levels(coupled: bool, temperature: float, prompt_len: int) -> None:
    capture = Enqueued()
    sides = [ModelSide(capture, coupled), ModelSide(None, coupled)]
    play(sides, [of_models.requests(temperature, prompt_len) for _ in sides], of_models)
    assert capture.num_runs == (4 if prompt_len == 6 else 3)  # the long prompts are no size of a graph


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["eagle1", "eagle3.1", "mimo", "deepseek"])
def test_chains_of_a_head_are_the_levels(layout: str, temperature: float, coupled: bool) -> None:
    made, capture = of_heads.case(layout), Enqueued()
    sides = [HeadSide(made, capture, coupled), HeadSide(made, None, coupled)]
    known = [of_heads.requests(temperature) for _ in sides]
    for side, mine in zip(sides, known, strict=True):
        side.start(mine)
    play(sides, known, of_heads)
    assert capture.num_runs == 4 and capture.num_captures < 4


@pytest.mark.parametrize("kind", ["model", "head"])
def test_chains_of_several_lengths_share_a_program(kind: str) -> None:
    """The levels that are too many change nothing: neither tokens nor what lies in the pool."""
    capture, module = Enqueued(), of_models if kind == "model" else of_heads
    made = of_heads.case("eagle3.1")
    sides: list[Any] = [
        ModelSide(each, True) if kind == "model" else HeadSide(made, each, True) for each in (capture, None)
    ]
    known: list[Any] = [of_models.requests(0.7, 6) if kind == "model" else of_heads.requests(0.7) for _ in sides]
    if kind == "head":
        for side, mine in zip(sides, known, strict=True):
            side.start(mine)
    for length in (5, 6, 7):
        play(sides, known, module, [((length + 1, 3, length, 2), 1)])
    assert (capture.num_captures, capture.num_runs) == (2, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_of_a_captured_head_are_the_same(temperature: float) -> None:
    made, capture = of_heads.case("eagle3.1"), Enqueued()
    sides = [HeadSide(made, capture, True, width=3), HeadSide(made, None, True, width=3)]
    known = [of_heads.requests(temperature) for _ in sides]
    for side, mine in zip(sides, known, strict=True):
        side.start(mine)
    for _ in range(2):  # the second time some graphs are there already
        play(sides, known, of_heads)
    assert capture.num_runs > capture.num_captures > 0


def test_a_row_without_an_answer_ends_its_chain_only() -> None:
    side, known = ModelSide(Enqueued(), True), of_models.requests(0.0, 6)
    healthy = ModelSide(None, True).propose(of_models.requests(0.0, 6), of_models.LENGTHS)
    for layer in side.kvs:  # the third request, which has the longest chain, attends to poisoned values
        layer.values[known[2].block_ids[0]] = torch.nan
    side.drafter.resume(known[2], (of_models.BLOCK_SIZE,), None)
    drafts = side.propose(known, of_models.LENGTHS)
    assert len(drafts[2].tree) == 1
    for index in (0, 1, 3):
        assert list(drafts[index].tree.tokens) == list(healthy[index].tree.tokens)


@pytest.mark.parametrize("rows", [test_medusa.VOCAB, 40])
def test_captured_medusa_heads_have_the_bits_of_their_own_pass(tmp_path: Path, rows: int) -> None:
    folder = test_medusa.write_vllm(tmp_path, test_medusa.random_heads(3, 2, rows=rows))
    heads, capture = load_medusa(folder, tiny.target(test_medusa.TARGET_LAYERS), tiny.kernels()), Enqueued()
    states = torch.randn(300, test_medusa.HIDDEN, generator=torch.Generator().manual_seed(2))
    given = [(states[first : first + num], depths) for first, num in ((0, 3), (9, 4), (0, 300)) for depths in (1, 3)]
    own, captured = RowRunner(heads.passes, heads.compute), bind_rows(heads.passes, tiny.kernels(), capture)
    assert all(torch.equal(captured.logits(*each), own.logits(*each)) for each in given)
    assert (capture.num_captures, capture.num_runs) == (2, 4)  # 4 rows for two depths; 300 are no size of a graph


class MetaKernels(test_device.MetaKernels):
    """As there; draws as well, where temperatures and keys may come from the host."""

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: Any) -> Tensor:
        return self.gumbel_topk(logits, temperatures, keys, 1)[0][:, 0]

    def gumbel_topk(self, logits: Tensor, temperatures: Tensor, keys: Any, k: int) -> tuple[Tensor, Tensor]:
        assert logits.device == test_device.META
        ids = torch.empty(len(logits), k, dtype=torch.int64, device=test_device.META)
        return ids, ids.double()


def meta_model(folder: Path, kernels: Any) -> tuple[Decoder, list[LayerKV]]:
    model = load_model(factory.make_checkpoint("qwen3", folder), kernels).model
    assert isinstance(model, Decoder)
    specs = model.kv_specs
    return model, [LayerKV.zeros(99, s.num_kv_heads, s.head_dim, 4, s.dtype, device=test_device.META) for s in specs]


@pytest.mark.parametrize("coupled", [True, False])
def test_a_chain_is_one_wait_for_the_device(coupled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without numbers every other question raises."""
    kernels: Kernels = MetaKernels()  # type: ignore[assignment]
    model, kvs = meta_model(tmp_path, kernels)
    waits: list[Tensor] = []

    def answer(x: Tensor) -> Tensor:
        waits.append(x)
        told = torch.full(x.shape, 7, dtype=x.dtype)  # tokens, parents, chances and places of four chains of 5
        told[0, :, 5:], told[1] = -1, torch.arange(x.shape[2])
        return told

    monkeypatch.setattr(drawn, "to_host", answer)
    grower = TreeGrower(kernels, coupled)
    drafter = draft_model.build(
        context_of(draft_model.SPEC, model, kernels, grower, 4, max_draft_tokens=16, tree_width=1)
    )
    with as_on_a_gpu():
        drafter.attach((), kvs)
    drafts = [Draft(request, 6) for request in of_models.requests(0.0, 6)]
    for draft in drafts:
        draft.request.token_ids[:] = [token % model.vocab_size for token in draft.request.token_ids]
    drafter.propose(drafts)
    assert [list(draft.tree.tokens[1:]) for draft in drafts] == [[7] * 5] * 4
    assert [tuple(tensor.shape) for tensor in waits] == [(4, 4, 8)] and waits[0].device == test_device.META
