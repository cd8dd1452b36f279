"""Properties of the scheduler and the block pool under any sequence of arrivals, budgets and endings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cache.block_pool import BlockPool
from forerun.cache.prefix_cache import PrefixCache
from forerun.core import Plan, Request, SamplingParams, Status
from forerun.engine.scheduler import Limits, Scheduler

MAX_LEN = 40


def request(index: int, prompt_len: int, max_tokens: int, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    max_len = min(prompt_len + max_tokens, MAX_LEN)
    return Request(str(index), tuple(range(prompt_len)), params, seed=index, max_len=max_len, **options)


def limits(max_seqs: int, max_rows: int, **others: Any) -> Limits:
    return Limits(max_num_seqs=max_seqs, max_num_rows=max_rows, max_model_len=MAX_LEN, **others)


requests = st.lists(st.tuples(st.integers(1, MAX_LEN - 1), st.integers(1, 20)), min_size=1, max_size=12)


@given(
    shapes=requests,
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 20),
    max_seqs=st.integers(1, 6),
    max_rows=st.integers(1, 50),
    others=st.fixed_dictionaries(
        {},
        optional={"max_num_prefill_rows": st.integers(1, 9), "max_num_nodes": st.integers(1, 9)},
    ),
    data=st.data(),
)
@settings(max_examples=60)
def test_every_request_finishes(shapes, block_size, spare_blocks, max_seqs, max_rows, others, data) -> None:  # type: ignore[no-untyped-def]
    """Whatever the budgets, plans are within them, blocks are never shared or lost, and nobody waits for ever."""
    pool = BlockPool(-(-MAX_LEN // block_size) + spare_blocks)
    scheduler = Scheduler(pool, block_size, limits(max_seqs, max_rows, **others))
    waiting = [request(i, *shape, priority=data.draw(st.integers(-2, 2))) for i, shape in enumerate(shapes)]
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
    scheduler = Scheduler(pool, 4, limits(8, 64))
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
    scheduler = Scheduler(pool, 4, limits(8, 64))
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
    scheduler = Scheduler(pool, 4, limits(8, 64))
    items = [request(0, 16, 10), request(1, 16, 10)]
    for item in items:
        scheduler.add(item)
    plan = scheduler.schedule(lambda r: 8)
    assert not plan.preempted
    assert [item.max_nodes for item in plan.scheduled] == [8, 1]


def advance(plan: Plan) -> None:
    """Everybody who chooses a token gets one."""
    for item in plan.scheduled:
        item.request.num_computed += item.num_span + min(item.max_nodes, 1)
        if item.reaches_root:
            item.request.token_ids.append(0)


class Clock:
    """Stands still until it is told otherwise."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_priority_first_then_arrival_but_nobody_waits_for_ever() -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(10), 4, limits(1, 64, priority_s=10.0), clock=clock)
    for index, priority in enumerate((1, 0, 0, -1)):
        clock.now += 1.0
        scheduler.add(request(index, 4, 1, priority=priority))
    assert [r.request_id for r in scheduler.waiting] == ["3", "1", "2", "0"]
    clock.now += 8.0  # 112: two levels of priority are made up for by 20 s
    scheduler.add(request(4, 4, 1, priority=-1))
    clock.now += 10.0
    scheduler.add(request(5, 4, 1, priority=-1))
    assert [r.request_id for r in scheduler.waiting] == ["3", "1", "4", "2", "0", "5"]


def test_the_last_in_turn_is_preempted_not_the_last_to_come() -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(10), 4, limits(4, 64), clock=clock)
    mild, urgent = request(0, 18, 20, priority=5), request(1, 18, 20)
    scheduler.add(mild)
    advance(scheduler.schedule(lambda r: 1))
    scheduler.add(urgent)
    for _ in range(6):
        advance(scheduler.schedule(lambda r: 1))
    assert (mild.num_preemptions, urgent.num_preemptions) == (1, 0)
    assert mild.status is Status.WAITING and scheduler.running == [urgent]


