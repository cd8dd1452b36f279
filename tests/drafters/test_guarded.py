"""A drafter that fails costs its requests nothing but the speed-up, and is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.drafters.base import Drafter, DrafterHealth, Observed, Stateless
from forerun.drafters.ngram import NgramDrafter, select_index
from forerun.drafters.portfolio import FIRST_REST_S, GOOD_S, LONGEST_REST_S, MAX_ERRORS, Member, Portfolio
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.errors import ConfigError
from forerun.speculation.draft import Draft, PendingDrafts
from forerun.speculation.growth import TreeGrower
from tests.support import harness
from tests.support.drafting import draw_children
from tests.support.toy import ToyModel

VOCAB = 24
Propose = Callable[[Sequence[Draft]], None]


class Failing(Stateless):
    """Proposes a token it makes up, then does what the test wants."""

    name = "failing"
    max_nodes = 5

    def __init__(self, fail: Propose, fail_at: int = 2, observe_fails: bool = False) -> None:
        self.fail = fail
        self.num_calls = 0
        self.asked: list[str] = []
        self._fail_at = fail_at
        self._observe_fails = observe_fails

    def propose(self, drafts: Sequence[Draft]) -> None:
        self.num_calls += 1
        self.asked += [draft.request.request_id for draft in drafts]
        for draft in drafts:
            draft.add_chain([1, 2])
        if self.num_calls >= self._fail_at:
            self.fail(drafts)

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        if self._observe_fails:
            raise RuntimeError("it saw nothing")


def raising(drafts: Sequence[Draft]) -> None:
    raise IndexError("beyond the end")


def outside_the_vocabulary(drafts: Sequence[Draft]) -> None:
    drafts[0].add(0, VOCAB, 0.0)


def no_token(drafts: Sequence[Draft]) -> None:
    drafts[-1].add(0, 1.5, 0.0)  # type: ignore[arg-type]


def too_many(drafts: Sequence[Draft]) -> None:
    drafts[0].tree.add_chain(0, range(3, 20), "failing")


def no_chance(drafts: Sequence[Draft]) -> None:
    drafts[0].add(0, 3, float("nan"))


def a_probability(drafts: Sequence[Draft]) -> None:
    drafts[0].add(0, 3, 800.0)


def more_than_asked_for(drafts: Sequence[Draft]) -> None:
    for token in range(3, 20):
        drafts[0].add(0, token, 0.0)


def below_nothing(drafts: Sequence[Draft]) -> None:
    drafts[0].add(-1, 3, 0.0)


def another_root(drafts: Sequence[Draft]) -> None:
    drafts[0].tree = Draft(Request("x", (23,), SamplingParams(), 0), 3).tree


NONSENSE = [
    raising,
    outside_the_vocabulary,
    no_token,
    too_many,
    no_chance,
    a_probability,
    more_than_asked_for,
    below_nothing,
    another_root,
]


def groups(num: int, temperature: float) -> list[RequestGroup]:
    params = SamplingParams(max_tokens=9, temperature=temperature)
    return [harness.request(i, [0, 1, 2, 0, 1, i], params) for i in range(num)]


def guarded_engine(failing: Failing, in_portfolio: bool, **options: str) -> Engine:
    made = harness.engine("none", **options)
    others = [NgramDrafter(4, 1, 3, select_index())] if in_portfolio else []
    return harness.with_drafter(made, guarded(failing, *others, coupled=options.get("verification") != "rejection"))


def guarded(*drafters: Drafter, coupled: bool = True) -> Portfolio:
    return Portfolio([Member(drafter, VOCAB) for drafter in drafters], "portfolio", 9, coupled)


def health(portfolio: Portfolio) -> DrafterHealth:
    return portfolio.health["failing"]


@pytest.mark.parametrize("fail", NONSENSE)
@pytest.mark.parametrize("in_portfolio", [False, True])
def test_the_text_is_that_of_plain_decoding(fail: Propose, in_portfolio: bool) -> None:
    for temperature in (0.0, 1.0):
        wanted = groups(2, temperature)
        failing = Failing(fail)
        again = [harness.fresh(group) for group in wanted]
        made = guarded_engine(failing, in_portfolio)
        assert harness.run(made, again, may_fail=True) == harness.plain(wanted)
        failed = [g.samples[0].request.failed_drafters for g in again]
        assert ("failing",) in failed
        assert sum(len(g.output().outputs[0].stats.failed_drafters) for g in again) == len(list(filter(None, failed)))


@pytest.mark.parametrize("fail", NONSENSE)
@pytest.mark.parametrize("in_portfolio", [False, True])
def test_the_rejection_rule_goes_on(fail: Propose, in_portfolio: bool) -> None:
    made = guarded_engine(Failing(fail), in_portfolio, verification="rejection")
    texts = harness.run(made, groups(2, 1.0), may_fail=True)
    assert all(len(text) == 9 and all(0 <= token < VOCAB for token in text) for [text] in texts)


def test_a_failed_request_is_not_drafted_for_again() -> None:
    failing = Failing(raising, fail_at=1)
    wanted = groups(1, 0.0)
    harness.run(guarded_engine(failing, False), wanted, may_fail=True)
    assert failing.num_calls == 1
    assert wanted[0].output().outputs[0].stats.why_plain == "drafter failing failed and was left out"


def test_other_members_go_on() -> None:
    wanted = groups(1, 0.0)
    harness.run(guarded_engine(Failing(raising, fail_at=1), True), wanted, may_fail=True)
    counts = wanted[0].output().outputs[0].stats.drafters
    assert set(counts) == {"ngram"} and counts["ngram"].drafted > 0


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("forerun.drafters.portfolio.time", clock)
    return clock


def test_after_some_errors_it_rests(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    failing = Failing(raising, fail_at=1)
    made = guarded_engine(failing, False)
    with caplog.at_level(logging.ERROR, "forerun.drafters"):
        for index in range(6):
            harness.run(made, [groups(6, 0.0)[index]], may_fail=True)
    assert failing.num_calls == MAX_ERRORS == len(caplog.records)
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]
    assert "IndexError: beyond the end" in caplog.records[0].message
    assert f"it rests for {FIRST_REST_S:.0f} s" in caplog.records[-1].message


def test_after_a_rest_it_is_tried_again_with_new_requests(clock: Clock) -> None:
    """The text is the same all along; a request that ran during the rest goes on without it."""
    failing = Failing(raising, fail_at=1)
    drafter = guarded(failing)
    made = harness.with_drafter(harness.engine("none"), drafter)

    def run(index: int) -> RequestGroup:
        [wanted] = groups(index + 1, 0.0)[index:]
        again = harness.fresh(wanted)
        assert harness.run(made, [again], may_fail=True) == harness.plain([wanted])
        return again

    for index in range(MAX_ERRORS):
        run(index)
    assert health(drafter) == DrafterHealth(MAX_ERRORS, FIRST_REST_S)
    asked = Request("asked", (1, 2), SamplingParams(), seed=3)
    assert not drafter.members[0].drafts_for(asked) and asked.failed_drafters == ()  # asking changes nothing
    during = run(3)
    assert during.samples[0].request.failed_drafters == ("failing",) and failing.num_calls == MAX_ERRORS
    old = Request("old", (1, 2), SamplingParams(), seed=3)
    drafter.begin(old)
    clock.now += FIRST_REST_S
    assert health(drafter).rest_s == 0.0
    drafter.propose([Draft(old, 5)])
    assert failing.num_calls == MAX_ERRORS  # of the old request it saw only a part
    run(4)
    assert failing.num_calls == MAX_ERRORS + 1 and health(drafter).rest_s == 2 * FIRST_REST_S  # one error is enough
    clock.now += 2 * FIRST_REST_S
    failing.fail = lambda drafts: None
    works = run(5)
    assert works.samples[0].request.failed_drafters == () and works.output().outputs[0].stats.drafters
    assert health(drafter) == DrafterHealth(MAX_ERRORS + 1, 0.0)


def test_errors_that_are_far_apart_do_not_add_up(clock: Clock) -> None:
    drafter = guarded(Failing(raising, fail_at=1))
    for index in range(3 * MAX_ERRORS):
        drafter.propose([Draft(Request(str(index), (1, 2), SamplingParams(), seed=3), 5)])
        assert health(drafter).rest_s == 0.0
        clock.now += GOOD_S / (MAX_ERRORS - 1) if index % (MAX_ERRORS - 1) == 0 else GOOD_S + 1


def test_rests_do_not_grow_for_ever(clock: Clock) -> None:
    drafter = guarded(Failing(raising, fail_at=1))
    rests = []
    for index in range(30):
        drafter.propose([Draft(Request(str(index), (1, 2), SamplingParams(), seed=3), 5)])
        rests.append(health(drafter).rest_s)
        clock.now += rests[-1]
    assert rests[MAX_ERRORS - 1 :][:3] == [60.0, 120.0, 240.0] and rests[-1] == LONGEST_REST_S


def test_a_failing_observe_is_caught_too() -> None:
    failing = Failing(raising, fail_at=99, observe_fails=True)
    wanted = groups(2, 1.0)
    again = [harness.fresh(group) for group in wanted]
    assert harness.run(guarded_engine(failing, False), again, may_fail=True) == harness.plain(wanted)
    assert again[0].samples[0].request.failed_drafters == ("failing",) and failing.asked.count("0-0") <= 1


@pytest.mark.parametrize("coupled", [True, False])
def test_only_what_was_drawn_outlives_an_error(coupled: bool) -> None:
    """A drawn node may not be dropped for what it is; guesses without randomness may."""
    grower = TreeGrower(harness.kernels(), coupled)

    def draw(drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            draft.take_back()
            draw_children(grower, draft, torch.zeros(VOCAB), 2)
        raise RuntimeError

    request = Request("r", (1, 2), SamplingParams(temperature=1.0), seed=3)
    draft = Draft(request, 5)
    guarded(Failing(draw, fail_at=1), coupled=coupled).propose([draft])
    assert len(draft.tree) == len(draft.survival) == (1 if coupled else 3)
    assert request.failed_drafters == ("failing",)


def test_a_drafter_that_fails_after_it_promised_trees_owes_nothing() -> None:
    def promise(drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            draft.take_back()
        unread = torch.zeros(len(drafts), 4, dtype=torch.int64)
        PendingDrafts(drafts, unread, lambda _: None, unread, unread, unread)
        raise RuntimeError

    draft = Draft(Request("r", (1, 2), SamplingParams(), seed=3), 5, may_be_pending=True)
    guarded(Failing(promise, fail_at=1)).propose([draft])
    assert len(draft.tree) == 1 and draft.pending is None


def test_something_else_than_a_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="ToyModel is no drafter: it lacks name, max_nodes, "):
        Member(ToyModel(), VOCAB)  # type: ignore[arg-type]


def test_members_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="a portfolio has 2 members named failing: name each drafter once"):
        guarded(Failing(raising), Failing(raising))


def test_drafts_count_for_the_member_by_whatever_name_it_goes() -> None:
    """A call that found drafts is told as one that did, and they are calibrated."""
    drafter, draft = guarded(Failing(raising)), Draft(Request("r", (1, 2), SamplingParams(), seed=3), 5)
    drafter.propose([draft])
    [call] = drafter.take_calls()
    assert call.member == "failing" and call.asked[0].num_drafts == 2
    assert draft.tree.sources == ["", "failing", "failing"] and [each.member for each in draft.proposals] == ["failing"]


def test_a_failed_request_claims_no_rows() -> None:
    class Claiming(Failing):
        def num_ready(self, request: Request) -> tuple[int, ...]:
            return (3, 4)

    drafter = guarded(Claiming(raising, fail_at=1))
    request = Request("r", (1, 2, 3, 4, 5), SamplingParams(), seed=3)
    assert drafter.num_ready(request) == (3, 4)
    drafter.propose([Draft(request, 5)])
    assert drafter.num_ready(request) == (0, 0)


@pytest.mark.parametrize("said", [None, 3])
def test_rows_that_are_no_tuple_are_a_failure_of_the_drafter(said: Any) -> None:
    class Forgetful(Failing):
        def num_ready(self, request: Request) -> tuple[int, ...]:
            return said

    drafter = guarded(Forgetful(raising))
    request = Request("r", (1, 2, 3, 4, 5), SamplingParams(), seed=3)
    assert not any(drafter.num_ready(request)) and "failing" in request.failed_drafters
    assert drafter.health["failing"].num_errors == 1


def test_a_call_counts_once_however_many_trees_it_spoils() -> None:
    def spoil(drafts: Sequence[Draft]) -> None:
        for draft in drafts[:2]:
            draft.add(0, -1, 0.0)

    drafter = guarded(Failing(spoil, fail_at=1))
    drafts = [Draft(Request(name, (1, 2), SamplingParams(), seed=3), 5) for name in "abc"]
    drafter.propose(drafts)
    assert health(drafter).num_errors == 1 and [len(draft.tree) for draft in drafts] == [1, 1, 3]
    assert [draft.request.failed_drafters for draft in drafts] == [("failing",), ("failing",), ()]
