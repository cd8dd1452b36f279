"""What a request is told of speculation: counts by drafter and depth, times, and why there were no drafts."""

from __future__ import annotations

import pytest

from forerun.core import DepthCount, DrafterCount, Request, SamplingParams
from forerun.engine.explain import needed_rate, shortfall
from forerun.engine.policy import FixedPolicy, StepCosts, VerifyCost
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.speculation.draft import Draft
from tests.support import harness
from tests.support.hopeful import show_plain_steps

FLAT, STEEP = VerifyCost({1: 1.0, 64: 1.05}), VerifyCost({1: 1.0, 64: 64.0})


def request(**options: object) -> Request:
    return Request("r", (1,), SamplingParams(), seed=0, max_len=999, **options)  # type: ignore[arg-type]


def test_the_needed_rate_is_where_speeds_meet() -> None:
    """One draft at 1.3 times the cost must be right in 30 of 100 steps; two at 1.5 when a + a^2 is 0.5."""
    assert needed_rate({1: 1.3}, 1.0) == pytest.approx(0.3, abs=1e-4)
    assert needed_rate({2: 1.5}, 1.0) == pytest.approx((3**0.5 - 1) / 2, abs=1e-4)
    assert needed_rate({1: 1.3, 2: 1.5}, 1.0) == pytest.approx(0.3, abs=1e-4)
    assert needed_rate({1: 2.1}, 1.0) is None and needed_rate({}, 1.0) is None


def test_shortfalls_in_words() -> None:
    assert shortfall("drafts", 0.12, 0.45) == "drafts are right 12% of the time; it takes 45%"
    assert shortfall("drafts", 0.5, 0.45) is None
    assert "would cost more than they gain" in str(shortfall("drafts", 1.0, None))


def taught(cost: VerifyCost, num_right: int, member: str = "m") -> AdaptivePolicy:
    """A member whose first drafts of three are right, which takes a fifth of a pass."""
    policy = AdaptivePolicy(8, StepCosts(cost), may_prune=True)
    for _ in range(60):
        own = Draft(request(), 8)
        own.add_chain([2, 3, 4], member)
        policy.learn_member_cost(member, 0.2, [own])
        policy.calibration.learn("r", own.proposal_of(member), [2, 3, 4, 5][:num_right] + [9])
    show_plain_steps(policy, cost(1))
    policy.begin_step(1)
    return policy


def test_the_policy_explains_exactly_when_nobody_is_asked() -> None:
    good, bad, dear = taught(FLAT, 3), taught(FLAT, 0), taught(STEEP, 3)
    for policy, explained in ((good, False), (bad, True), (dear, True)):
        asked = policy.node_budget(request()) > 1 and policy.quotas("m", [Draft(request(), 8)])[0] > 1
        assert asked != explained and (policy.explain(request()) is not None) == explained
    assert str(bad.explain(request())).startswith("drafts of m are right 1% of the time; it takes ")
    assert "would cost more than they gain here, were they always right" in str(dear.explain(request()))


def test_reading_that_costs_too_much_is_named() -> None:
    policy = taught(FLAT, 3)
    own = Draft(request(), 8, num_caught_up=100)
    policy.learn_member_cost("m", 1e6, [own])
    asked = Request("other", (1,) * 50, SamplingParams(), seed=0, max_len=90)
    assert policy.quotas("m", [Draft(asked, 8)]) == [1]
    assert policy.explain(asked) == "reading the text m has missed would cost more than its drafts would gain"


def test_every_member_is_named() -> None:
    policy = AdaptivePolicy(8, StepCosts(FLAT), may_prune=True)
    assert policy.explain(request()) is None
    policy = taught(FLAT, 0, "bad")
    assert str(policy.explain(request())).startswith("drafts of bad are right ")
    policy._members["good"] = taught(FLAT, 3, "good")._members["good"]
    policy.calibration = taught(FLAT, 3, "good").calibration
    assert policy.explain(request()) is None


def test_without_a_drafter_there_is_nothing_to_explain() -> None:
    assert FixedPolicy(1).explain(request()) == "there is no drafter" and FixedPolicy(4).explain(request()) is None


def test_counts_by_depth() -> None:
    count = DrafterCount()
    count.count([1, 1, 2, 3], [1, 2])
    count.count([1], [])
    assert (count.drafted, count.accepted, count.wasted) == (5, 2, 3)
    assert count.depths == [DepthCount(2, 3, 1), DepthCount(1, 1, 1), DepthCount(1, 1, 0)]
    total = DrafterCount(1, 1, [DepthCount(1, 1, 1)]).add(count).add(DrafterCount())
    assert (total.drafted, total.depths[0], len(count.depths)) == (6, DepthCount(3, 4, 2), 3)


@pytest.mark.parametrize("drafter", ["ngram", "draft-tree", "portfolio"])
def test_a_requests_figures_add_up(drafter: str) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    groups = [harness.request(i, [0, 1, 2, 0, 1, i], params) for i in range(2)]
    harness.run(harness.engine(drafter), groups)
    for stats in (group.output().outputs[0].stats for group in groups):
        assert stats.trees.drafted == sum(count.drafted for count in stats.drafters.values()) > 0
        assert stats.num_tokens == stats.num_steps + stats.trees.accepted
        assert stats.wasted_nodes == stats.trees.drafted - stats.trees.accepted
        for count in (stats.trees, *stats.drafters.values()):
            assert count.drafted == sum(depth.drafted for depth in count.depths)
            assert count.accepted == sum(depth.accepted for depth in count.depths)
            assert all(depth.tried <= stats.num_steps - stats.num_plain_steps for depth in count.depths)
        assert 0 < stats.draft_s < 100 and 0 < stats.verify_s < stats.step_s
        assert (stats.estimated_speedup is None) == (drafter == "draft-tree" or drafter == "ngram")


def test_plain_decoding_says_so() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    plain, silent = harness.request(0, [0, 1, 2], params), harness.request(1, [0, 1, 2], params)
    silent.samples[0].request.speculate = False
    harness.run(harness.engine("none"), [plain])
    harness.run(harness.engine("draft"), [silent])
    for group, reason in ((plain, "there is no drafter"), (silent, "the request asked for no drafts")):
        stats = group.output().outputs[0].stats
        assert (stats.num_plain_steps, stats.why_plain) == (stats.num_steps, reason)
