"""What the engine promises under load: the queue has an end, deadlines hold, priorities count, endings free blocks."""

from __future__ import annotations

import random

import pytest

from forerun.core import SamplingParams
from forerun.engine.outputs import RequestGroup
from forerun.errors import ConfigError, DeadlineError, QueueFullError, RequestError
from tests.support import harness, mini


def group(index: int, prompt: list[int] | None = None, **params) -> RequestGroup:  # type: ignore[no-untyped-def]
    return harness.request(
        index, prompt or [index % 24, 3], SamplingParams(**{"max_tokens": 9, "seed": index, **params})
    )


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    made = harness.engine("draft", max_num_seqs=1, max_num_waiting=2)
    for index in range(3):
        made.add(group(index))
    with pytest.raises(QueueFullError, match="max_num_waiting is 2") as caught:
        made.add(group(3))
    assert isinstance(caught.value, RequestError)
    assert set(made.groups) == {"0", "1", "2"} and len(made.records) == 3
    harness.run(made, [])
    made.add(group(4, n=3))
    with pytest.raises(QueueFullError):
        made.add(group(5))
    harness.run(made, [])


def test_generate_queues_all_or_none() -> None:
    llm = mini.drafting("none", max_num_seqs=1, max_num_waiting=2)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(QueueFullError):
        llm.generate(["a", "b", "c", "d"], params)
    assert not llm.engine.has_work and not llm.engine.records
    assert len(llm.generate(["a", "b", "c"], params)) == 3


@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_a_deadline_ends_a_request_with_the_step(drafter: str) -> None:
    """Running or waiting: it ends with the step in which its time is over, and its blocks are free."""
    made = harness.engine(drafter, max_num_seqs=2)
    clock = [0.0]
    made.scheduler.clock = lambda: clock[0]
    wanted = [group(index, max_tokens=40) for index in range(3)]
    for index in (1, 2):
        wanted[index].samples[0].request.deadline_s = 5.0
    for each in wanted:
        made.add(each)
    made.step()
    running = wanted[1].samples[0].request
    assert running.block_ids
    clock[0] = 5.0
    changed = made.step()
    assert {g.request_id for g in changed} >= {"1", "2"}
    for index in (1, 2):
        out = wanted[index].output().outputs[0]
        assert out.finish_reason == "abort" and isinstance(out.error, DeadlineError)
    assert "of at most 40 tokens" in str(running.error) and not running.block_ids
    made.scheduler.check_integrity()
    harness.run(made, [])
    assert wanted[0].samples[0].request.output_token_ids == harness.plain([group(0, max_tokens=40)])[0][0]


def test_a_request_that_ends_in_time_is_not_late() -> None:
    made = harness.engine("none")
    clock = [0.0]
    made.scheduler.clock = lambda: clock[0]
    last = group(0, max_tokens=1)
    last.samples[0].request.deadline_s = 1.0
    made.add(last)
    clock[0] = 2.0  # over before its only step ends, but that step ends it
    made.step()
    out = last.output().outputs[0]
    assert (out.finish_reason, out.error) == ("length", None)


@pytest.mark.parametrize("seed", range(3))
def test_priorities_and_budgets_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(24) for _ in range(rng.randint(1, 40))] for _ in range(8)]
    wanted = [group(index, prompt, max_tokens=20) for index, prompt in enumerate(prompts)]
    options = {"max_num_batched_tokens": rng.randint(3, 40), "max_num_prefill_tokens": rng.randint(1, 9)}
    made = harness.engine("draft-tree", num_kv_blocks=28, max_num_seqs=5, max_num_batched_nodes=12, **options)
    again = [harness.fresh(each) for each in wanted]
    for each in again:
        each.samples[0].request.priority = rng.randint(-3, 3)
    assert harness.run(made, again) == harness.plain(wanted)


def test_urgent_requests_have_their_tokens_first() -> None:
    made = harness.engine("none", max_num_seqs=1)
    order = []
    wanted = [group(index) for index in range(4)]
    for each, priority in zip(wanted, (0, 2, 1, 0), strict=True):
        each.samples[0].request.priority = priority
        made.add(each)
    while made.has_work:
        order += [changed.request_id for changed in made.step() if changed.finished]
    assert order == ["0", "3", "2", "1"]


@pytest.mark.parametrize("name", ["max_num_prefill_tokens", "max_num_batched_nodes", "max_num_waiting"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        harness.engine("none", **{name: 0})
    with pytest.raises(ConfigError, match="prefix_caching"):
        harness.engine("none", prefix_caching="sometimes")
