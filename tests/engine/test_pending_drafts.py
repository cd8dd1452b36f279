"""Drafts that are read with the target's choices: the same tokens, whatever shares the step, and the same counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.assemble import assemble
from forerun.cache.states import RecurrentStates
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import Request, SamplingParams
from forerun.drafters.portfolio import Portfolio
from forerun.engine.engine import Engine
from forerun.kernels.device import CPU
from forerun.models.base import StateSpec
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.medusa_heads import load_medusa
from forerun.models.walk import walk_of
from forerun.policy.acceptance import Acceptance
from forerun.runtime.rows import RowRunner
from forerun.speculation.draft import PendingDrafts, PendingRows, Proposal
from forerun.speculation.verifier import CoupledVerifier
from tests.drafters import test_medusa, test_mtp
from tests.models import factory
from tests.support import heads, tiny
from tests.support.enqueued import as_on_a_gpu
from tests.support.hopeful import expect_much

LAYERS = 2


@pytest.fixture
def num_pending(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trees were pending in every step that had some, and grew."""
    found: list[int] = []
    finish = PendingDrafts.finish

    def counted(pending: PendingDrafts, host: Any) -> None:
        finish(pending, host)
        found.append(sum(len(draft.tree) > 1 for draft in pending.drafts))

    monkeypatch.setattr(PendingDrafts, "finish", counted)
    return found


def engine(drafter: DrafterConfig, **options: Any) -> Engine:
    """Everything as on a GPU, but for what writes work down."""
    model, kernels = tiny.target(LAYERS), tiny.kernels()
    options = {"block_size": 4, "max_model_len": tiny.MAX_LEN, **options}
    with as_on_a_gpu():
        made = assemble(EngineConfig(model="tiny", drafter=drafter, **options), model, kernels, lambda _: model)
    made.verifier = CoupledVerifier(kernels, at_once=True)
    return made


class ReadFirst(CoupledVerifier):
    """The same choices, of drafts that were read before."""

    def reads_pending(self, requests: Sequence[Request]) -> bool:
        return False


def with_draft(width: int, adaptive: bool = False, **options: Any) -> Engine:
    """The target drafts for itself, so that much is accepted."""
    return of_members([draft_config(width)], adaptive, **options)


def draft_config(width: int) -> DrafterConfig:
    return DrafterConfig(name="draft", model="tiny", max_draft_tokens=7, tree_width=width)


def with_head(width: int, folder: Path, adaptive: bool = False, **options: Any) -> Engine:
    """A random head, of which next to nothing is accepted."""
    heads.write(folder, test_mtp.mimo_tensors(), test_mtp.mimo_config())
    config = DrafterConfig(name="mtp", model=str(folder), max_draft_tokens=6, tree_width=width)
    return of_members([config], adaptive, **options)


def with_medusa(width: int, folder: Path, adaptive: bool = False, **options: Any) -> Engine:
    """Heads fitted to the target's text, of which something is accepted."""
    config = DrafterConfig(name="medusa", model=str(folder), max_draft_tokens=20 if width > 1 else 4, tree_width=width)
    return of_members([config], adaptive, **options)