def test_a_long_prompt_does_not_stop_those_who_decode() -> None:
    """While somebody decodes, prompts keep to their share of the rows; alone they have all."""
    scheduler = Scheduler(BlockPool(40), 4, limits(8, 30, max_num_prefill_rows=6))
    small, large = request(0, 2, 30), request(1, 39, 1)
    scheduler.add(small)
    advance(scheduler.schedule(lambda r: 1))
    scheduler.add(large)
    for _ in range(6):
        plan = scheduler.schedule(lambda r: 4)
        assert [(i.request, i.num_span, i.max_nodes) for i in plan.scheduled] == [(small, 0, 4), (large, 6, 0)]
        advance(plan)
    scheduler.finish([small])
    plan = scheduler.schedule(lambda r: 4)
    assert [(i.num_span, i.max_nodes) for i in plan.scheduled] == [(2, 1)]


def test_a_chunk_fills_the_step_when_nobody_decodes() -> None:
    scheduler = Scheduler(BlockPool(40), 4, limits(8, 30, max_num_prefill_rows=6))
    scheduler.add(request(0, 39, 1))
    assert [(i.num_span, i.max_nodes) for i in scheduler.schedule(lambda r: 4).scheduled] == [(30, 0)]


def test_everyone_has_a_root_before_anyone_has_a_tree() -> None:
    """Rows that are short are shared evenly; who wants less leaves the rest to the others."""
    scheduler = Scheduler(BlockPool(40), 4, limits(8, 16))
    for index in range(4):
        scheduler.add(request(index, 1, 30))
    wanted = {"0": 20, "1": 2, "2": 20, "3": 1}
    plan = scheduler.schedule(lambda r: wanted[r.request_id])
    assert [i.max_nodes for i in plan.scheduled] == [6, 2, 7, 1]
    nodes = Scheduler(BlockPool(40), 4, limits(8, 16, max_num_nodes=8))
    for index in range(4):
        nodes.add(request(index, 1, 30))
    assert sum(i.max_nodes for i in nodes.schedule(lambda r: 20).scheduled) == 8


def test_the_queue_has_an_end() -> None:
    scheduler = Scheduler(BlockPool(40), 4, limits(2, 16, max_num_waiting=3))
    assert scheduler.can_admit(5) and not scheduler.can_admit(6)
    for index in range(5):
        scheduler.add(request(index, 1, 30))
    assert not scheduler.can_admit(1)
    scheduler.schedule(lambda r: 1)
    assert len(scheduler.waiting) == 3 and not scheduler.can_admit(1)
    scheduler.finish([scheduler.waiting[1]])
    assert scheduler.can_admit(1) and not scheduler.can_admit(2)


def test_deadlines() -> None:
    clock = Clock()
    scheduler = Scheduler(BlockPool(40), 4, limits(1, 16), clock=clock)
    deadlines = (None, 105.0, 103.0, 110.0)
    made = [request(i, 1, 30, deadline_s=deadline) for i, deadline in enumerate(deadlines)]
    for each in made:
        scheduler.add(each)
    assert scheduler.overdue() == []
    scheduler.finish([made[1]])
    clock.now = 106.0
    assert scheduler.overdue() == [made[2]]
    scheduler.finish([made[2]])
    assert scheduler.overdue() == []
    clock.now = 111.0
    assert scheduler.overdue() == [made[3]]


def with_cache(num_blocks: int, max_seqs: int = 8, max_rows: int = 64) -> Scheduler:
    pool = BlockPool(num_blocks)
    return Scheduler(pool, 4, limits(max_seqs, max_rows), PrefixCache(pool, 4))


def text(name: str, *tokens: int) -> Request:
    return Request(name, tokens, SamplingParams(), 0, max_len=MAX_LEN)


