"""What each step computes: which requests, how many rows each, on which blocks.

Knows: requests, budgets, blocks, turns. Does not know: tensors, models, drafters. Prefill chunk, decode and verify
are one thing: a span of known tokens, then a tree.

A step is filled in three passes. First every running request gets what it needs to advance: a root for decoding,
a chunk of the prompt for prefill, which has a budget of its own while others decode. Then waiting requests are
admitted. The remaining rows are shared evenly among draft trees.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from operator import attrgetter, itemgetter
from time import perf_counter

from forerun.cache.block_pool import BlockPool
from forerun.cache.prefix_cache import NO_HIT, Hit, PrefixCache
from forerun.core import Plan, Request, Resumed, ScheduledRequest, Status
from forerun.engine.deadlines import Deadlines
from forerun.engine.sharing import SharedPrefixes

NodeBudget = Callable[[Request], int]  # tree nodes (root included) the policy wants for a request
_turn = attrgetter("turn")


def _always(request: Request) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a step, of the queue and of a request."""

    max_num_seqs: int  # requests that run at the same time
    max_num_rows: int  # rows of a step: known tokens and tree nodes
    max_model_len: int
    max_num_prefill_rows: int | None = None  # rows of prefill while others decode; None: no extra limit
    max_num_nodes: int | None = None  # tree nodes of a step, roots included; None: as many as rows
    max_num_waiting: int | None = None  # requests that may wait; None: any number
    priority_s: float = 10.0  # seconds of waiting that make up for one level of priority