def of_members(members: Sequence[DrafterConfig], adaptive: bool, **options: Any) -> Engine:
    """A single drafter, or a portfolio; its policy adapts, and hopes for much, or always drafts the same number."""
    if len(members) == 1:
        config = replace(members[0], adaptive=adaptive)
    else:
        config = DrafterConfig(name="portfolio", members=tuple(members), max_draft_tokens=12, adaptive=adaptive)
    made = engine(config, **options)
    if adaptive:
        expect_much(made)
    return made


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_medusa.write_fitted(tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_pending_drafts_of_a_model_change_no_token(width: int, temperature: float, num_pending: list[int]) -> None:
    groups = tiny.groups(4, temperature=temperature, max_tokens=14)
    made = with_draft(width, max_num_batched_tokens=40, max_num_prefill_tokens=5)  # prompts are read beside drafts
    found, stats = tiny.run(made, groups)
    assert found == tiny.plain(tiny.target(LAYERS), groups)
    assert max(num_pending) >= 2 and tiny.num_accepted(stats) > 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_pending_drafts_of_a_head_change_no_token(
    width: int, temperature: float, tmp_path: Path, num_pending: list[int]
) -> None:
    groups = tiny.groups(3, temperature=temperature, max_tokens=10)
    found, _ = tiny.run(with_head(width, tmp_path), groups)
    assert found == tiny.plain(tiny.target(LAYERS), groups) and max(num_pending) == 3


@pytest.mark.parametrize("width", [1, 3])
def test_a_pending_tree_is_the_one_that_is_read_at_once(width: int, num_pending: list[int]) -> None:
    groups = tiny.groups(3, temperature=1.0, max_tokens=12)
    pending, early = with_draft(width), with_draft(width)
    early.verifier = ReadFirst(tiny.kernels(), at_once=True)
    (tokens, stats), (expected, expected_stats) = tiny.run(pending, groups), tiny.run(early, groups)
    assert tokens == expected and num_pending
    for own, other in zip(stats, expected_stats, strict=True):
        assert (own.num_steps, own.trees, own.drafters) == (other.num_steps, other.trees, other.drafters)


@pytest.mark.parametrize("width", [1, 3])
def test_rows_of_pending_drafts_are_shown_with_their_tokens(
    width: int, num_pending: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[list[list[int]]] = []
    for verifier in (CoupledVerifier, ReadFirst):
        made, seen = with_draft(width), list[list[int]]()
        made.verifier = verifier(tiny.kernels(), at_once=True)
        assert isinstance(made.drafter, Portfolio)
        monkeypatch.setattr(Portfolio, "wants_logits", True)
        monkeypatch.setattr(
            made.drafter, "observe_logits", lambda ids, logits, firsts, to=seen: to.append(ids.tolist())
        )
        tiny.run(made, tiny.groups(3, temperature=1.0, max_tokens=12))
        shown.append(seen)
    assert num_pending and shown[0] == shown[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pending_drafts_change_no_token_of_a_model_with_recurrent_layers(
    temperature: float, tmp_path: Path, num_pending: list[int]
) -> None:
    llm = LLM(str(test_mtp.WithModule(tmp_path, "qwen3.5").folder), max_num_seqs=1, threads=1)
    params = SamplingParams(temperature=temperature, max_tokens=20, seed=1, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 10, 11, 9]]
    with as_on_a_gpu():
        made = llm.with_drafter("mtp", adaptive=False, tree_width=3, max_draft_tokens=7, max_num_seqs=2)
    made.engine.verifier = CoupledVerifier(llm.kernels, at_once=True)
    found, expected = made.generate(prompts, params), llm.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]
    assert max(num_pending) == 2


def test_a_pending_tree_is_walked_as_the_tree_it_is() -> None:
    """Below a span and beside a draft that is not pending; nodes up to the last that a mask has a bit for."""
    parents = [-1, 0, 0, 2, 1, 4, *range(5, 63)]
    masks, depths = factory.tree_masks(parents)
    signed = [mask - (1 << 64) * (mask >> 63) for mask in masks]
    tree, chain = (
        (range(64), range(64), masks, depths),
        (range(64), range(64), [(2 << i) - 1 for i in range(64)], range(64)),
    )
    beside = SequenceRows("b", range(20), 4, (), 4, (7, 7, 7), (0, 2, 5), (1, 5, 37), (0, 1, 2))
    batches = [
        ForwardBatch.build([beside, SequenceRows("a", range(20), 0, (5, 6), 2, *rows)], 4) for rows in (tree, chain)
    ]
    rows = torch.arange(6, 6 + 63)  # below the root
    pending = PendingRows(rows, torch.zeros(63), torch.tensor(depths[1:]), torch.tensor(signed[1:]))
    states = RecurrentStates([StateSpec((1, 1), (1, 1, 1))], 2, CPU)
    states.begin("b", 0)
    states.end("b", 4)
    expected = walk_of(batches[0], states, CPU)
    states.end("b", 4)
    found = walk_of(replace(batches[1], pending=pending), states, CPU)
    assert expected.parents[:5].tolist() == [-1, 0, 1, -1, 3] and torch.equal(found.parents, expected.parents)


def test_requests_whose_logits_are_shaped_are_read_first(num_pending: list[int]) -> None:
    groups = tiny.groups(2, temperature=1.0, max_tokens=6, top_k=5)
    assert tiny.run(with_draft(3), groups)[0] == tiny.plain(tiny.target(LAYERS), groups)
    assert num_pending == []


LIMITS: list[dict[str, int]] = [{}, {"max_num_batched_tokens": 19, "max_num_prefill_tokens": 5}, {"num_kv_blocks": 30}]


@pytest.mark.parametrize("limits", LIMITS, ids=["free", "chunks", "preempted"])
@pytest.mark.parametrize(("width", "temperature"), [(1, 0.7), (3, 0.0)])
def test_pending_drafts_under_the_adaptive_policy_change_no_token(
    width: int, temperature: float, limits: dict[str, int], num_pending: list[int]
) -> None:
    groups = tiny.groups(5, temperature=temperature, max_tokens=13)
    found, stats = tiny.run(with_draft(width, adaptive=True, **limits), groups)
    assert found == tiny.expected(LAYERS, 5, temperature=temperature, max_tokens=13)
    assert max(num_pending) >= 2 and tiny.num_accepted(stats) > 10
    assert any(stat.num_preemptions for stat in stats) or "num_kv_blocks" not in limits


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("width", "temperature"), [(1, 0.7), (4, 0.0), (16, 0.7)])
def test_pending_drafts_of_medusa_change_no_token(
    width: int, temperature: float, adaptive: bool, fitted: Path, num_pending: list[int]
) -> None:
    groups = tiny.groups(6, temperature=temperature)
    found, stats = tiny.run(with_medusa(width, fitted, adaptive), groups)
    assert found == tiny.expected(LAYERS, 6, temperature=temperature)
    assert max(num_pending) >= 3 and tiny.num_accepted(stats) > 5


