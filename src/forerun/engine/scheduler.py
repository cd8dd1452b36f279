"""What each step computes: which requests, how many rows each, on which blocks.

Knows: requests, row budgets, blocks. Does not know: tensors, models, drafters. Prefill chunk, decode and verify are
one thing: a span of known tokens, then a tree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from forerun.cache.block_pool import BlockPool
from forerun.core import Plan, Request, ScheduledRequest, Status

NodeBudget = Callable[[Request], int]  # tree nodes (root included) the policy wants for a request


class Scheduler:
    """Admits waiting requests, hands out blocks and rows, and preempts the youngest when blocks run out.

    A preempted request loses its blocks and is recomputed from its first token when it is admitted again; the
    oldest running request is never preempted, so every request finishes.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, max_num_rows: int, max_model_len: int
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_num_rows = max_num_rows
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request behind the others."""
        self.waiting.append(request)

    def schedule(self, node_budget: NodeBudget) -> Plan:
        """The next step: running requests oldest first, then waiting ones while rows and blocks last."""
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        rows_left = self._max_num_rows
        for request in list(self.running):
            if request.status is not Status.RUNNING or rows_left == 0:
                continue  # preempted a moment ago by an older one
            item = self._fit(request, rows_left, node_budget, preempted)
            if item is not None:
                scheduled.append(item)
                rows_left -= item.num_span + item.max_nodes
        if not preempted:
            self._admit(scheduled, rows_left, node_budget)
        return Plan(tuple(scheduled), tuple(preempted))

    def _admit(self, scheduled: list[ScheduledRequest], rows_left: int, node_budget: NodeBudget) -> None:
        while self.waiting and rows_left > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if self._blocks_for(len(request.token_ids)) > self._pool.num_free:
                return  # first come, first served: nobody overtakes
            self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
            item = self._fit(request, rows_left, node_budget, [])
            assert item is not None, "blocks for the whole prompt were free"
            scheduled.append(item)
            rows_left -= item.num_span + item.max_nodes

    def _fit(
        self, request: Request, rows_left: int, node_budget: NodeBudget, preempted: list[Request]
    ) -> ScheduledRequest | None:
        """As much of the request's work as rows and blocks allow; None if it was preempted itself."""
        wanted = self._cut(request, rows_left, node_budget(request))
        if self._reserve(request, wanted):
            return wanted
        plain = ScheduledRequest(request, wanted.num_span, min(wanted.max_nodes, 1))
        while not self._reserve(request, plain):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return None
        return plain

    def _cut(self, request: Request, rows_left: int, node_budget: int) -> ScheduledRequest:
        """The span up to the root and the tree, cut to the rows that are left."""
        num_span = request.root_position - request.num_computed
        if num_span >= rows_left:
            return ScheduledRequest(request, min(num_span, rows_left), 0)
        room = min(request.num_remaining, self.max_model_len - len(request.token_ids))
        max_nodes = max(1, min(node_budget, rows_left - num_span, room, self.max_model_len - request.root_position))
        return ScheduledRequest(request, num_span, max_nodes)

    def _reserve(self, request: Request, item: ScheduledRequest) -> bool:
        """Give the request blocks for the rows it is about to write."""
        missing = self._blocks_for(request.num_computed + item.num_span + item.max_nodes) - len(request.block_ids)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        request.block_ids.extend(blocks)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, to be recomputed."""
        self.running.remove(request)
        self._release_blocks(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, requests: Iterable[Request]) -> None:
        """Take ended requests out and free their blocks."""
        for request in requests:
            if request.status is Status.RUNNING:
                self.running.remove(request)
            elif request.status is Status.WAITING:
                self.waiting.remove(request)
            self._release_blocks(request)
            request.status = Status.FINISHED

    def _release_blocks(self, request: Request) -> None:
        self._pool.release(request.block_ids)
        request.block_ids.clear()

    def _blocks_for(self, num_rows: int) -> int:
        return -(-num_rows // self._block_size)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks and requests disagree."""
        self._pool.check_integrity()
        owned = [block for request in self.running for block in request.block_ids]
        assert len(owned) == len(set(owned)) == self._pool.num_used, "owned blocks and used blocks differ"
        assert not any(request.block_ids for request in self.waiting), "a waiting request owns blocks"
