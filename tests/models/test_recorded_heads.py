"""Draft heads replayed give the bits of their own passes; chains drawn natively are the chains drawn level by level."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.drafters import mtp
from forerun.drafters.autoregressive import head_drafter
from forerun.drafters.base import Observed
from forerun.kernels.ops import LayerKV
from forerun.kernels.select import select_kernels
from forerun.models.base import Model
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder
from forerun.models.heads.eagle import read_eagle
from forerun.models.heads.head import DraftHead
from forerun.models.heads.mtp import read_mtp
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from forerun.runtime.bind import bind
from forerun.runtime.eager import EagerRunner
from forerun.runtime.recorded import MAX_RECORDED_ROWS
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.drafters import test_eagle, test_mtp
from tests.models import factory
from tests.support import heads, tiny
from tests.support.drafting import context_of, watch_chains

pytest.importorskip("forerun.kernels.cpu._native")

BLOCK_SIZE, BLOCKS_EACH = 4, 24
LAYOUTS = (*test_eagle.LAYOUTS, "mimo", "deepseek", "glm4-moe", "ernie4.5-moe")
LENGTHS = (5, 1, 7, 3)  # nodes each draft may have besides its root


@dataclass
class Case:
    """A head and the target it is for."""

    head: DraftHead
    target: Decoder

    def new_kvs(self) -> list[LayerKV]:
        return factory.new_kvs(self.head, BLOCKS_EACH * len(LENGTHS), BLOCK_SIZE)  # type: ignore[arg-type]


@lru_cache
def case(layout: str) -> Case:
    with TemporaryDirectory() as name:
        folder = Path(name)
        if layout in factory.CASES:
            made = test_mtp.WithModule(folder, layout, has_tables=layout == "deepseek")
            target: Model = load_model(made.folder, tiny.kernels()).model
            assert isinstance(target, Decoder)
            return Case(read_mtp(open_head(made.folder), target, tiny.kernels()), target)
        if layout == "mimo":
            target = heads.target(test_mtp.LAYERS)
            heads.write(folder, test_mtp.mimo_tensors(), test_mtp.mimo_config())
            return Case(read_mtp(open_head(folder), target, tiny.kernels()), target)
        target = heads.target(test_eagle.LAYERS)
        path, _ = test_eagle.make(layout, folder)
        return Case(read_eagle(open_head(path), target, tiny.kernels()), target)


def tree_batch(num_span: int, parents: list[int], start: int, shift: int = 0) -> ForwardBatch:
    masks, depths = factory.tree_masks(parents)
    rows = SequenceRows(
        request_id="r",
        block_table=list(range(BLOCKS_EACH * len(LENGTHS)))[::-1],
        start=start,
        span=[(7 * i) % 90 for i in range(start, start + num_span)],
        tree_start=start + num_span,
        tree_tokens=[(11 * i) % 90 for i in range(len(parents))],
        tree_rows=range(len(parents)),
        tree_masks=masks,
        tree_depths=depths,
    )
    return ForwardBatch.build([rows], BLOCK_SIZE, shift)


def random_rows(num: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(seed + num))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replayed_pass_has_the_bits_of_the_heads_own(layout: str) -> None:
    made = case(layout)
    own_kvs, kvs = made.new_kvs(), made.new_kvs()
    recorded = bind(made.head.passes, tiny.kernels(), kvs, BLOCK_SIZE)
    assert isinstance(recorded, EagerRunner)
    assert recorded.replays
    batches = [(0, [-1, 0, 0, 1]), (5, [-1, 0, 0, 1, 2]), (9, []), (3, [-1]), (MAX_RECORDED_ROWS, [-1, 0])]
    for num_span, parents in batches:
        batch, num_rows = tree_batch(num_span, parents, 1), num_span + len(parents)
        states, fed = random_rows(num_rows, made.head.state_size), random_rows(num_rows, made.head.hidden_size, 1)
        for ours, theirs in (
            (recorded.run(batch, states), made.head.read(batch, states, own_kvs)),
            (recorded.run_below(batch, fed), made.head.forward(batch, fed, own_kvs)),
        ):
            assert len(ours.logits) == len(theirs.logits) == len(parents) and torch.equal(ours.logits, theirs.logits)
            if parents:
                assert ours.features is not None and theirs.features is not None
                assert torch.equal(ours.features, theirs.features)
        for one, other in zip(kvs, own_kvs, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_rows_at_position_0_of_a_head_that_blanks_them_are_computed_by_the_head() -> None:
    made = case("deepseek")
    runner, plain, states = (
        bind(made.head.passes, tiny.kernels(), made.new_kvs(), BLOCK_SIZE),
        made.new_kvs(),
        random_rows(4, 0),
    )
    states = random_rows(4, made.head.state_size)
    for start in (0, 1, 2):
        batch = tree_batch(3, [-1], start, shift=-1)
        assert torch.equal(runner.run(batch, states).logits, made.head.read(batch, states, plain).logits)


def test_kernels_that_cannot_record_leave_the_head_as_it_is() -> None:
    made = case("mimo")
    assert not bind(made.head.passes, select_kernels("reference"), made.new_kvs(), BLOCK_SIZE).replays


# -- chains --------------------------------------------------------------------------------------------------------


class Side:
    """A drafter on a pool of its own; `native` or level by level."""

    def __init__(self, made: Case, native: bool, coupled: bool, width: int = 1) -> None:
        self.kvs, self.made = made.new_kvs(), made
        # Kernels that cannot record leave the head's own pass in place, and with it the levels.
        kernels = tiny.kernels() if native else select_kernels("reference")
        grower, size = TreeGrower(tiny.kernels(), coupled), BLOCK_SIZE
        context = context_of(mtp.SPEC, made.target, kernels, grower, size, max_draft_tokens=16, tree_width=width)
        self.drafter = head_drafter(made.head, context)
        self.drafter.attach((), self.kvs)
        assert self.drafter.runner.replays == native

    def observe(self, seen: list[Observed], num_rows: int) -> None:
        layers = self.drafter.hidden_layers
        rows = random_rows(num_rows, self.made.head.state_size)
        states = rows.split(rows.shape[1] // len(layers), dim=1)
        for each in seen:
            each.request.num_computed += len(each.rows)
        self.drafter.observe(seen, {layer: state.contiguous() for layer, state in zip(layers, states, strict=True)})

    def start(self, known: list[Request]) -> None:
        """Prompts but for their last token were computed."""
        seen, first = [], 0
        for request in known:
            seen.append(Observed(request, range(first, first + request.root_position), (), ()))
            first += request.root_position
        self.observe(seen, first)

    def propose(self, known: list[Request], lengths: tuple[int, ...]) -> list[Draft]:
        drafts = [Draft(request, length + 1) for request, length in zip(known, lengths, strict=True)]
        self.drafter.propose(drafts)
        return drafts

    def accept(self, drafts: list[Draft], num_accepted: int) -> None:
        seen, first = [], 0
        for draft in drafts:
            kept = draft.tree.tokens[1 : 1 + num_accepted] if draft.tree.is_chain else ()
            tokens = (*kept, 7)
            draft.request.token_ids.extend(tokens)
            nodes = range(len(kept) + 1)
            seen.append(Observed(draft.request, [first + node for node in nodes], tuple(nodes), tokens))
            first += len(draft.tree)
        self.observe(seen, first)


def requests(temperature: float, **params: Any) -> list[Request]:
    made = []
    for index in range(len(LENGTHS)):
        prompt = tuple((37 * index + 11 * i) % 90 + 5 for i in range(9 + index))
        options = SamplingParams(temperature=temperature, max_tokens=60, **params)
        request = Request(str(index), prompt, options, seed=2**63 + index)
        request.block_ids = list(range(BLOCKS_EACH * index, BLOCKS_EACH * (index + 1)))[::-1]
        made.append(request)
    return made


def check_equal(ours: list[Draft], theirs: list[Draft]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.tree) > 1
        assert list(mine.tree.tokens) == list(other.tree.tokens)
        assert list(mine.tree.parents) == list(other.tree.parents)
        assert mine.survival == pytest.approx(other.survival, abs=1e-5) and mine.num_caught_up == other.num_caught_up
        for node in range(len(mine.tree)):
            q, other_q = mine.tree.proposal(node), other.tree.proposal(node)
            assert (q is None) == (other_q is None)
            assert q is None or other_q is None or torch.equal(q, other_q)


def play(made: Case, coupled: bool, temperature: float, width: int) -> None:
    """The same steps on both sides, compared after each."""
    sides = [Side(made, native, coupled, width) for native in (True, False)]
    known = [requests(temperature) for _ in sides]
    for side, mine in zip(sides, known, strict=True):
        side.start(mine)
    for lengths, num_accepted in ((LENGTHS, 2), (LENGTHS[::-1], 0), ((2, 2, 2, 2), 8), (LENGTHS, 1)):
        ours, theirs = (side.propose(mine, lengths) for side, mine in zip(sides, known, strict=True))
        check_equal(ours, theirs)
        for side, drafts in zip(sides, (ours, theirs), strict=True):
            side.accept(drafts, num_accepted)
    for mine, other in zip(sides[0].kvs, sides[1].kvs, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["eagle1", "safeailab", "eagle3.1", "mimo", "deepseek"])
def test_chains_are_the_levels(layout: str, temperature: float, coupled: bool) -> None:
    play(case(layout), coupled, temperature, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_grown_with_a_recorded_head_are_the_same(temperature: float) -> None:
    play(case("safeailab"), True, temperature, 3)


def test_chains_are_one_native_call_unless_the_path_shapes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch_chains(monkeypatch)
    for params, wanted in (({}, 1), ({"presence_penalty": 0.5}, 1)):
        side, known = Side(case("mimo"), True, True), requests(1.0, **params)
        side.start(known)
        assert all(
            len(draft.tree) == length + 1 for draft, length in zip(side.propose(known, LENGTHS), LENGTHS, strict=True)
        )
        assert len(calls) == wanted
