"""The adaptive policy: members are asked for what they are worth at this load, and queries change nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch

from forerun.core import Request, SamplingParams
from forerun.drafters.base import Asked, DraftCall
from forerun.policy.acceptance import PROMISED
from forerun.policy.base import Outcome, StepResult, StepSeconds
from forerun.policy.costs import CallCosts, Costs, Mean, PassCosts
from forerun.policy.fixed import FixedPolicy
from forerun.policy.policy import TIMED, WARM_AFTER, AdaptivePolicy
from forerun.speculation.draft import Draft, PendingDrafts
from forerun.speculation.tree import ROOT
from tests.support.hopeful import show_right

FLAT, STEEP = PassCosts({1: 1.0, 64: 1.05}), PassCosts({1: 1.0, 64: 64.0})
ENQUEUED_S = 0.02  # what the host takes to give a device its work


def request(known: int = 1, max_tokens: int = 9999, **options: object) -> Request:
    return Request("r", (1,) * known, SamplingParams(), seed=0, max_len=known + max_tokens, **options)  # type: ignore[arg-type]


def policy(
    passes: PassCosts = FLAT, members: Sequence[str] = ("m",), call_s: float = 0.1, may_prune: bool = True,
    looks_at_drafts: bool = True,
) -> AdaptivePolicy:  # fmt: skip
    """One that knows what plain steps take."""
    costs = Costs(passes)
    for member in members:
        costs.calls[member] = CallCosts()
        costs.calls[member].expect(4, 4, call_s)
        costs.calls[member].expect_reading(100, 0.01)
    costs.learn_step(1, drafts=False, seconds=1.0)
    return AdaptivePolicy(16, costs, may_prune, looks_at_drafts)


def sizes(made: AdaptivePolicy, *drafts: Draft, member: str = "m") -> list[int]:
    plan = made.plan([draft.request for draft in drafts])
    return list(plan.sizes(member, drafts)) if plan.max_nodes(drafts[0].request) > 1 else [0] * len(drafts)


def step(
    made: AdaptivePolicy, requests: Sequence[Request], right: int, draft_s: float = 0.05, slow: float = 1.0
) -> tuple[float, int]:  # fmt: skip
    """One step of a drafter whose first drafts are right, on the machine of FLAT or a slower one -> seconds, drafts."""
    plan, calls_s, asked, num_rows = made.plan(requests), 0.0, [], 0
    drafts = [Draft(each, plan.max_nodes(each), member="m") for each in requests]
    growing = [draft for draft in drafts if draft.max_nodes > 1]
    for draft, size in zip(growing, plan.sizes("m", growing) if growing else [], strict=True):
        if size:
            draft.add_chain(range(2, 2 + size))
            proposal = draft.proposal_of("m")
            draft.believe(proposal, plan.log_chances(draft.request, proposal))
            draft.request.last_asked["m"] = len(draft.request.token_ids), 0
            asked.append(Asked(draft.request, 0, size, size))
            calls_s = max(calls_s, slow * draft_s * size)
    plan.prune(growing)
    outcomes = []
    for draft in drafts:
        tokens = [*range(2, 2 + min(right, draft.num_nodes - 1)), 1]
        draft.request.token_ids += tokens
        outcomes.append(Outcome(draft.request, draft, tokens))
        num_rows += draft.num_nodes
    calls = [DraftCall("m", calls_s, False, asked)] if asked else []
    seconds = slow * FLAT(num_rows) + calls_s
    made.learn(StepResult(outcomes, calls, num_rows, 0, StepSeconds(calls_s, seconds - calls_s, seconds, seconds)))
    return seconds, num_rows - len(requests)


def test_each_adapter_has_a_record_of_its_own() -> None:
    """What follows with an adapter says nothing of the model alone; a new adapter begins with the model's record."""

    class SomeAdapter:
        pass

    made, one, other = policy(), SomeAdapter(), SomeAdapter()
    plain, adapted = request(), request(adapter=one)
    for _ in range(60):
        step(made, [plain], 15)
        step(made, [adapted], 0)
    usual, bad, new = (
        made.acceptance_of(each).rates(request(), "m")[0] for each in (plain, adapted, request(adapter=other))
    )
    assert bad < 0.5 < usual == new


