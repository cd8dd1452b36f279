"""The prefix cache: what is found, shared, copied, evicted, in which order; and that no row is ever the wrong one.

The machine at the end runs a scheduler over a pool whose rows hold, instead of keys and values, the very prefix they
would have been computed from. Whatever is shared, copied, evicted or preempted, a request must find its own prefix.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forerun.cache.block_pool import BlockPool
from forerun.cache.prefix_cache import PrefixCache
from forerun.core import Plan, Request, SamplingParams, Status
from forerun.engine.scheduler import Limits, Scheduler

SIZE = 4
MAX_LEN = 20


def request(name: str, tokens: list[int], max_tokens: int = 8, **options: Any) -> Request:
    return Request(name, tuple(tokens), SamplingParams(), 0, max_len=min(len(tokens) + max_tokens, MAX_LEN), **options)


class SomeAdapter:
    """Adapters are told apart as objects."""


class Cached:
    """A cache of which one request after another is computed at once."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, SIZE)

    def run(
        self, name: str, tokens: list[int], num_ready: tuple[int, ...] = (), adapter: object | None = None,
        salt: str = "",
    ) -> Request:  # fmt: skip
        """Compute all tokens of a request that then stays."""
        made, hit = request(name, tokens, adapter=adapter, cache_salt=salt), self.cache.lookup(tokens, adapter, salt)
        self.pool.share(hit.blocks)
        made.block_ids = [*hit.blocks, *(self.pool.allocate(-(-len(tokens) // SIZE) - len(hit.blocks)) or [])]
        self.cache.open(made, hit)
        made.num_computed = len(tokens)
        self.cache.publish(made, num_ready)
        return made

    def end(self, made: Request) -> None:
        self.cache.close(made)
        self.pool.release(made.block_ids)

    def check(self) -> None:
        self.pool.check_integrity()
        self.cache.check_integrity()


def test_full_blocks_are_shared_and_the_last_token_is_left() -> None:
    made = Cached()
    first = made.run("a", list(range(12)))
    longer, same = made.cache.lookup(list(range(13))), made.cache.lookup(list(range(12)))
    assert longer.blocks == tuple(first.block_ids) and longer.copy_from is None
    assert same.blocks == tuple(first.block_ids[:2])
    assert (same.copy_from, same.num_copied) == (first.block_ids[2], 4)
    assert made.cache.lookup([5]).blocks == ()


def test_each_salt_has_prefixes_of_its_own() -> None:
    made, tokens, one = Cached(12), list(range(9)), SomeAdapter()
    kinds = [(None, ""), (None, "a"), (None, "b"), (one, "a")]
    ran = [made.run(str(index), tokens, (), *kind) for index, kind in enumerate(kinds)]
    assert len({block for each in ran for block in each.block_ids}) == 12, "salts share blocks"
    for each, kind in zip(ran, kinds, strict=True):
        assert made.cache.lookup(tokens, *kind).blocks == tuple(each.block_ids[:2])
    assert made.cache.lookup(tokens, one).blocks == made.cache.lookup(tokens, None, "c").blocks == ()
    for each in ran:
        made.end(each)
    assert made.cache.lookup(tokens, None, "a").blocks == tuple(ran[1].block_ids[:2]), "it is found by who comes later"
    made.check()


def test_salts_that_nobody_uses_leave_nothing_behind() -> None:
    made = Cached(3)
    for salt in range(20):
        made.end(made.run(str(salt), list(range(9)), salt=str(salt)))
        assert made.cache.lookup(list(range(9)), None, f"never {salt}").blocks == ()
    [tops] = made.cache._tops.values()
    assert len(tops) == 1, "the trees of evicted blocks are gone"
    made.check()


def test_each_adapter_has_prefixes_of_its_own() -> None:
    made, tokens, adapters = Cached(9), list(range(9)), [None, SomeAdapter(), SomeAdapter()]
    ran = [made.run(str(index), tokens, adapter=adapter) for index, adapter in enumerate(adapters)]
    assert len({block for each in ran for block in each.block_ids}) == 9, "adapters share blocks"
    for each, adapter in zip(ran, adapters, strict=True):
        assert made.cache.lookup(tokens, adapter).blocks == tuple(each.block_ids[:2])
        made.check()
    for each in ran:
        made.end(each)
    del ran, adapters[1:]  # what only they could find is evicted like all else
    assert len(made.pool.allocate(9) or []) == 9
    made.check()


def test_a_block_counts_only_after_its_own_prefix() -> None:
    made = Cached()
    made.run("a", [1, 1, 1, 1, 2, 2, 2, 2])
    hit = made.cache.lookup([2, 2, 2, 2, 1, 1, 1, 1, 0])
    assert hit.blocks == () and hit.copy_from is None


def test_the_longest_common_part_of_a_block_is_copied() -> None:
    made = Cached()
    for name, tail in (("a", [7, 8, 0, 0]), ("b", [7, 8, 9, 1]), ("c", [7, 9, 9, 9]), ("d", [3, 8, 9, 2])):
        made.run(name, [1, 2, 3, 4, *tail])
    [wanted] = [n.block for n in made.cache.lookup([1, 2, 3, 4, 0]).node.children.values() if n.tokens == (7, 8, 9, 1)]
    for end, num_copied in (([7, 8, 9, 2], 3), ([7, 8, 9, 0], 3), ([7, 8, 9, 1], 4), ([7, 8, 9], 3)):
        hit = made.cache.lookup([1, 2, 3, 4, *end])
        assert (hit.copy_from, hit.num_copied) == (wanted, num_copied), end
    assert made.cache.lookup([1, 2, 3, 4, 6, 6]).copy_from is None


def test_equal_blocks_become_one() -> None:
    made = Cached()
    first, second = request("a", list(range(9))), request("b", list(range(9)))
    for each in (first, second):  # both find nothing, both compute
        made.cache.open(each, made.cache.lookup(each.token_ids))
        each.block_ids = made.pool.allocate(3) or []
        each.num_computed = 8
    for each in (first, second):
        made.cache.publish(each, ())
    assert first.block_ids[:2] == second.block_ids[:2] and first.block_ids[2] != second.block_ids[2]
    assert made.pool.num_used == 4
    made.check()
    made.end(first)
    made.check()
    made.end(second)
    assert (made.pool.num_used, made.pool.num_cached) == (0, 2)


def test_what_a_drafter_has_is_not_given_up_for_less() -> None:
    """An equal block whose drafter rows are missing is not used instead of one that has them."""
    made = Cached()
    first, second = request("a", list(range(9))), request("b", list(range(9)))
    for each in (first, second):
        made.cache.open(each, made.cache.lookup(each.token_ids))
        each.block_ids = made.pool.allocate(3) or []
        each.num_computed = 8
    own = list(second.block_ids)
    made.cache.publish(first, (2,))
    made.cache.publish(second, (8,))
    assert second.block_ids == own
    made.check()
    made.cache.publish(first, (9,))
    assert made.cache.lookup(list(range(9))).num_ready == (8,)


def test_ready_rows_are_counted_by_kind_from_the_start() -> None:
    made = Cached()
    first = made.run("a", list(range(12)), (6, 12))
    assert made.cache.lookup(list(range(13))).num_ready == (6, 12)
    made.cache.publish(first, (9, 12))
    assert made.cache.lookup(list(range(13))).num_ready == (9, 12)
    assert made.cache.lookup(list(range(10))).num_ready == (9, 10)  # two rows of the third block are copied
    second = made.run("b", [*range(8), 5, 5, 5, 5], (12, 0))  # shares the two blocks that are ready
    assert made.cache.lookup([*range(8), 5, 5, 5, 5, 0]).num_ready == (12, 8)
    made.end(first)
    made.end(second)
    made.check()


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    made = Cached(num_blocks=6)
    old = made.run("old", [1, 1, 1, 1, 2, 2, 2, 2])
    new = made.run("new", [3, 3, 3, 3, 4, 4, 4, 4])
    made.end(old)
    made.end(new)
    again = made.run("again", [1, 1, 1, 1, 2, 2, 2, 2, 5])  # now "old" is the youngest
    made.end(again)
    assert made.pool.num_free == 2
    assert made.pool.allocate(2) is not None
    assert made.pool.allocate(1) == new.block_ids[1:]
    made.check()
    assert made.cache.lookup([3, 3, 3, 3, 4, 4, 4, 4, 0]).blocks == (new.block_ids[0],)
    assert made.cache.lookup([1, 1, 1, 1, 2, 2, 2, 2, 0]).blocks == tuple(old.block_ids)
    assert made.cache.stats.evicted_blocks == 1
    assert [made.pool.allocate(1) for _ in range(3)] == [
        [block] for block in (new.block_ids[0], *reversed(old.block_ids))
    ]


def test_owned_blocks_are_never_evicted() -> None:
    made = Cached(num_blocks=3)
    kept = made.run("a", list(range(8)))
    assert made.pool.allocate(2) is None
    assert made.pool.allocate(1) is not None
    assert made.cache.lookup(list(range(9))).blocks == tuple(kept.block_ids)


def test_integrity_notices_a_lost_block() -> None:
    made = Cached()
    first = made.run("a", list(range(8)))
    made.pool.release(first.block_ids[:1])  # its request still reads it
    with pytest.raises(AssertionError, match="what it follows is not"):
        made.cache.check_integrity()


Row = tuple[int, ...]  # the prefix a row was computed from; (-1,) is a draft's


class Machine(RuleBasedStateMachine):
    """Requests of few different tokens over a small pool, with a drafter that lags as it likes."""

    @initialize(
        num_blocks=st.integers(MAX_LEN // SIZE, 12),
        rows=st.sampled_from([1, 3, 8, 40]),
        prefill=st.sampled_from([1, 5, None]),
        wants_hidden=st.booleans(),
    )
    def start(self, num_blocks: int, rows: int, prefill: int | None, wants_hidden: bool) -> None:
        self.pool = BlockPool(num_blocks)
        limits = Limits(max_num_seqs=4, max_num_rows=rows, max_model_len=MAX_LEN, max_num_prefill_rows=prefill)
        self.cache = PrefixCache(self.pool, SIZE)
        self.scheduler = Scheduler(self.pool, SIZE, limits, self.cache, clock=lambda: 0.0)
        self.wants_hidden = wants_hidden
        self.requests: list[Request] = []
        self.target: dict[tuple[int, int], Row] = {}  # (block, offset) -> what is there
        self.drafter: dict[tuple[int, int], Row] = {}
        self.ready: dict[str, int] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN - 1),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
    )
    def add(self, tokens: list[int], max_tokens: int, priority: int) -> None:
        made = request(f"r{len(self.requests)}", tokens, max_tokens, priority=priority)
        self.requests.append(made)
        self.scheduler.add(made)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule(lambda _: data.draw(st.integers(1, 5)), self.wants_hidden)
        assert plan.scheduled, "a step must make progress"
        for preempted in plan.preempted:
            self.ready.pop(preempted.request_id, None)
        self.resume(plan)
        ended = [item.request for item in plan.scheduled if self.compute(item, data)]
        for item in plan.scheduled:
            name = item.request.request_id
            self.catch_up(item.request, data.draw(st.integers(self.ready.get(name, 0), item.request.num_computed)))
            self.scheduler.publish(item.request, (self.ready[name],))
        self.check_rows()
        self.scheduler.finish(ended)

    def resume(self, plan: Plan) -> None:
        for resumed in plan.resumed:
            made, [*ready] = resumed.request, resumed.num_ready
            if resumed.copy_from is not None:
                for offset in range(resumed.num_copied):
                    for rows in (self.target, self.drafter):
                        copied = rows.get((resumed.copy_from, offset), (-1,))
                        rows[made.block_ids[resumed.copy_to], offset] = copied
            assert made.num_computed > 0
            self.ready[made.request_id] = min(ready[0], made.num_computed) if ready else 0
        self.check_rows()

    def compute(self, item: Any, data: st.DataObject) -> bool:
        """Write the rows, accept some nodes; whether the request ends."""
        made = item.request
        for position in range(made.num_computed, made.num_computed + item.num_span):
            self.write(self.target, made, position, tuple(made.token_ids[: position + 1]))
        made.num_computed += item.num_span
        if not item.reaches_root:
            return False
        root = made.root_position
        for row in range(root, root + item.max_nodes):  # scattered drafts
            self.write(self.target, made, row, (-1,))
            self.write(self.drafter, made, row, (-1,))
        taken = min(data.draw(st.integers(1, item.max_nodes)), made.num_remaining)
        made.token_ids += data.draw(st.lists(st.integers(0, 1), min_size=taken, max_size=taken))
        for position in range(root, root + taken):
            self.write(self.target, made, position, tuple(made.token_ids[: position + 1]))
        made.num_computed += taken
        return made.num_remaining <= 0 or data.draw(st.integers(0, 5)) == 0

    def catch_up(self, made: Request, num_rows: int) -> None:
        """The drafter computes known tokens, in shared blocks too: the same rows again."""
        for position in range(self.ready.get(made.request_id, 0), num_rows):
            slot = (made.block_ids[position // SIZE], position % SIZE)
            self.drafter[slot] = tuple(made.token_ids[: position + 1])
        self.ready[made.request_id] = num_rows

    def write(self, rows: dict[tuple[int, int], Row], made: Request, position: int, row: Row) -> None:
        block = made.block_ids[position // SIZE]
        assert self.pool.num_owners(block) == 1 and not self.pool.is_kept(block), "written into a shared block"
        rows[block, position % SIZE] = row

    def check_rows(self) -> None:
        """Everybody who runs finds the rows of their own prefix."""
        for made in self.scheduler.running:
            for rows, num in ((self.target, made.num_computed), (self.drafter, self.ready.get(made.request_id, 0))):
                for position in range(num):
                    found = rows.get((made.block_ids[position // SIZE], position % SIZE))
                    assert found == tuple(made.token_ids[: position + 1])

    @precondition(lambda self: self.requests)
    @rule(number=st.integers(0, 100))
    def abort(self, number: int) -> None:
        made = self.requests[number % len(self.requests)]
        if made.status is not Status.FINISHED:
            self.scheduler.finish([made])

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.finish([r for r in self.requests if r.status is not Status.FINISHED])
            self.consistent()
            assert self.pool.num_used == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