@dataclass(slots=True)
class _Step:
    """The plan so far."""

    rows_left: int
    prefill_left: int
    may_choose: Callable[[Request], bool]
    items: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether another prompt can begin."""
        return min(self.rows_left, self.prefill_left) > 0

    def take(self, item: ScheduledRequest, is_prefill: bool) -> None:
        """Add an item and count its rows."""
        self.items.append(item)
        num_rows = item.num_span + item.max_nodes
        self.rows_left -= num_rows
        self.prefill_left -= num_rows if is_prefill else 0

    def plan(self) -> Plan:
        """The finished plan."""
        return Plan(tuple(self.items), tuple(self.preempted), tuple(self.resumed))


class Scheduler:
    """Admits waiting requests, assigns blocks and rows, and preempts the last in order when blocks run out.

    Requests are ordered by arrival, where a level of priority counts as some seconds of waiting; so the order of two
    requests never changes, and no request starves. A preempted request loses its blocks and recomputes what the
    prefix cache has not kept of them. The first in order is never preempted, so every request finishes.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        limits: Limits,
        prefix_cache: PrefixCache | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        assert pool.num_blocks * block_size >= limits.max_model_len, "the longest request does not fit into the pool"
        self.limits = limits
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.waiting: list[Request] = []  # first in turn first
        self.running: list[Request] = []  # first in turn first
        self.clock = clock  # deadlines are times of this clock
        self._block_size = block_size
        self._arrivals = count()
        self._shared = SharedPrefixes(prefix_cache) if prefix_cache else None
        self.deadlines = Deadlines()

    @property
    def max_model_len(self) -> int:
        """Tokens a request may have."""
        return self.limits.max_model_len

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self.waiting or self.running)

    # -- the queue ----------------------------------------------------------------------------------------------

    def can_admit(self, num_requests: int) -> bool:
        """Whether `num_requests` more may be added: there are seats for them, or places in the queue."""
        if self.limits.max_num_waiting is None:
            return True
        seats = self.limits.max_num_seqs - len(self.running)
        return len(self.waiting) + num_requests <= self.limits.max_num_waiting + seats

    def add(self, request: Request) -> None:
        """Insert a request into the queue by its order."""
        if request.arrival_s is None:
            request.arrival_s = self.clock()
        request.turn = (request.arrival_s + request.priority * self.limits.priority_s, next(self._arrivals))
        insort(self.waiting, request, key=_turn)
        self.deadlines.add(request)

    def overdue(self) -> list[Request]:
        """Unfinished requests whose deadline has passed."""
        return self.deadlines.passed(self.clock()) if self.deadlines.any else []

    # -- planning a step ----------------------------------------------------------------------------------------

    def schedule(
        self, node_budget: NodeBudget, needs_boundary: bool = False, may_choose: Callable[[Request], bool] = _always
    ) -> Plan:
        """The next step. `needs_boundary`: the drafter needs hidden states of the token before the first computed one.

        A request that may not choose a token now gets rows up to the root, but not the root.
        """
        step = self._begin(may_choose)
        for request in list(self.running):
            if request.status is Status.RUNNING:  # not just preempted by one before it
                self._continue(request, step)
        if self.waiting and not step.preempted:
            self._admit(step, needs_boundary)
        self._grow_trees(step, node_budget)
        return step.plan()

    def decode_all(self, node_budget: NodeBudget) -> list[int] | None:
        """Tree nodes of each running request, as `schedule` would give them, if all of them decode and none begins.

        None if not; blocks that may have been reserved then are those that `schedule` reserves.
        """
        running, num_left = self.running, self.limits.max_num_rows - len(self.running)
        if (self.waiting and self._has_seat) or num_left < 0:
            return None
        for request in running:
            num_known = len(request.token_ids)
            if request.num_computed != num_known - 1:
                return None
            if num_known > len(request.block_ids) * self._block_size and not self._reserve(request, num_known):
                return None
        if max([node_budget(request) for request in running], default=1) <= 1:
            return [1] * len(running)
        step = _Step(num_left, num_left, _always, [ScheduledRequest(request, 0, 1) for request in running])
        self._grow_trees(step, node_budget)
        return [item.max_nodes for item in step.items]

    def _begin(self, may_choose: Callable[[Request], bool]) -> _Step:
        """An empty plan. While requests decode, prefill leaves a row for each of them and has a limit of its own."""
        rows = self.limits.max_num_rows
        num_decoding = sum([_is_decoding(request) for request in self.running])
        if num_decoding == 0:
            return _Step(rows, rows, may_choose)
        most = self.limits.max_num_prefill_rows
        return _Step(rows, min(rows - num_decoding, rows if most is None else most), may_choose)

    def _continue(self, request: Request, step: _Step) -> None:
        """Give the request what it needs to advance, preempting later ones if needed."""
        is_prefill = not _is_decoding(request)
        rows = min(step.rows_left, step.prefill_left) if is_prefill else step.rows_left
        if rows <= 0:
            return
        num_span = request.root_position - request.num_computed
        rows = min(rows, self._rows_to_kept_state(request))
        chooses = num_span < rows and step.may_choose(request)
        item = ScheduledRequest(request, num_span, 1) if chooses else ScheduledRequest(request, min(num_span, rows), 0)
        if item.num_span + item.max_nodes == 0:
            return
        while not self._reserve(request, _end(item)):
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return
        step.take(item, is_prefill)

    def _rows_to_kept_state(self, request: Request) -> int:
        """Rows up to where the state is kept that others will go on from: the last block end in the prompt."""
        if self.prefix_cache is None or self.prefix_cache.states is None:
            return self.limits.max_num_rows
        end = self.prefix_cache.last_end(request)
        return end - request.num_computed if request.num_computed < end else self.limits.max_num_rows

    def _grow_trees(self, step: _Step, node_budget: NodeBudget) -> None:
        """Share the remaining rows among requests that choose a token, none getting more than the policy wants."""
        items = [item for item in step.items if item.max_nodes > 0]
        wishes = [(self._more_nodes(item, node_budget(item.request)), item) for item in items]
        wishes = [wish for wish in wishes if wish[0] > 0]
        if not wishes:
            return
        most = self.limits.max_num_nodes
        left = step.rows_left if most is None else min(step.rows_left, most - len(items))
        wishes.sort(key=itemgetter(0))
        for num_served, (wanted, item) in enumerate(wishes):
            num_nodes = min(wanted, left // (len(wishes) - num_served), self._rows_within_reach(item))
            if num_nodes > 0:
                item.max_nodes += num_nodes
                left -= num_nodes
                self._reserve(item.request, _end(item))

    def _more_nodes(self, item: ScheduledRequest, wanted: int) -> int:
        """Useful tree nodes besides the root, at most as many as the policy wants."""
        request, longest = item.request, self.limits.max_model_len
        return min(wanted, request.num_remaining, longest - len(request.token_ids)) - 1

    def _rows_within_reach(self, item: ScheduledRequest) -> int:
        """Rows after the item's last one in blocks that its request owns or that are available."""
        return (len(item.request.block_ids) + self.pool.num_available) * self._block_size - _end(item)

    def _reserve(self, request: Request, num_rows: int) -> bool:
        """Make sure that the request owns blocks for `num_rows` rows; returns whether it does."""
        missing = self._blocks_for(num_rows) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def _blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)

    # -- admission ----------------------------------------------------------------------------------------------

    def _admit(self, step: _Step, needs_boundary: bool) -> None:
        """Start waiting requests in order. Only those that wait for a running request's prefix are skipped."""
        if self._shared is not None:
            self._shared.begin_step(self.running)
        index = 0
        while index < min(len(self.waiting), self.limits.max_num_seqs) and step.has_room and self._has_seat:
            request = self.waiting[index]
            hit = self._find(request)
            if hit is None:
                index += 1
            elif self._start(request, hit, step, needs_boundary):
                del self.waiting[index]
            else:
                return

    @property
    def _has_seat(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _find(self, request: Request) -> Hit | None:
        """What the cache has for a request; None if more of it will be there soon."""
        if self._shared is None or self.prefix_cache is None:
            return NO_HIT
        if request.prompt_logprobs is not None:  # needs the logits of all prompt rows
            return self.prefix_cache.nothing(request.adapter, request.cache_salt)
        if self._shared.is_waiting(request):
            return None
        hit = self.prefix_cache.lookup(request.token_ids, request.adapter, request.cache_salt)
        return None if self._shared.must_wait(request, hit) else hit

    def _start(self, request: Request, hit: Hit, step: _Step, needs_boundary: bool) -> bool:
        """Start a request if there are blocks for all its tokens, and schedule its first rows."""
        num_blocks = self._blocks_for(len(request.token_ids))
        affordable = self._afford(hit, num_blocks)
        if affordable is None:
            return False
        hit = affordable
        request.block_ids.extend(self._take_blocks(hit, num_blocks))
        request.num_computed = self._first_row(request, hit, needs_boundary)
        request.status = Status.RUNNING
        insort(self.running, request, key=_turn)
        self._note_start(request, hit, step)
        self._continue(request, step)
        return True

    def _afford(self, hit: Hit, num_blocks: int) -> Hit | None:
        """The hit, or its full blocks only, if enough other blocks are available; else None."""
        available = self.pool.num_available - sum(map(self.pool.is_cached, hit.blocks))
        missing = num_blocks - len(hit.blocks)
        if missing > available:
            return None
        if hit.copy_from is not None and missing + self.pool.is_cached(hit.copy_from) > available:
            return hit.without_copy()
        return hit

    def _take_blocks(self, hit: Hit, num_blocks: int) -> list[int]:
        """A block table of the hit's blocks and new ones; the block to copy from is not reused as a new one."""
        held = [] if hit.copy_from is None else [hit.copy_from]
        self.pool.share([*hit.blocks, *held])
        fresh = self.pool.allocate(num_blocks - len(hit.blocks))
        assert fresh is not None, "the blocks were available"
        self.pool.release(held)
        return [*hit.blocks, *fresh]

    def _first_row(self, request: Request, hit: Hit, needs_boundary: bool) -> int:
        """Where the target continues: after the hit, or a row earlier if the last row's hidden state is not kept."""
        known = len(hit.blocks) * self._block_size + hit.num_copied
        return min(known - (needs_boundary and hit.num_copied > 0), request.root_position)

    def _note_start(self, request: Request, hit: Hit, step: _Step) -> None:
        """Record the start in the cache, the figures and the step."""
        if self._shared is None or self.prefix_cache is None:
            return
        self.prefix_cache.open(request, hit)
        self._shared.add(request)
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed, len(request.prompt_token_ids))
            self.prefix_cache.stats.add(len(request.token_ids), request.num_computed)
        if request.num_computed > 0:
            step.resumed.append(Resumed(request, hit.num_ready, hit.copy_from, len(hit.blocks), hit.num_copied))

    # -- ending -------------------------------------------------------------------------------------------------

    def publish(self, request: Request, num_ready: tuple[int, ...]) -> None:
        """A step is over: share the request's full blocks with others. `num_ready`: see `Drafter.num_ready`."""
        if self.prefix_cache is not None:
            self.prefix_cache.publish(request, num_ready)

    def _preempt(self, request: Request) -> None:
        """Return a request to the queue; whatever the cache loses of it until its restart is recomputed."""
        self.running.remove(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        insort(self.waiting, request, key=_turn)

    def preempt_all(self) -> list[Request]:
        """A step did not end: every running request returns to the queue -> these requests."""
        self.waiting = [request for request in self.waiting if request.status is Status.WAITING]  # one had just started
        preempted = list(self.running)
        for request in preempted:
            self._preempt(request)
        return preempted

    def finish(self, requests: Iterable[Request]) -> None:
        """Remove ended requests and free their blocks."""
        for request in requests:
            if request.status is Status.RUNNING:
                self.running.remove(request)
                self._release(request)
            elif request.status is Status.WAITING:
                del self.waiting[bisect_left(self.waiting, request.turn, key=_turn)]
            if self._shared is not None:
                self._shared.end(request)
            self.deadlines.end(request)
            request.status = Status.FINISHED

    def _release(self, request: Request) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.close(request)
        self.pool.release(request.block_ids)
        request.block_ids.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, prefixes and requests disagree."""
        self.pool.check_integrity()
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
        owners = Counter(block for request in self.running for block in request.block_ids)
        assert len(owners) == self.pool.num_used, "owned blocks and used blocks differ"
        for block, num_owners in owners.items():
            assert self.pool.num_owners(block) == num_owners, f"block {block} is counted wrong"
            assert num_owners == 1 or self.pool.is_kept(block), f"block {block} is shared but not full and known"
        assert not any(request.block_ids for request in self.waiting), "a waiting request owns blocks"
        for line in (self.waiting, self.running):
            assert all(a.turn < b.turn for a, b in pairwise(line)), "requests are out of turn"
        for request in self.running:
            speculative = request.block_ids[request.num_computed // self._block_size :]
            assert not any(map(self.pool.is_kept, speculative)), f"{request.request_id} may write into kept blocks"


def _end(item: ScheduledRequest) -> int:
    """The logical row after the last one that the request may write."""
    return item.request.num_computed + item.num_span + item.max_nodes


def _is_decoding(request: Request) -> bool:
    return request.num_computed == request.root_position