def test_a_good_member_is_asked_for_much_and_a_bad_one_hardly_ever() -> None:
    good, bad = policy(), policy()
    ones = {id(made): request() for made in (good, bad)}
    drafted = {id(good): 0, id(bad): 0}
    for _ in range(300):
        for made, right in ((good, 15), (bad, 0)):
            drafted[id(made)] += step(made, [ones[id(made)]], right)[1] > 0
    assert drafted[id(good)] > 270 and 0 < drafted[id(bad)] < 80
    assert sizes(good, Draft(request(), 16))[0] > 4


def test_what_never_pays_costs_next_to_nothing() -> None:
    made, one = policy(), request()
    for _ in range(100):
        step(made, [one], 0, draft_s=0.3)
    spent = [step(made, [one], 0, draft_s=0.3)[0] for _ in range(1000)]
    assert max(spent) > FLAT(1), "it is tried again now and then"
    assert sum(spent) < 1.02 * 1000 * FLAT(1)


def test_a_plain_step_believed_too_slow_is_measured_again() -> None:
    """Drafts that lose look like a gain beside it, and while every step drafts nothing would correct it."""
    made, one = policy(), request()
    made.costs.slowness[False, 1] = Mean(30.0, 8)  # the machine was busy
    made.costs._most_like.clear()
    assert sizes(made, Draft(one, 16))[0] > 8, "it seems to pay"
    for _ in range(200):
        step(made, [one], 0, draft_s=0.3)
    assert made.plain_step_s(1) < 3.0
    spent = [step(made, [one], 0, draft_s=0.3)[0] for _ in range(1000)]
    assert sum(spent) < 1.02 * 1000 * FLAT(1)


def test_drafts_are_made_again_after_a_busy_time() -> None:
    """Steps with drafts were measured in it and seem too dear: nobody drafts, so nobody measures them."""
    made, one = policy(), request()
    for number in range(60):
        step(made, [one], 3, slow=3.0 + number % 2)
    made.exploration.balance = -0.5
    for number in range(10):
        assert step(made, [one], 3, slow=3.0 + number % 2)[1] == 0
    drafted = [step(made, [one], 3)[1] > 0 for _ in range(200)]
    assert sum(drafted[-50:]) > 40


def test_plain_steps_grow_rare_while_drafts_pay() -> None:
    made, one = policy(), request()
    plain = [number for number in range(500) if step(made, [one], 15)[1] == 0]
    assert 11 <= len(plain) <= 13 and plain[-1] - plain[-2] == 129, "six of them in a row, the first time"


def test_a_member_that_has_become_good_is_found_again() -> None:
    made, one = policy(), request()
    for _ in range(100):
        step(made, [one], 0)
    drafted = [step(made, [one], 4)[1] > 0 for _ in range(400)]
    assert sum(drafted[-50:]) > 40


def test_a_member_is_tried_though_another_drafts() -> None:
    made, one = policy(members=("m", "n")), request()
    tried = []
    for _ in range(100):
        step(made, [one], right=3)  # by m
        tried.append(made.trial)
    assert "n" in tried and "m" not in tried


def test_a_member_that_cannot_draft_keeps_no_other_from_being_tried() -> None:
    """As a head that does not follow the request."""
    made, one = policy(members=("m", "n")), request()
    tried = set()
    for _ in range(400):
        plain = Outcome(one, Draft(one, 1), [1])
        made.learn(StepResult([plain], [], 1, 0, StepSeconds(0.0, FLAT(1), FLAT(1), FLAT(1))))
        tried.add(made.trial)
    assert {"m", "n"} <= tried


def test_gains_over_plain_steps_are_by_their_number_of_rows() -> None:
    made = policy()
    made.costs.learn_step(1, False, FLAT(1))
    assert made.costs.plain_s(64) is None
    made.costs.learn_plain(1, 0.5 * FLAT(1))
    assert (made.costs.plain_s(1) or 9.0) < 0.9 * FLAT(1)
    assert made.costs.plain_s(3) == pytest.approx(0.5 * FLAT(3)) and made.costs.plain_s(64) is None
    made.costs.learn_plain(64, 0.7 * FLAT(64))
    assert made.costs.plain_s(64) == pytest.approx(0.7 * FLAT(64)), "it is found once there is one"
    assert made.plain_s(0) is None and policy().plain_s(0) is None, "a step that only reads prompts"


