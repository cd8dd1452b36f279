"""Token recycling: the table follows the target's rows, the tree is the best of its size, texts stay the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.drafters.base import NUM_APART, logits_reader
from forerun.drafters.recycling import NUM_SUCCESSORS, PATIENCE, RANK_CHANCE, SELDOM, RecyclingDrafter, template
from forerun.kernels.select import select_kernels
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT
from tests.support import harness
from tests.support.toy import ToyModel

VOCAB = 24


def recycling(max_draft_tokens: int = 12, vocab_size: int = VOCAB) -> RecyclingDrafter:
    return RecyclingDrafter(max_draft_tokens, vocab_size, harness.kernels())


def propose(drafter: RecyclingDrafter, root: int, max_nodes: int | None = None) -> Draft:
    draft = Draft(Request("a", (root,), SamplingParams(), seed=0), max_nodes or drafter.max_nodes)
    drafter.propose([draft])
    return draft


def show(drafter: RecyclingDrafter, token_ids: Tensor, logits: Tensor, of: Request | None = None) -> None:
    """Rows of one request."""
    drafter.observe_logits(token_ids, logits, [(of or Request("a", (0,), SamplingParams(), seed=0), 0)])


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_children_are_the_best_of_the_last_row(backend: str) -> None:
    drafter = RecyclingDrafter(63, VOCAB, select_kernels(backend))
    logits = random_logits(4)
    show(drafter, torch.tensor([3, 5, 3, 7]), logits)
    show(drafter, torch.tensor([5]), logits[3:])
    for token, row in ((3, 2), (5, 3), (7, 3)):
        tree = propose(drafter, token).tree
        best = logits[row].topk(NUM_SUCCESSORS).indices.tolist()
        assert [tree.tokens[node] for node in tree.children(ROOT)] == best


def test_while_nobody_wants_drafts_few_steps_show_logits() -> None:
    """The others need not go phase by phase; a portfolio asks its members anew in every step."""
    drafter = recycling()
    both = harness.portfolio_of(harness.engine("none"), drafter)
    wanted = []
    for _ in range(PATIENCE + 3 * SELDOM):
        drafter.observe([], {})
        assert both.wants_logits == drafter.wants_logits == (logits_reader(both) is not None)
        wanted.append(drafter.wants_logits)
    assert all(wanted[:PATIENCE]) and sum(wanted[PATIENCE:]) == 3
    propose(drafter, 3)
    assert drafter.wants_logits


def test_nothing_is_guessed_of_unknown_tokens() -> None:
    drafter = recycling()
    assert len(propose(drafter, 3).tree) == 1
    show(drafter, torch.tensor([3]), random_logits(1))
    tree = propose(drafter, 3).tree
    assert len(tree) > 1 and all(tree.tokens[tree.parents[node]] == 3 for node in range(1, len(tree)))


def test_a_row_without_an_answer_is_forgotten() -> None:
    drafter, logits = recycling(), random_logits(2)
    show(drafter, torch.tensor([3, 4]), logits)
    logits[0, 5] = torch.nan
    show(drafter, torch.tensor([3, 4]), logits)
    assert len(propose(drafter, 3).tree) == 1
    assert len(propose(drafter, 4).tree) > 1


def test_a_vocabulary_smaller_than_the_table_is_wide() -> None:
    drafter = recycling(30, vocab_size=3)
    show(drafter, torch.arange(3), torch.eye(3))
    tree = propose(drafter, 0).tree
    assert [tree.tokens[node] for node in tree.children(ROOT)] == [0, 1, 2]


def test_the_template_is_the_best_tree_of_every_size() -> None:
    branches = template()
    ranks: list[tuple[int, ...]] = [()]
    for node, branch in enumerate(branches[1:], start=1):
        assert branch.parent < node
        ranks.append((*ranks[branch.parent], branch.rank))
        assert branch.log_survival == pytest.approx(sum(math.log(RANK_CHANCE[rank]) for rank in ranks[node]))
    assert len(set(ranks)) == len(branches) == 64
    every = [path for depth in range(1, 4) for path in itertools.product(range(8), repeat=depth)]
    costs = sorted(-math.log(math.prod(RANK_CHANCE[rank] for rank in path)) for path in every)
    short = sorted(-branch.log_survival for branch, path in zip(branches, ranks, strict=True) if 0 < len(path) < 4)
    assert short == pytest.approx(costs[: len(short)])
    survivals = [branch.log_survival for branch in branches]
    assert survivals == sorted(survivals, reverse=True)


def test_survival_is_the_templates() -> None:
    drafter = recycling()
    show(drafter, torch.arange(VOCAB), random_logits(VOCAB))
    draft = propose(drafter, 0)
    assert len(draft.tree) == 13
    assert draft.survival == [branch.log_survival for branch in template()[:13]]
    assert list(draft.tree.parents) == [branch.parent for branch in template()[:13]]


class Watched(RecyclingDrafter):
    """Checks the rows the engine shows against the trees it was given."""

    def __init__(self, model: ToyModel) -> None:
        super().__init__(8, VOCAB, harness.kernels())
        self.model = model
        self.shown: list[int] = []

    def observe_logits(self, token_ids: Tensor, logits: Tensor, firsts: Sequence[tuple[Request, int]]) -> None:
        super().observe_logits(token_ids, logits, firsts)
        self.shown += token_ids.tolist()
        starts = [first for _, first in firsts]
        assert starts == sorted(starts) and starts[0] == 0
        for request, first in firsts:  # its root is among the last tokens it knew before the step
            assert first == len(token_ids) or int(token_ids[first]) in request.token_ids
        for token, row in zip(token_ids.tolist(), logits, strict=True):
            assert torch.equal(row, self.model.logits([token]))


def groups(temperature: float) -> list[harness.RequestGroup]:
    params = [SamplingParams(seed=i, max_tokens=24, temperature=temperature) for i in range(3)]
    return [harness.request(i, [i, 3, 2 * i, 1], each) for i, each in enumerate(params)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_engine_shows_every_verified_row(temperature: float) -> None:
    """On a model that looks at one token only, each shown row is that of the token beside it; texts are plain."""
    model = ToyModel(VOCAB, memory=1)
    wanted = groups(temperature)
    for options in ({}, {"max_num_batched_tokens": 11}):
        drafter = Watched(model)
        again = [harness.fresh(group) for group in wanted]
        made = harness.with_drafter(harness.engine("none", model=model, **options), drafter)
        assert harness.run(made, again) == harness.plain(wanted, model=model)
        stats = [group.output().outputs[0].stats for group in again]
        num_nodes = sum(s.num_steps + sum(count.drafted for count in s.drafters.values()) for s in stats)
        assert len(drafter.shown) == num_nodes
        if temperature == 0.0:  # what followed a token follows it again
            assert sum(s.num_tokens for s in stats) > 1.7 * sum(s.num_steps for s in stats)


def test_rejection_rule_at_temperature_zero_is_greedy() -> None:
    wanted = groups(0.0)
    made = harness.with_drafter(harness.engine("none", verification="rejection"), recycling())
    assert harness.run(made, [harness.fresh(group) for group in wanted]) == harness.plain(wanted)


@pytest.mark.parametrize("across_requests", [True, False])
def test_what_ended_requests_said_is_used_only_if_it_may_be(across_requests: bool) -> None:
    drafter = RecyclingDrafter(4, VOCAB, harness.kernels(), across_requests)
    requests = [Request(name, (1,), SamplingParams(), seed=0) for name in "abc"]
    drafter.begin(requests[0])
    show(drafter, torch.tensor([1]), torch.eye(VOCAB)[[2]])
    drafter.begin(requests[1])  # beside the other one: nothing is forgotten
    assert guessed(drafter, requests[1]) == [2]
    drafter.end("a")
    drafter.end("b")
    drafter.begin(requests[2])
    assert guessed(drafter, requests[2]) == ([2] if across_requests else [])


def guessed(drafter: RecyclingDrafter, request: Request) -> list[int]:
    """What the drafter thinks follows the newest token."""
    draft = Draft(request, 2)
    drafter.propose([draft])
    return list(draft.tree.tokens[1:])


class SomeAdapter:
    """Adapters are told apart as objects."""


def test_requests_of_other_adapters_and_salts_learn_nothing_from_each_other() -> None:
    drafter, one = recycling(), SomeAdapter()
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"adapter": one}]
    kinds += [{"adapter": one, "cache_salt": "a"}]
    requests = [Request(str(i), (1,), SamplingParams(), seed=0, **kind) for i, kind in enumerate(kinds)]
    for each in requests:
        drafter.begin(each)
    logits = torch.eye(VOCAB)[[2, 3, 4, 5, 6]]
    firsts = [(each, row) for row, each in enumerate(requests[:3])]
    drafter.observe_logits(torch.tensor([1, 1, 1]), logits[:3], firsts)
    assert [guessed(drafter, each) for each in requests] == [[2], [3], [4], [], []]
    drafter.observe_logits(torch.tensor([1, 1]), logits[3:], [(requests[3], 0), (requests[4], 1)])
    assert [guessed(drafter, each) for each in requests] == [[2], [3], [4], [5], [6]]
    again = [Request("x", (1,), SamplingParams(), seed=0, **kind) for kind in kinds]
    assert [guessed(drafter, each) for each in again] == [[2], [3], [4], [5], [6]]


def test_few_salts_are_remembered_and_the_usual_lessons_stay() -> None:
    drafter = recycling()
    requests = [Request("", (1,), SamplingParams(), 0, cache_salt=str(i) if i else "") for i in range(NUM_APART + 2)]
    for each in requests:
        drafter.begin(each)
        show(drafter, torch.tensor([1]), torch.eye(VOCAB)[[2]], each)
    assert [bool(guessed(drafter, each)) for each in (requests[0], requests[-1], requests[2])] == [True] * 3
    assert guessed(drafter, requests[1]) == [], "the salt that was used longest ago"


def test_more_salts_than_there_are_tables_for_do_not_take_turns() -> None:
    """A table of a large vocabulary has megabytes: made anew for every request in every step it cost milliseconds."""
    drafter = recycling()
    requests = [Request(str(i), (1,), SamplingParams(), 0, cache_salt=str(i)) for i in range(NUM_APART + 4)]
    for each in requests:
        drafter.begin(each)
    tables = [id(drafter._tables.find(each)) for each in requests[4:]]
    for _ in range(3):
        for each in requests:
            show(drafter, torch.tensor([1]), torch.eye(VOCAB)[[2]], each)
    assert [guessed(drafter, each) for each in requests] == [[]] * 4 + [[2]] * NUM_APART
    assert [id(drafter._tables.find(each)) for each in requests[4:]] == tables