@pytest.mark.parametrize("limits", LIMITS[1:], ids=["chunks", "preempted"])
def test_pending_drafts_of_heads_under_the_adaptive_policy_change_no_token(
    limits: dict[str, int], fitted: Path, tmp_path: Path, num_pending: list[int]
) -> None:
    groups = tiny.groups(5, temperature=0.7, max_tokens=11)
    for made in (with_medusa(4, fitted, True, **limits), with_head(3, tmp_path, True, **limits)):
        num_pending.clear()
        found, stats = tiny.run(made, groups)
        assert found == tiny.expected(LAYERS, 5, temperature=0.7, max_tokens=11) and num_pending
        assert any(stat.num_preemptions for stat in stats) or "num_kv_blocks" not in limits


def test_requests_with_less_room_or_a_drafter_of_their_own_beside_others(num_pending: list[int]) -> None:
    """Some speculate with one or two drafts, one not at all, and one asks for the drafter by its name."""
    groups = tiny.groups(5, temperature=0.7, max_tokens=12)
    expected = tiny.plain(tiny.target(LAYERS), groups)
    for index, group in enumerate(groups[:4]):
        request = group.samples[0].request
        request.max_nodes, request.speculate = (index + 1, True) if index else (None, False)
    groups[4].samples[0].request.drafter = "draft"
    found, stats = tiny.run(with_draft(3, adaptive=True), groups)
    assert found == expected and num_pending
    assert stats[0].trees.drafted == 0 < stats[4].trees.drafted
    for index in (1, 2, 3):
        assert 0 < stats[index].trees.drafted <= index * stats[index].num_steps


