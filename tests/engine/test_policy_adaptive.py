"""The adaptive policy: members are asked for what they are worth at this load, nodes admitted while they pay."""

from __future__ import annotations

import math

import pytest

from forerun.core import Request, SamplingParams
from forerun.engine.calibration import Calibration
from forerun.engine.policy import StepCosts, VerifyCost
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.engine.policy_members import MemberCost
from forerun.speculation.draft import Draft, Proposal
from tests.support.drafted import MEMBER, Prices, step
from tests.support.hopeful import show_plain_steps

FLAT = VerifyCost({1: 1.0, 64: 1.05})
STEEP = VerifyCost({1: 1.0, 64: 64.0})


def request(name: str = "r", known: int = 1) -> Request:
    return Request(name, (1,) * known, SamplingParams(), seed=0, max_len=10_000)


def chain(member: str, tokens: list[int], asked: Request | None = None) -> Proposal:
    draft = Draft(asked or request(), 64)
    draft.add_chain(tokens, member)
    return draft.proposal_of(member)


def propose(draft: Draft, member: str, tokens: list[int], chances: list[float] | None = None) -> Proposal:
    """A chain whose nodes are believed to be right with these chances, of whole paths."""
    draft.add_chain(tokens, member)
    proposal = draft.proposal_of(member)
    if chances is not None:
        draft.believe(proposal, [0.0, *map(math.log, chances)])
    return proposal


def policy(cost: VerifyCost = FLAT, may_prune: bool = True) -> AdaptivePolicy:
    """One that has seen plain steps."""
    made = AdaptivePolicy(16, StepCosts(cost), may_prune)
    show_plain_steps(made, 1.0)
    return made


def teach(taught: AdaptivePolicy, member: str, right: int, seconds: float, asked: Request | None = None) -> None:
    """The member drafts four tokens, of which the first `right` are right, at a price."""
    for _ in range(40):
        draft = Draft(asked or request(), 16)
        proposal = propose(draft, member, [2, 3, 4, 5])
        draft.believe(proposal, taught.log_survival(proposal, draft))
        taught.learn_member_cost(member, seconds, [draft])
        taught.learn_proposals(draft, [2, 3, 4, 5, 6][:right] + [9])


def test_a_good_member_is_asked_for_much_and_a_bad_one_hardly_ever() -> None:
    good, bad = policy(), policy()
    teach(good, "m", 4, 0.1)
    teach(bad, "m", 0, 0.1)
    assert good.quotas("m", [Draft(request(), 16)])[0] > 4
    quotas = []
    for _ in range(100):
        quotas.append(bad.quotas("m", [Draft(request(), 16)])[0])
        bad.learn_step_cost(1, 1.0, 0.0)
    assert quotas.count(1) >= 70, "half of what was saved up at the beginning is spent"
    assert any(quota > 1 for quota in quotas), "it is tried again now and then"


def test_what_earlier_members_found_makes_a_costly_one_needless() -> None:
    taught = policy()
    teach(taught, "dear", 3, 0.9)
    teach(taught, "cheap", 4, 0.001)
    empty, full = Draft(request(), 16), Draft(request(), 16)
    proposal = propose(full, "cheap", [2, 3, 4, 5])
    full.believe(proposal, taught.log_survival(proposal, full))
    assert taught.quotas("dear", [empty])[0] > 1
    assert taught.quotas("dear", [full])[0] == 1


def test_a_prompt_that_must_be_read_first_counts() -> None:
    taught = policy()
    teach(taught, "m", 4, 0.1)
    own = Draft(request(known=900), 16, num_caught_up=900)
    taught.learn_member_cost("m", 900.0, [own])
    assert taught.quotas("m", [Draft(request("long", 900), 16)])[0] == 1
    assert taught.quotas("m", [Draft(request("short", 3), 16)])[0] > 1


def test_admission_follows_the_price_of_rows() -> None:
    for cost, fewest, most in ((FLAT, 5, 5), (STEEP, 1, 3)):
        taught = policy(cost)
        teach(taught, "m", 2, 0.01)  # two of four are right
        draft = Draft(request(), 16)
        propose(draft, "m", [2, 3, 4, 5], [0.99, 0.98, 0.3, 0.1])
        taught.admit([draft], 1)
        assert fewest <= draft.num_nodes <= most


def test_rows_of_all_requests_share_one_budget() -> None:
    """The likeliest nodes of the whole step are kept, wherever they hang."""
    taught = policy(VerifyCost({1: 1.0, 4: 1.0, 5: 9.0, 64: 99.0}))
    sure, unsure = Draft(request("a"), 16), Draft(request("b"), 16)
    propose(sure, "m", [2, 3], [0.9, 0.8])
    propose(unsure, "m", [2, 3], [0.2, 0.1])
    taught.admit([sure, unsure], 2)
    assert (sure.num_nodes, unsure.num_nodes) == (3, 1)