def test_a_rest_is_timed_now_and_then() -> None:
    made, one = policy(), request()
    made.exploration.balance = -5.0
    for _ in range(200):
        plain_step(made, one, 1.0)
    num, balance = made.costs.slowness[False, 1].num, made.exploration.balance
    for _ in range(64):
        plain_step(made, one, 1.0)
    assert 64 // TIMED <= made.costs.slowness[False, 1].num - num < 64 / 3
    assert made.exploration.balance == pytest.approx(balance + 0.64)


def test_planning_changes_nothing() -> None:
    made, one = policy(), request()
    for _ in range(30):
        step(made, [one], 2)
    known = made.costs.slowness, made.costs.calls, made.exploration, made.acceptance.ranks, made.acceptance.bands
    before = deepcopy(known)
    for _ in range(3):
        draft = Draft(one, made.plan([one]).max_nodes(one))
        plan = made.plan([one])
        plan.sizes("m", [draft]), plan.least_chance("m"), plan.log_chances(draft.request, draft.proposal_of("m"))
        plan.prune([draft])
        made.explain(one)
    assert before == known


def test_what_earlier_members_found_makes_a_costly_one_needless() -> None:
    made = policy(members=("dear", "cheap"), call_s=0.9)
    show_right(made, "dear", 4, 3)
    show_right(made, "cheap", 4)
    empty, full = Draft(request(), 16), Draft(request(), 16, member="cheap")
    full.add_chain([2, 3, 4, 5])
    full.believe(full.proposal_of("cheap"), made.acceptance.log_chances(full.proposal_of("cheap")))
    assert sizes(made, empty, member="dear")[0] > 0 and sizes(made, full, member="dear") == [0]


def test_a_prompt_that_must_be_read_first_has_to_pay() -> None:
    made = policy()
    show_right(made, "m", 4)
    made.costs.learn_call("m", 1, 4, 4, 900, 90.0)
    assert sizes(made, Draft(request(known=900), 16)) != [0]
    assert sizes(made, Draft(request(known=900, max_tokens=20), 16)) == [0]
    assert sizes(made, Draft(request(known=30, max_tokens=20), 16)) != [0]
    assert "what m has to read first takes" in str(made.explain(request(known=900, max_tokens=20)))


def test_what_lay_in_the_prefix_cache_need_not_be_read_unless_it_was_lost() -> None:
    made, one = policy(), request(known=500)
    assert made.reading_s("m", one) == pytest.approx(500 * 0.01 / 100)
    one.num_cached_tokens = 480
    assert made.reading_s("m", one) == 0.0
    one.num_preemptions = 1
    assert made.reading_s("m", one) > 0.0


def test_kept_nodes_follow_the_price_of_rows() -> None:
    for passes, fewest, most in ((FLAT, 5, 5), (STEEP, 1, 3)):
        draft = Draft(request(), 16, member="m")
        node = ROOT
        for token, chance in ((2, 0.99), (3, 0.98), (4, 0.3), (5, 0.1)):
            node = draft.add(node, token, math.log(chance))
        policy(passes).plan([draft.request]).prune([draft])
        assert fewest <= draft.num_nodes <= most


@pytest.mark.parametrize("why", ["drawn", "pending"])
def test_what_may_not_be_chosen_among_or_was_not_read_is_not_pruned(why: str) -> None:
    draft = Draft(request(), 5, member="m")
    if why == "pending":
        nodes = torch.zeros(1, 4, dtype=torch.int64)
        PendingDrafts([draft], torch.zeros(0), lambda _: None, nodes, nodes, nodes)
    else:
        draft.add_chain([2, 3, 4, 5])
        draft.believe(draft.proposal_of("m"), [0.0, -9.0, -9.5, -9.9, -10.0])
    policy(STEEP, may_prune=why == "pending").plan([draft.request]).prune([draft])
    assert draft.num_nodes == 5


