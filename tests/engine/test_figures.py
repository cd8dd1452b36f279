"""What a request is told of speculation: counts by drafter and depth, times, and why there were no drafts."""

from __future__ import annotations

import pytest

from forerun.core import DepthCount, DrafterCount, RequestStats, SamplingParams
from forerun.engine.outputs import share_time
from forerun.engine.timings import Timings
from forerun.policy.base import Outcome, StepResult, StepSeconds
from forerun.policy.policy import AdaptivePolicy
from forerun.speculation.draft import Draft
from tests.support import harness


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
    for group in groups:
        group.samples[0].trace = []
    engine = harness.engine(drafter)
    if drafter == "portfolio":
        assert isinstance(engine.policy, AdaptivePolicy)
        engine.policy.costs.learn_plain(1, 1.0)
    harness.run(engine, groups)
    for stats, group in ((group.output().outputs[0].stats, group) for group in groups):
        steps = group.samples[0].take_trace()
        assert stats.num_first == len(steps[0].emitted) < stats.num_tokens == sum(len(step.emitted) for step in steps)
        assert stats.trees.drafted == sum(count.drafted for count in stats.drafters.values()) > 0
        assert stats.num_tokens == stats.num_steps + stats.trees.accepted
        assert stats.trees.wasted == stats.trees.drafted - stats.trees.accepted
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


@pytest.mark.parametrize("accepted,most", [(0, 1.0), (8, 2.6)])
def test_no_estimate_is_above_the_tokens_a_pass(accepted: int, most: float) -> None:
    """No step is quicker than a plain one: plain ones were timed while something else ran."""
    stats = RequestStats(num_steps=20, num_tokens=20 + 4 * accepted, step_s=1.0, plain_s=9.0)
    stats.trees.drafted, stats.trees.accepted = 10, accepted
    assert stats.estimated_speedup == most
    stats.plain_s = 0.9
    assert stats.estimated_speedup == pytest.approx(0.9)
    stats.num_tokens = 15
    assert stats.estimated_speedup is None, "a few steps tell nothing"


def test_an_estimate_does_not_depend_on_who_else_has_the_core() -> None:
    """Of 12 s the engine had its core for 3 s, in which plain decoding would have made 3 steps of 1 s."""
    sample = harness.request(0, [0, 1, 2], SamplingParams(max_tokens=6, temperature=0.0)).samples[0]
    sample.num_last = 6
    outcome = Outcome(sample.request, Draft(sample.request, 8), [1])
    result = StepResult([outcome], [], 8, 0, StepSeconds(4.0, 8.0, 12.0, 3.0))
    share_time(result, {sample.request.request_id: sample}, 1.0)
    assert (sample.figures.step_s, sample.figures.plain_s) == (12.0, 24.0)


def test_a_step_is_told_in_wall_time_and_on_the_engines_own_clock() -> None:
    """What was learned from a step, on this clock, too, belongs to the next."""
    ticks = iter([10.0, 10.5, 10.75, 20.0, 20.5, 21.0])
    timings = Timings(clock=lambda: next(ticks))
    for own_s in (0.5, 0.75):
        timings.start()
        timings.lap("forward_s")
        seconds = timings.take()
        timings.end()
        assert seconds.own_s == own_s and 0.0 <= seconds.step_s < own_s


def test_log_probabilities_of_a_prompt_are_not_computed_again() -> None:
    """After a preemption the prompt is, with logits of its last row alone."""
    engine = harness.engine("none")
    group = harness.request(0, [0, 1, 2, 3], SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=1))
    [sample] = group.samples
    assert sample.wants_prompt
    engine.add(group)
    engine.step()
    assert len(sample.prompt_logprobs) == 3
    engine._restart()
    assert sample.request.num_computed == 0 and not sample.wants_prompt
    harness.run(engine, [])
    assert sample.request.num_output == 6 and len(sample.prompt_logprobs) == 3