def test_nothing_is_pruned_where_drafts_were_drawn() -> None:
    taught = policy(STEEP, may_prune=False)
    draft = Draft(request(), 16)
    propose(draft, "m", [2, 3, 4], [0.01, 0.009, 0.008])
    taught.admit([draft], 1)
    assert draft.num_nodes == 4


@pytest.mark.parametrize("speculate,most,budget", [(False, None, 1), (True, 3, 3), (True, None, 16)])
def test_a_request_may_ask_for_less(speculate: bool, most: int | None, budget: int) -> None:
    asked = Request("r", (1,), SamplingParams(), seed=0, max_len=99, speculate=speculate, max_nodes=most)
    assert policy().node_budget(asked) == budget


def test_load_leaves_less_room() -> None:
    taught = policy()
    taught.begin_step(32)
    assert taught.node_budget(request()) == 4


def test_a_members_nodes_are_believed_as_far_as_they_were_right() -> None:
    known = Calibration()
    part = chain("m", [2, 3, 4, 5])
    for _ in range(60):
        known.learn("r", part, [2, 9])  # the first is right, the second never
    survival = [math.exp(s) for s in known.log_survival("other", part)]
    assert survival[1] > 0.85
    assert survival[2] < 0.1 * survival[1]
    assert known.learn("r", part, [2, 3, 9]) == 2


def test_siblings_share_what_can_be_right() -> None:
    draft, known = Draft(request(), 16), Calibration()
    draft.add(0, 2, math.log(0.8), "m")
    draft.add(0, 3, math.log(0.1), "m")
    part = draft.proposal_of("m")
    for _ in range(80):
        known.learn("r", part, [3])
    likely, unlikely = (math.exp(s) for s in known.log_survival("other", part)[1:])
    assert unlikely > 0.8
    assert likely < 0.15


def test_requests_are_forgotten() -> None:
    taught = policy()
    teach(taught, "m", 2, 0.1)
    taught.quotas("m", [Draft(request(), 16)])
    taught.end(request())
    assert not taught.calibration._of_depths._requests and not taught.calibration._of_kinds._requests
    assert not taught._resting._known and not taught._read


def test_finding_nothing_says_nothing_of_what_drafting_costs() -> None:
    taught, asked = policy(), Draft(request(), 4)
    teach(taught, "m", 2, 0.1)
    known = taught._cost("m", 1)
    taught.learn_member_cost("m", 1e-6, [asked])
    assert taught._cost("m", 1) == known
    asked.add_chain([5], "m")
    taught.learn_member_cost("m", 1e-6, [asked])
    assert taught._cost("m", 1) < known


def test_a_member_that_finds_nothing_is_asked_now_and_then_until_it_does() -> None:
    taught, asked = policy(), []
    teach(taught, "m", 1, 0.01)
    for turn in range(300):
        taught.begin_step(1)
        quota = taught.quotas("m", [Draft(request("new"), 16)])[0]
        asked.append(quota > 1)
        taught.learn_step_cost(1, 1.0, 0.0)
        if quota > 1:
            own = Draft(request("new"), 16)
            own.add_chain([2, 3][: 2 * (turn >= 200)], "m")
            taught.learn_member_cost("m", 0.2, [own])
    assert sum(asked[100:200]) < 30 and sum(asked[240:]) > 50
    assert taught._members["m"].found < 1.0


def test_while_all_members_rest_steps_are_plain_ones() -> None:
    taught = policy()
    teach(taught, "m", 0, 0.5)
    budgets = []
    for _ in range(200):
        taught.begin_step(1)
        budgets.append(taught.node_budget(request()))
        if budgets[-1] > 1:
            taught.quotas("m", [Draft(request(), 16)])
    assert budgets.count(1) > 150
    assert any(budget > 1 for budget in budgets[-40:]), "the member is thought about again"
    teach(taught, "other", 4, 0.01)
    taught.end(request("another"))
    taught.begin_step(1)
    taught.begin_step(1)
    assert taught.node_budget(request()) > 1, "somebody new does not rest"


def test_a_member_nobody_has_seen_is_asked_for_one_and_soon_for_more() -> None:
    prices = Prices(row_s=0.01, draft_s=0.05)
    made, requests, asked = measured(prices), running(1), list[int]()
    while len(asked) < 12:
        asked += step(made, requests, {"r0": 8}, prices).drafted.values()
    assert asked == sorted(asked) and asked[0] == 1 and asked[-1] == 8