@pytest.mark.parametrize("speculate,most,budget", [(False, None, 1), (True, 3, 3), (True, None, 16)])
def test_a_request_may_ask_for_less(speculate: bool, most: int | None, budget: int) -> None:
    asked = request(speculate=speculate, max_nodes=most)
    assert policy().plan([asked]).max_nodes(asked) == budget
    assert FixedPolicy(16).plan([asked]).max_nodes(asked) == budget


def test_load_leaves_less_room() -> None:
    many = [request() for _ in range(32)]
    assert policy().plan(many).max_nodes(many[0]) == 4


def test_nobody_drafts_before_a_plain_step_was_seen() -> None:
    made = AdaptivePolicy(16, Costs(FLAT), may_prune=True)
    assert made.plan([request()]).max_nodes(request()) == 1
    step(made, [request()], 0)
    assert made.plan([request()]).max_nodes(request()) == 16


@pytest.mark.parametrize("prediction,is_right", [((), True), ((2, 3, 4), False), ((2, 3, 4), True)])
def test_a_prediction_is_tried_whatever_was_learned_and_used_while_it_is_right(
    prediction: tuple[int, ...], is_right: bool
) -> None:
    made, other = policy(members=("m", "other")), request()
    made.readers = frozenset(["m"])
    while made.exploration.may_draft:  # drafts were never right, and have lost all that they may
        learn_call(made, False, 9.0)
    assert sizes(made, Draft(other, 16, member="m")) == [0]
    one, asked = request(prediction=prediction), []
    for _ in range(40):
        plan = made.plan([one, other])
        drafts = [Draft(each, plan.max_nodes(each), member="m") for each in (one, other)]
        assert drafts[1].max_nodes == 1 and not any(plan.sizes("other", drafts))
        asked.append(list(plan.sizes("m", drafts)))
        draft, tokens = drafts[0], [7] * asked[-1][0] if is_right else []
        if asked[-1][0]:
            draft.add_chain([7] * PROMISED)
            draft.believe(draft.proposal_of("m"), [-9.0 * place for place in range(draft.num_nodes)])
            plan.prune(drafts)
            assert draft.num_nodes == 1 + PROMISED
            made.acceptance.learn(one, draft.proposal_of("m"), [*tokens, 1])
        one.token_ids += [*tokens, 1]
    none, all_of_it = [0, 0], [PROMISED, 0]
    usual = [none] * 40
    assert asked == (usual if not prediction else [all_of_it] * 40 if is_right else [all_of_it, *usual[1:]])


def test_wrong_predictions_of_some_keep_no_drafts_from_others() -> None:
    made = policy()
    made.readers = frozenset(["m"])
    step(made, [request(prediction=(9,))], 0, draft_s=1.0)
    while made.exploration.may_draft:
        learn_call(made, False, 9.0)
    for _ in range(100):
        step(made, [request(prediction=(9,))], 0, draft_s=1.0)
    assert made.exploration.balance > -10.0, "what they lost is not booked"
    assert made.plan([request()]).max_nodes(request()) == 1
    for _ in range(1000):
        step(made, [request()], 0)
    assert made.plan([request()]).max_nodes(request()) > 1


def plain_step(made: AdaptivePolicy, one: Request, seconds: float, waited: float = 0.0) -> None:
    outcome = Outcome(one, Draft(one, 1), [1])
    made.learn(StepResult([outcome], [], 1, 0, StepSeconds(0.0, seconds, waited + seconds, seconds)))


def test_drafts_gain_over_plain_decoding_whose_steps_no_drafts_slow() -> None:
    made, one = policy(), request()
    for _ in range(6):
        learn_call(made, False, 0.1)
        for _ in range(WARM_AFTER):
            plain_step(made, one, 3.0)
    assert made.plain_s(1) is None, "what plain decoding takes is not known yet"
    plain_step(made, one, 1.2)
    learn_call(made, False, 0.1)
    plain_step(made, one, 3.0)
    assert made.plain_s(1) == pytest.approx(1.2) and made.plain_step_s(1) > 1.5


