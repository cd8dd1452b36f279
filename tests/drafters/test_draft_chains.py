"""Chains drafted in one native call are the chains drafted level by level: tokens, q, bookkeeping and KV."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core import Request, SamplingParams
from forerun.drafters import draft_model
from forerun.drafters.base import Observed
from forerun.kernels.select import select_kernels
from forerun.runtime.recorded import MAX_RECORDED_ROWS
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.models import factory
from tests.support import mini
from tests.support.drafting import context_of, watch_chains

pytest.importorskip("forerun.kernels.cpu._native")

BLOCK_SIZE = 4
BLOCKS_EACH = 30
LENGTHS = (5, 1, 8, 3)  # nodes each draft may have besides its root


class Side:
    """A drafter on a pool of its own; `native` or level by level."""

    def __init__(self, native: bool, coupled: bool) -> None:
        kernels, model = mini.plain().kernels, mini.plain().loaded.model
        self.kvs = factory.new_kvs(model, BLOCKS_EACH * len(LENGTHS), BLOCK_SIZE)
        grower = TreeGrower(kernels, coupled)
        # Kernels that cannot record leave the model's own forward in place, and with it the levels.
        recording = kernels if native else select_kernels("reference")
        self.drafter = draft_model.build(
            context_of(draft_model.SPEC, model, recording, grower, BLOCK_SIZE, max_draft_tokens=16, tree_width=1)
        )
        self.drafter.attach((), self.kvs)
        assert self.drafter.runner.replays == native

    def propose(self, requests: list[Request], lengths: tuple[int, ...], least: float = 0.0) -> list[Draft]:
        drafts = [Draft(request, length + 1, least=least) for request, length in zip(requests, lengths, strict=True)]
        self.drafter.propose(drafts)
        return drafts


def requests(temperature: float, prompt_len: int, **params: object) -> list[Request]:
    made = []
    for index in range(len(LENGTHS)):
        prompt = tuple((37 * index + 11 * i) % 300 + 5 for i in range(prompt_len + index))
        options = SamplingParams(temperature=temperature, max_tokens=50, **params)  # type: ignore[arg-type]
        request = Request(str(index), prompt, options, seed=2**63 + index)
        request.block_ids = list(range(BLOCKS_EACH * index, BLOCKS_EACH * (index + 1)))[::-1]
        made.append(request)
    return made


def accept(side: Side, drafts: list[Draft], num_accepted: int) -> None:
    seen = []
    for draft in drafts:
        kept = draft.tree.tokens[1 : 1 + num_accepted]
        tokens = (*kept, 7)
        draft.request.token_ids.extend(tokens)
        seen.append(Observed(draft.request, (), tuple(range(len(kept) + 1)), tokens))
    side.drafter.observe(seen, {})


def check_equal(ours: list[Draft], theirs: list[Draft]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.tree) == mine.max_nodes
        assert list(mine.tree.tokens) == list(other.tree.tokens)
        assert list(mine.tree.parents) == list(other.tree.parents)
        assert mine.survival == pytest.approx(other.survival, abs=1e-5) and mine.num_caught_up == other.num_caught_up
        for node in range(len(mine.tree)):
            q, other_q = mine.tree.proposal(node), other.tree.proposal(node)
            assert (q is None) == (other_q is None)
            assert q is None or other_q is None or torch.equal(q, other_q)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prompt_len", [6, MAX_RECORDED_ROWS + 6])
def test_chains_are_the_levels(coupled: bool, temperature: float, prompt_len: int) -> None:
    sides = [Side(native, coupled) for native in (True, False)]
    known = [requests(temperature, prompt_len) for _ in sides]
    for lengths, num_accepted in ((LENGTHS, 2), (LENGTHS[::-1], 0), ((2, 2, 2, 2), 8), (LENGTHS, 1)):
        ours, theirs = (side.propose(mine, lengths) for side, mine in zip(sides, known, strict=True))
        check_equal(ours, theirs)
        for side, drafts in zip(sides, (ours, theirs), strict=True):
            accept(side, drafts, num_accepted)
    for mine, other in zip(sides[0].kvs, sides[1].kvs, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.05), (1.0, 0.3), (0.0, 0.8), (1.0, 2.0), (0.0, 5.0)])
def test_chains_end_together_where_they_promise_too_little(temperature: float, least: float) -> None:
    """As the levels do: drawn on as long as the chances of all that may go on add up to so much."""
    native, levels, whole = (
        Side(is_native, True).propose(requests(temperature, 6), LENGTHS, bound)
        for is_native, bound in ((True, least), (False, least), (True, 0.0))
    )
    for mine, other, full in zip(native, levels, whole, strict=True):
        num = len(mine.tree)
        assert list(mine.tree.tokens) == list(other.tree.tokens) == list(full.tree.tokens)[:num]
        assert mine.survival == full.survival[:num]
    num_levels = max(len(draft.tree) for draft in native) - 1
    promised = [sum(math.exp(d.survival[n]) for d in whole if len(d.tree) > n + 1) for n in range(1, max(LENGTHS))]
    assert num_levels == next((n for n, chance in enumerate(promised, 1) if chance < least), max(LENGTHS))


def test_native_chains_are_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    side, calls = Side(True, True), watch_chains(monkeypatch)
    side.propose(requests(0.0, 6), LENGTHS)
    assert len(calls) == 1
    side.propose(requests(0.0, 6, presence_penalty=0.5), LENGTHS)  # shaped by the path: drawn in Python
    assert len(calls) == 1


def test_a_row_without_an_answer_ends_its_chain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    side, known = Side(True, True), requests(0.0, 6)
    healthy = Side(True, True).propose(requests(0.0, 6), LENGTHS)
    for layer in side.kvs:  # the third request attends to poisoned values
        layer.values[known[2].block_ids[0]] = torch.nan
    side.drafter.resume(known[2], (BLOCK_SIZE,), None)
    drafts = side.propose(known, LENGTHS)
    assert len(drafts[2].tree) == 1
    for index in (0, 1, 3):
        assert list(drafts[index].tree.tokens) == list(healthy[index].tree.tokens)