def test_a_level_must_promise_what_it_costs() -> None:
    for draft_s, prunes, expected in ((0.06, True, 0.06), (0.2, True, 0.2), (0.06, False, 0.0)):
        prices = Prices(row_s=0.01, pass_s=0.99, draft_s=draft_s)
        made, requests = measured(prices), running(1)
        made.prunes = prunes
        for index in range(40):
            step(made, requests, {"r0": index % 8}, prices)
        share = (expected + 0.01 * prunes) / prices.verify_s(1)
        assert made.least_chance(MEMBER) == pytest.approx(1.3 / 0.75 * share, rel=0.1)


def test_costs_measured_at_start_are_believed_until_better_is_known() -> None:
    taught = policy()
    taught.expect("m", {1: 0.2, 4: 0.5})
    assert (taught._cost("m", 1), taught._cost("m", 4), taught._cost("m", 8)) == (0.2, 0.5, 1.0)
    own = Draft(request(), 5)
    own.add_chain([2, 3, 4, 5], "m")
    for _ in range(8):
        taught.learn_member_cost("m", 0.3, [own])
    assert 0.3 < taught._cost("m", 4) < 0.5 and taught._cost("m", 1) == 0.2


def test_costs_of_sizes_not_measured_follow_the_nearest() -> None:
    cost = MemberCost()
    cost.learn(4, 1.0)
    assert [cost.of_call(size) for size in (4, 8, 2)] == [1.0, 2.0, 1.0]
    assert cost.of_call(4, 16) == 4.0, "requests of a call share the reading of weights"
    cost.learn(4, 1.5, num_requests=16)
    assert cost.of_call(4, 16) == 1.5 and cost.of_call(4, 1) == 1.0


def test_ranks_of_a_tree_tell_what_more_nodes_bring() -> None:
    """Siblings share the chance: the fourth node is nearly as likely as the third, though never after it."""
    known, draft = Calibration(), Draft(request(), 16)
    for token, chance in zip((2, 3, 4, 5), (-1.1, -1.2, -1.3, -1.4), strict=True):
        draft.add(0, token, chance, "m")
    part = draft.proposal_of("m")
    for round_ in range(400):
        known.learn("r", part, [2 + round_ % 5])  # each of them every fifth time, and every fifth time none
    chances, rates = [], known.rank_rates("other", "m")
    for rate in rates:
        chances.append((chances[-1] if chances else 1.0) * rate)
    assert chances == pytest.approx([0.2] * 4, abs=0.05)
    longer = chain("c", [2, 3, 4, 5])
    for round_ in range(400):
        known.learn("r", longer, [2, 3, 4, 5][: round_ % 5] + [9])
    assert known.rank_rates("other", "c") == pytest.approx([0.8, 0.75, 0.67, 0.5], abs=0.06)


def running(n: int, known: int = 1, max_len: int = 10_000) -> list[Request]:
    return [Request(f"r{i}", (1,) * known, SamplingParams(), seed=0, max_len=max_len) for i in range(n)]


def measured(prices: Prices, max_nodes: int = 9, reading: bool = True) -> AdaptivePolicy:
    """A policy that was told at start what passes and calls take."""
    cost = VerifyCost({rows: prices.verify_s(rows) for rows in (1, 2, 4, 8, 16, 32, 64)})
    made = AdaptivePolicy(max_nodes, StepCosts(cost), may_prune=True)
    made.expect(MEMBER, {size: prices.draft_s * size for size in (1, 2, 4, 8)})
    if reading:
        made._members[MEMBER].catch_up_s = prices.read_s
    return made


def test_at_a_load_where_drafts_cannot_pay_no_prompt_is_read_for_them() -> None:
    """Sixteen rows cost sixteen times one: whether to draft is decided before anybody reads for it."""
    prices = Prices(row_s=1.0, pass_s=0.0, draft_s=0.05, read_s=0.02)
    policy, requests = measured(prices, reading=False), running(16, known=100)
    done = [step(policy, requests, {r.request_id: 8 for r in requests}, prices) for _ in range(200)]
    assert not any(each.drafted for each in done)
    assert all(policy.explain(r) is not None for r in requests)


def test_a_load_that_became_lighter_is_drafted_for_again() -> None:
    prices = Prices(row_s=0.12, pass_s=0.5, draft_s=0.05)
    policy, requests = measured(prices), running(32)
    right = {r.request_id: 3 for r in requests}
    heavy = [step(policy, requests, right, prices) for _ in range(60)]
    light = [step(policy, requests[:1], right, prices) for _ in range(60)]
    assert sum(sum(each.drafted.values()) for each in heavy) < 60
    assert sum(each.num_tokens for each in light[20:]) > 3 * 40