def test_time_in_which_others_had_the_core_is_no_cost() -> None:
    made, one = policy(), request()
    before = made.exploration.balance
    for number in range(40):
        plain_step(made, one, 1.0, waited=9.0 * (number % 2))
    assert made.plain_step_s(1) == pytest.approx(1.0) and made.exploration.balance >= before


def test_what_drafts_gained_is_said_by_drafter() -> None:
    made, one = policy(), request()
    for right, gains in ((15, True), (0, False)):
        before = made.gained_s("m")
        step(made, [one], right)
        assert (made.gained_s("m") > before) == gains and made.plan([one]).gained_s("m") == made.gained_s("m")
    assert made.gained_s("other") == 0.0


@pytest.mark.parametrize("num_span", [0, 50])
def test_drafts_drawn_in_the_time_of_the_pass_are_told_from_it(num_span: int) -> None:
    """A GPU draws and verifies in one wait: what the pass takes beyond the usual is the drafts'."""
    made, one = policy(looks_at_drafts=False), request()
    for _ in range(40):
        draft = Draft(one, 5, member="m")
        draft.add_chain([2, 3, 4, 5])
        call = DraftCall("m", 0.01, True, [Asked(one, 0, 4, 4)])
        step_s = FLAT(5) + 0.51 + num_span
        seconds = StepSeconds(0.01, step_s - 0.01, step_s, step_s)
        made.learn(StepResult([Outcome(one, draft, [2, 1])], [call], 5, num_span, seconds))
    assert made.costs.calls["m"].call_s(4, 1) == pytest.approx(0.51 if num_span == 0 else 0.1, rel=0.02)
    assert made.plain_step_s(1) == pytest.approx(1.0)


def test_the_policy_explains_exactly_when_nobody_is_asked() -> None:
    good, bad, dear = policy(), policy(), policy(STEEP)
    for made, right in ((good, 4), (bad, 0), (dear, 4)):
        show_right(made, "m", 4, right)
        is_asked = any(sizes(made, Draft(request(), 16)))
        assert is_asked == (made is good) and (made.explain(request()) is None) == is_asked
    assert str(bad.explain(request())).startswith("drafts of m are right ")
    assert "too seldom for what they cost here" in str(dear.explain(request()))
    assert FixedPolicy(1).explain(request()) == "there is no drafter" and FixedPolicy(4).explain(request()) is None


def learn_call(made: AdaptivePolicy, is_pending: bool, drawn_s: float, num_span: int = 0) -> None:
    """A step in which a device drew four drafts: before the pass, which the host saw, or in the time of the pass."""
    one = request()
    draft = Draft(one, 5, member="m")
    draft.add_chain([2, 3, 4, 5])
    call_s = ENQUEUED_S if is_pending else ENQUEUED_S + drawn_s
    seconds = FLAT(5) + ENQUEUED_S + drawn_s + 0.5 * (num_span > 0)
    calls = [DraftCall("m", call_s, is_pending, [Asked(one, 0, 4, 4)])]
    outcomes = [Outcome(one, draft, [2, 9])]
    made.learn(StepResult(outcomes, calls, 5, num_span, StepSeconds(call_s, seconds - call_s, seconds, seconds)))


@pytest.mark.parametrize("is_pending", [True, False])
def test_a_pending_call_costs_what_it_would_have_if_it_had_been_waited_for(is_pending: bool) -> None:
    made = policy(looks_at_drafts=False)
    plain_s = made.plain_step_s(1)
    for _ in range(40):
        learn_call(made, is_pending, drawn_s=0.3)
    assert made.costs.calls["m"].call_s(4, 1) == pytest.approx(ENQUEUED_S + 0.3, rel=0.02)
    assert made.plain_step_s(1) == plain_s, "plain steps do not look dearer for what drafts took"


def test_a_pending_call_beside_a_prompt_teaches_no_time() -> None:
    made = policy(looks_at_drafts=False)
    for _ in range(10):
        learn_call(made, True, drawn_s=0.3)
    known, slowness = made.costs.calls["m"].call_s(4, 1), deepcopy(made.costs.slowness)
    for _ in range(10):
        learn_call(made, True, drawn_s=0.3, num_span=50)
    assert made.costs.calls["m"].call_s(4, 1) == pytest.approx(known) and made.costs.slowness == slowness
