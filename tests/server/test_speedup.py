"""One speed-up: the command line, the server's answers and its metrics tell the same figure of the same steps."""

from __future__ import annotations

from dataclasses import replace

from forerun import SamplingParams
from forerun.cli.engine import stats_line
from forerun.cli.explain import explain_dict, explain_lines
from forerun.core import DrafterCount, RequestStats, speedup
from forerun.server.answers import Account
from forerun.server.metrics import EngineLoad, Metrics
from forerun.server.streams import Delta, Sent, delta_of
from tests.support import mini


def stats(num_drafted: int = 4) -> RequestStats:
    count = DrafterCount(num_drafted, num_drafted // 2)
    drafters = {"ngram": count} if num_drafted else {}
    return RequestStats(num_tokens=18, num_steps=10, step_s=2.0, plain_s=3.0, trees=count, drafters=drafters)


def test_it_is_plain_time_over_drafted_time() -> None:
    assert speedup(3.0, 2.0) == 1.5 == stats().estimated_speedup
    assert speedup(0.0, 2.0) is None and speedup(3.0, 0.0) is None
    assert stats(num_drafted=0).estimated_speedup is None, "what is left is noise"
    untimed = RequestStats(num_tokens=16, step_s=2.0, trees=DrafterCount(4, 2))
    assert untimed.estimated_speedup is None, "no plain step was timed"
    assert replace(stats(), num_tokens=15).estimated_speedup is None, "a few steps tell nothing"


def test_nobody_gained_from_drafts_of_which_none_was_accepted() -> None:
    wrong = DrafterCount(4, 0)
    assert RequestStats(num_tokens=16, step_s=2.0, plain_s=3.0, trees=wrong).estimated_speedup == 1.0
    slow = RequestStats(num_tokens=16, step_s=3.0, plain_s=1.5, trees=wrong)
    assert slow.estimated_speedup == 0.5, "but they may have cost time"


def test_samples_count_by_the_time_they_took() -> None:
    account = Account(3, None)
    long = RequestStats(num_tokens=60, num_steps=30, step_s=30.0, plain_s=30.0, trees=DrafterCount(40, 30))
    untimed = RequestStats(num_tokens=9, num_steps=5, step_s=9.0, trees=DrafterCount(4, 2))
    for index, each in enumerate((stats(), long, untimed)):
        account.add(index, Delta(0, "", (), (), "stop", None, 0, each, each.estimated_speedup, ()))
    assert account.forerun()["estimated_speedup"] == round(33 / 32, 4)


def test_no_sum_of_samples_is_above_their_tokens_a_pass() -> None:
    account = Account(2, None)
    for index, num_tokens in enumerate((10, 14)):
        each = RequestStats(num_tokens=num_tokens, num_steps=10, step_s=1.0, plain_s=9.0, trees=DrafterCount(4, 2))
        account.add(index, Delta(0, "", (), (), "stop", None, 0, each, each.estimated_speedup, ()))
    assert account.forerun()["estimated_speedup"] == 1.2


def test_everyone_tells_the_same() -> None:
    metrics, account = Metrics(lambda: EngineLoad(0, 0, 0.0, True, {}, 0, {})), Account(1, None)
    for each in (stats(), stats(num_drafted=0)):
        metrics.sample_finished(each, "stop")
        account.add(0, Delta(0, "", (), (), "stop", None, 0, each, each.estimated_speedup, ()))
    assert explain_dict(stats())["estimated_speedup"] == account.forerun()["estimated_speedup"] == 1.5
    assert "forerun_estimated_speedup_sum 1.5" in metrics.text().decode()
    assert "1.50x" in stats_line(stats()) and any("1.50x" in line for line in explain_lines(stats()))
    assert "speed-up" not in stats_line(stats(num_drafted=0))


def test_what_is_streamed_is_what_the_answer_says() -> None:
    """The page shows it. It said 1.00x for every gain, since it was made from figures without counts of tokens."""
    llm = mini.plain().with_drafter("draft", adaptive=False)
    group = llm.prepare("Repeat: the kite of Tom is under the bed.", SamplingParams(max_tokens=24, temperature=0.0))
    [sample] = group.samples
    sample.trace = []
    llm.start(group)
    while not group.finished:
        llm.step()
    sample.figures.step_s, sample.figures.plain_s = 2.0, 2.5
    delta = delta_of(sample, Sent())
    assert delta.stats is not None and delta.stats.acceptance_length > 1.25
    assert delta.speedup == delta.stats.estimated_speedup == 1.25