def step(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule(lambda r: 1)
    advance(plan)
    for item in plan.scheduled:
        scheduler.publish(item.request, ())
    scheduler.check_integrity()
    return plan


def leave(scheduler: Scheduler, name: str, *tokens: int) -> list[int]:
    """Compute a request and end it -> the blocks that the cache keeps of it."""
    made = text(name, *tokens)
    scheduler.add(made)
    step(scheduler)
    blocks = made.block_ids[: len(tokens) // 4]
    scheduler.finish([made])
    return blocks


def test_who_waits_for_a_prefix_holds_up_nobody_else() -> None:
    """A request whose prefix is being computed waits for it; others pass, and then it shares what was computed."""
    scheduler = with_cache(40)
    first, same, other = request(0, 30, 9), request(1, 30, 9), text("2", 7, 7, 7)
    for each in (first, same, other):
        scheduler.add(each)
    assert {i.request.request_id: i.num_span for i in step(scheduler).scheduled} == {"0": 29, "2": 2}
    assert {i.request.request_id: i.num_span for i in step(scheduler).scheduled} == {"0": 0, "1": 1, "2": 0}
    assert same.num_cached_tokens == 28 and same.block_ids[:7] == first.block_ids[:7]


def test_nobody_waits_for_who_is_gone() -> None:
    scheduler = with_cache(40)
    first, same = request(0, 30, 9), request(1, 30, 9)
    scheduler.add(first)
    scheduler.add(same)
    assert [i.request for i in scheduler.schedule(lambda r: 1).scheduled] == [first]
    scheduler.finish([first])
    assert [i.request for i in scheduler.schedule(lambda r: 1).scheduled] == [same]


def test_the_block_to_copy_from_is_not_taken_for_the_copy() -> None:
    """It is the oldest and would go first."""
    scheduler = with_cache(11)
    [source] = leave(scheduler, "a", 1, 2, 3, 4)
    leave(scheduler, "b", 9, 9, 9, 9)
    assert (scheduler.pool.num_free, scheduler.pool.num_cached) == (9, 2)
    new = text("c", 1, 2, 5, *range(37))
    scheduler.add(new)
    [resumed] = scheduler.schedule(lambda r: 1).resumed
    assert (resumed.copy_from, resumed.copy_to, resumed.num_copied) == (source, 0, 2)
    assert source not in new.block_ids and new.num_computed == 2


def test_a_copy_is_given_up_where_its_source_is_needed() -> None:
    scheduler = with_cache(10)
    leave(scheduler, "a", 1, 2, 3, 4)
    new = text("c", 1, 2, 5, *range(36))
    scheduler.add(new)
    assert scheduler.schedule(lambda r: 1).resumed == ()
    assert new.status is Status.RUNNING and len(new.block_ids) == 10


def test_cached_blocks_count_once_at_admission() -> None:
    """Blocks that the request will share are not also there to be taken by it."""
    scheduler = with_cache(10)
    leave(scheduler, "a", *range(20))
    scheduler.add(text("b", *(7 for _ in range(14))))
    step(scheduler)
    assert (scheduler.pool.num_free, scheduler.pool.num_cached) == (1, 5)
    large = text("c", *range(20), *range(8))
    scheduler.add(large)
    step(scheduler)
    assert large.status is Status.WAITING


def test_a_prompt_that_comes_first_leaves_the_others_their_rows() -> None:
    scheduler = Scheduler(BlockPool(60), 4, limits(8, 10))
    small = [request(index, 1, 30) for index in range(4)]
    for each in small:
        scheduler.add(each)
    advance(scheduler.schedule(lambda r: 1))
    scheduler.add(request(9, 39, 1, priority=-1))
    plan = scheduler.schedule(lambda r: 8)
    assert [(i.request.request_id, i.num_span, i.max_nodes) for i in plan.scheduled] == [
        ("0", 0, 1), ("1", 0, 1), ("2", 0, 1), ("3", 0, 1), ("9", 6, 0),
    ]  # fmt: skip
    advance(plan)
    plan = scheduler.schedule(lambda r: 1)
    assert plan.scheduled[0].request.request_id == "9" and plan.scheduled[0].num_span == 6
    assert len(plan.scheduled) == 5


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


@pytest.mark.parametrize(("num_shared", "num_again"), [(8, 0), (9, 1), (10, 1), (11, 1), (12, 0)])
def test_who_reads_hidden_states_computes_one_row_again_where_a_hit_ends_inside_a_block(
    num_shared: int, num_again: int
) -> None:
    """States are kept for the last row of a block; elsewhere that row alone is computed again, whatever the hit."""
    found = []
    for needs_boundary in (False, True):
        scheduler = with_cache(40)
        leave(scheduler, "a", *range(16))
        asked = text("b", *range(num_shared), *[30] * 8)
        scheduler.add(asked)
        scheduler.schedule(lambda r: 1, needs_boundary)
        found.append(asked.num_cached_tokens)
    assert found == [num_shared, num_shared - num_again]