def test_medusas_pending_tree_is_the_one_that_is_read_at_once(fitted: Path, num_pending: list[int]) -> None:
    groups = tiny.groups(4, temperature=0.7, max_tokens=15)
    pending, early, on_host = (with_medusa(5, fitted) for _ in range(3))
    early.verifier = ReadFirst(tiny.kernels(), at_once=True)
    heads_alone = load_medusa(fitted, tiny.target(LAYERS), tiny.kernels())
    tiny.inner(on_host).runner = RowRunner(heads_alone.passes, heads_alone.compute)  # the host finds the tree
    told = [tiny.run(made, groups) for made in (pending, early, on_host)]
    assert num_pending and told[0][0] == told[1][0] == told[2][0]
    for stats in zip(*(stats for _, stats in told), strict=True):
        assert len({(of.num_steps, str(of.trees), str(of.drafters)) for of in stats}) == 1


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("order", "temperature"), [(1, 0.7), (-1, 0.0)])
def test_a_portfolio_leaves_the_last_members_drafts_pending_and_joins_the_others(
    order: int, temperature: float, adaptive: bool, num_pending: list[int]
) -> None:
    members = [DrafterConfig(name="ngram", max_draft_tokens=3, ngram_min=1, ngram_max=2), draft_config(3)][::order]
    groups = tiny.groups(4, temperature=temperature, max_tokens=16)
    found, stats = tiny.run(of_members(members, adaptive), groups)
    assert found == tiny.expected(LAYERS, 4, temperature=temperature, max_tokens=16)
    assert bool(num_pending) == (order == 1), "nobody is asked behind a draft model that comes last"
    assert {name for stat in stats for name, count in stat.drafters.items() if count.accepted} >= {"draft"}


def test_two_models_in_a_portfolio_are_read_one_after_the_other(fitted: Path, num_pending: list[int]) -> None:
    """Each is asked for requests of its own, and for one they share: a step waits for the drafts of one at most."""
    groups = tiny.groups(6, temperature=0.7, max_tokens=14)
    for index, group in enumerate(groups[:5]):
        group.samples[0].request.drafter = "medusa" if index % 2 else "draft"
    members = [draft_config(2), DrafterConfig(name="medusa", model=str(fitted), tree_width=3)]
    for adaptive in (False, True):
        num_pending.clear()
        found, stats = tiny.run(of_members(members, adaptive), groups)
        assert found == tiny.plain(tiny.target(LAYERS), groups) and num_pending
        for index, stat in enumerate(stats[:5]):
            assert set(stat.drafters) <= {"medusa" if index % 2 else "draft"}


def test_a_portfolios_pending_trees_are_those_read_at_once_to_its_members_too(num_pending: list[int]) -> None:
    """Chances, counts, and how much of what was accepted a draft model knows to have computed."""
    groups, told = tiny.groups(4, temperature=0.7, max_tokens=16), []
    for verifier in (CoupledVerifier, ReadFirst):
        made, rows = of_members([DrafterConfig(name="suffix"), draft_config(3)], adaptive=False), list[int]()
        made.verifier = verifier(tiny.kernels(), at_once=True)
        assert isinstance(made.drafter, Portfolio)
        listen(made.drafter.members[1].drafter.runner, rows)
        tokens, stats = tiny.run(made, groups)
        told.append((tokens, [(of.num_steps, of.trees, of.drafters) for of in stats], rows))
    assert told[0] == told[1] and num_pending and len(told[0][2]) > 4


def listen(runner: Any, rows: list[int]) -> None:
    """Write down how many rows a draft model computes before it draws."""
    draw = runner.draw

    def counted(roots: Any, *others: Any) -> Any:
        rows.append(sum(len(of_one.span) + 1 for of_one in roots))
        return draw(roots, *others)

    runner.draw = counted


def test_pending_trees_are_judged_as_those_read_at_once(
    num_pending: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy is shown of a first tree: all of it, with the drafter's chances."""
    judged, log_chances = list[Any](), Acceptance.log_chances

    def heard(self: Acceptance, proposal: Proposal) -> list[float]:
        judged.append((proposal.tokens, proposal.parents, proposal.log_chances))
        return log_chances(self, proposal)

    monkeypatch.setattr(Acceptance, "log_chances", heard)
    first = []
    for verifier in (CoupledVerifier, ReadFirst):
        made = with_draft(3, adaptive=True)
        made.verifier = verifier(tiny.kernels(), at_once=True)
        judged.clear()
        tiny.run(made, tiny.groups(1, temperature=0.7, max_tokens=10))
        first.append(judged[0])
    assert first[0] == first[1] and len(first[0][0]) > 4 and num_pending
