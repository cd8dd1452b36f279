"""Properties of the scheduler and the block pool under any sequence of arrivals, budgets and endings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cache.block_pool import BlockPool
from forerun.core import Request, SamplingParams, Status
from forerun.engine.scheduler import Scheduler

MAX_LEN = 40


def request(index: int, prompt_len: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(
        str(index), tuple(range(prompt_len)), params, seed=index, max_len=min(prompt_len + max_tokens, MAX_LEN)
    )


requests = st.lists(st.tuples(st.integers(1, MAX_LEN - 1), st.integers(1, 20)), min_size=1, max_size=12)


@given(
    shapes=requests,
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 20),
    max_seqs=st.integers(1, 6),
    max_rows=st.integers(1, 50),
    data=st.data(),
)
@settings(max_examples=150)
def test_every_request_finishes(shapes, block_size, spare_blocks, max_seqs, max_rows, data) -> None:  # type: ignore[no-untyped-def]
    """Whatever the budgets, plans are within them, blocks are never shared or lost, and nobody waits for ever."""
    pool = BlockPool(-(-MAX_LEN // block_size) + spare_blocks)
    scheduler = Scheduler(pool, block_size, max_seqs, max_rows, MAX_LEN)
    waiting = [request(i, *shape) for i, shape in enumerate(shapes)]
    for item in waiting:
        scheduler.add(item)
    for _ in range(6000):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule(lambda r: data.draw(st.integers(1, 6)) if max_rows > 1 else 1)
        scheduler.check_integrity()
        check_plan(plan, block_size, max_rows, max_seqs)
        play(scheduler, plan, data)
    assert not scheduler.has_work
    assert pool.num_free == pool.num_blocks


def check_plan(plan, block_size: int, max_rows: int, max_seqs: int) -> None:  # type: ignore[no-untyped-def]
    assert plan.scheduled, "a step must make progress"
    assert len(plan.scheduled) <= max_seqs
    assert sum(item.num_span + item.max_nodes for item in plan.scheduled) <= max_rows
    assert len({item.request.request_id for item in plan.scheduled}) == len(plan.scheduled)
    for item in plan.scheduled:
        end = item.request.num_computed + item.num_span + item.max_nodes
        assert item.request.status is Status.RUNNING
        assert item.num_span + item.max_nodes > 0
        assert end <= len(item.request.block_ids) * block_size
        assert end <= MAX_LEN
        if item.reaches_root:
            assert item.request.num_computed + item.num_span == item.request.root_position
            assert item.max_nodes <= max(1, item.request.num_remaining)
    for item in plan.preempted:
        assert item.status is Status.WAITING and not item.block_ids and item.num_computed == 0


def play(scheduler: Scheduler, plan, data) -> None:  # type: ignore[no-untyped-def]
    """Let every scheduled request emit between one token and as many as it has nodes."""
    ended = []
    for item in plan.scheduled:
        item.request.num_computed += item.num_span
        if item.reaches_root:
            emitted = data.draw(st.integers(1, item.max_nodes))
            item.request.num_computed += emitted
            item.request.token_ids += [0] * min(emitted, item.request.num_remaining)
            if item.request.num_remaining <= 0 or data.draw(st.integers(0, 9)) == 0:
                ended.append(item.request)
    scheduler.finish(ended)


def test_the_oldest_is_never_preempted() -> None:
    pool = BlockPool(10)
    scheduler = Scheduler(pool, 4, 8, 64, MAX_LEN)
    first = request(0, 4, 30)
    for item in (first, request(1, 4, 30), request(2, 4, 30)):
        scheduler.add(item)
    for _ in range(200):
        plan = scheduler.schedule(lambda r: 1)
        for item in plan.scheduled:
            item.request.num_computed += item.num_span + item.max_nodes
            item.request.token_ids.append(0)
        scheduler.finish([i.request for i in plan.scheduled if i.request.num_remaining <= 0])
        if not scheduler.has_work:
            break
    assert first.num_preemptions == 0
    assert not scheduler.has_work


def test_nobody_overtakes_a_large_prompt() -> None:
    pool = BlockPool(10)
    scheduler = Scheduler(pool, 4, 8, 64, MAX_LEN)
    running, large, small = request(0, 12, 4), request(1, 36, 2), request(2, 4, 2)
    scheduler.add(running)
    scheduler.schedule(lambda r: 1)
    scheduler.add(large)
    scheduler.add(small)
    scheduler.schedule(lambda r: 1)
    assert large.status is Status.WAITING and small.status is Status.WAITING


def test_fewer_nodes_before_preemption() -> None:
    """A tree that does not fit shrinks to its root before anybody loses blocks."""
    pool = BlockPool(10)
    scheduler = Scheduler(pool, 4, 8, 64, MAX_LEN)
    items = [request(0, 16, 10), request(1, 16, 10)]
    for item in items:
        scheduler.add(item)
    plan = scheduler.schedule(lambda r: 8)
    assert not plan.preempted
    assert [item.max_nodes for item in plan.scheduled] == [8, 1]


operations = st.lists(st.tuples(st.sampled_from(["allocate", "release", "share"]), st.integers(0, 9)), max_size=60)


@given(operations)
def test_block_pool(steps) -> None:  # type: ignore[no-untyped-def]
    pool, held = BlockPool(12), []
    for action, number in steps:
        if action == "allocate":
            got = pool.allocate(number)
            assert (got is None) == (number > 12 - len(set(held)))
            held += got or []
        elif held and action == "release":
            pool.release([held.pop(number % len(held))])
        elif held:
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        pool.check_integrity()
        assert pool.num_used == len(set(held))


def test_double_release_is_noticed() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1) or []
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])