def test_only_the_requests_whose_drafts_are_right_are_drafted_for() -> None:
    prices = Prices(row_s=0.08, pass_s=1.0, draft_s=0.03)
    policy, requests = measured(prices), running(8)
    right = {r.request_id: 8 if index < 2 else 0 for index, r in enumerate(requests)}
    done = [step(policy, requests, right, prices) for _ in range(600)][500:]
    good = sum(each.drafted.get(f"r{i}", 0) for each in done for i in (0, 1))
    bad = sum(sum(each.drafted.values()) for each in done) - good
    assert good > 400 and bad < 0.1 * good
    assert sum(each.num_tokens for each in done) / sum(each.seconds for each in done) > 1.2 * 8 / prices.verify_s(8)


@pytest.mark.parametrize("num_right", [1, 2, 4, 8])
@pytest.mark.parametrize("row_s", [0.01, 0.1])
def test_the_number_of_drafts_follows_what_one_more_brings(num_right: int, row_s: float) -> None:
    """Within 5 % of the best fixed number, which knows beforehand how many are right and draws one more."""
    prices = Prices(row_s=row_s, draft_s=0.06)
    policy, requests = measured(prices), running(1)
    done = [step(policy, requests, {"r0": num_right}, prices) for _ in range(300)][100:]
    best = max((min(k, num_right) + 1) / (prices.verify_s(k + 1) + prices.draft_s * (k + 1)) for k in range(9))
    assert sum(each.num_tokens for each in done) / sum(each.seconds for each in done) >= 0.95 * best


def test_what_was_not_verified_was_not_wrong() -> None:
    """Trees are cut before they are verified; how far they would have been right is never learned to be less."""
    known, part = Calibration(), chain("m", [2, 3, 4, 5, 6, 7])
    for _ in range(100):
        known.learn("r", part, [2, 3, 4])  # two nodes were verified and right, and the third, it turned out
    rates = known.rank_rates("r", "m")
    assert rates[0] > 0.9 and rates[2] > 0.9
    assert rates[3] == pytest.approx(0.6, abs=0.2), "nothing is known of the fourth"


def test_a_newcomer_is_believed_to_be_like_newcomers_not_like_those_who_are_drafted_for() -> None:
    known, part = Calibration(), chain("m", [2, 3, 4, 5])
    for index in range(20):
        name, follows = f"r{index}", [2, 3, 4, 5] if index % 4 == 0 else [9]
        for _ in range(40 if index % 4 == 0 else 4):  # the good one is drafted for ten times as often
            known.learn(name, part, follows)
    assert known.rank_rates("new", "m")[0] < 0.6
    known.learn("r0", part, [2, 3, 4, 5])
    assert known.rank_rates("r0", "m")[0] > 1.5 * known.rank_rates("new", "m")[0]


def test_trials_take_a_small_share_of_the_time() -> None:
    prices = Prices(row_s=0.1, draft_s=0.1)
    policy, requests = measured(prices), running(4)
    done = [step(policy, requests, {r.request_id: 0 for r in requests}, prices) for _ in range(1500)]
    late = done[300:]
    assert any(each.drafted for each in late), "the member is tried now and then"
    plain_s = len(late) * prices.verify_s(4)
    assert sum(each.seconds for each in late) < 1.02 * plain_s


def test_reading_a_prompt_is_worth_it_where_the_rest_of_the_answer_pays() -> None:
    prices = Prices(draft_s=0.05, read_s=0.02)
    for max_len, is_worth in ((2900, True), (905, False)):
        policy, requests = measured(prices), running(1, known=900, max_len=max_len)
        done = [step(policy, requests, {"r0": 4}, prices) for _ in range(20)]
        assert any(each.drafted for each in done) == is_worth


def test_answers_that_turn_out_short_count() -> None:
    prices = Prices(draft_s=0.05, read_s=0.05)
    policy = measured(prices)
    for _ in range(40):
        policy.end(Request("e", (1,), SamplingParams(), seed=0))
    done = [step(policy, running(1, known=900, max_len=2900), {"r0": 4}, prices) for _ in range(20)]
    assert not any(each.drafted for each in done)


def test_a_load_that_no_drafts_seem_to_pay_for_is_tried_again() -> None:
    """A call cost that was once measured far too high is learned anew by a trial alone."""
    dear = policy()
    dear.expect("m", {1: 1e6, 8: 1e6})
    budgets = []
    for _ in range(600):
        dear.begin_step(16)
        budgets.append(dear.node_budget(request()))
        dear.learn_step_cost(16, 1.0, 0.0)
    assert budgets[:255] == [1] * 255 and sum(budget > 1 for budget in budgets) == 2
