"""The step: schedule, draft, forward, verify, commit.

Knows: the order of things. Does not know: how any of them is done, nor text, chat or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from torch import Tensor

from forerun.cache.kv_cache import KVCache, Move
from forerun.core import Plan, PositionLogprobs, Request, ScheduledRequest
from forerun.drafters.base import Drafter, Observed
from forerun.engine.logprobs import position_logprobs
from forerun.engine.outputs import RequestGroup, SampleRecord
from forerun.engine.policy import Policy
from forerun.engine.scheduler import Scheduler
from forerun.errors import LogitsError
from forerun.kernels.ops import LayerKV
from forerun.models.base import CommittedPath, ForwardOutput, Model
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.speculation.growth import Draft
from forerun.speculation.tree import DraftTree
from forerun.speculation.verifier import Candidate
from forerun.speculation.verify import Choice

_USUAL_LAG = 1  # tokens a drafter lags behind after a step that accepted everything
_LONG_LAG = 32  # tokens whose reading takes so much longer than drafting that it tells what reading costs


class Verifier(Protocol):
    """Turns logits into choices under one acceptance rule."""

    def verify(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """One choice or error a candidate."""


@dataclass(slots=True)
class Timings:
    """Cumulative seconds by phase, over `steps` steps."""

    schedule_s: float = 0.0
    draft_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    steps: int = 0
    _mark: float = 0.0

    def start(self) -> None:
        """A step begins."""
        self.steps += 1
        self._mark = perf_counter()

    def lap(self, phase: str) -> float:
        """Add the time since the last mark to `phase`; that time."""
        now = perf_counter()
        seconds = now - self._mark
        setattr(self, phase, getattr(self, phase) + seconds)
        self._mark = now
        return seconds


@dataclass(slots=True)
class _Work:
    """One scheduled request on its way through a step."""

    item: ScheduledRequest
    record: SampleRecord
    tree: DraftTree | None  # None: the span stops short of the root
    first_row: int = 0  # of the batch
    first_logit: int = 0  # row of the logits that belongs to the span's first token, or to the root
    span_logits: bool = False

    @property
    def root_logit(self) -> int:
        """Row of the logits that belongs to the root."""
        return self.first_logit + (self.item.num_span if self.span_logits else 0)


@dataclass(slots=True)
class Engine:
    """Runs requests to their end, many at once. Not thread-safe: one thread steps it."""

    model: Model
    drafter: Drafter
    verifier: Verifier
    policy: Policy
    scheduler: Scheduler
    kv_cache: KVCache
    groups: dict[str, RequestGroup] = field(default_factory=dict)
    records: dict[str, SampleRecord] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return self.scheduler.has_work

    def add(self, group: RequestGroup) -> None:
        """Queue the samples of one user request."""
        self.groups[group.request_id] = group
        for sample in group.samples:
            self.records[sample.request.request_id] = sample
            self.drafter.begin(sample.request)
            self.scheduler.add(sample.request)

    def abort(self, group_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored."""
        group = self.groups.get(group_id)
        if group is not None:
            alive = [s.request for s in group.samples if s.request.finish_reason is None]
            for request in alive:
                request.finish_reason = "abort"
            self._end(alive)

    def step(self) -> list[RequestGroup]:
        """Advance the scheduled requests by one pass of the target; the groups that changed."""
        clock = self.timings
        clock.start()
        plan = self._schedule()
        overhead_s = clock.lap("schedule_s")
        work = self._draft(plan)
        clock.lap("draft_s")
        batch = self._build(work)
        overhead_s += clock.lap("build_s")
        out = self.model.forward(batch, self._kvs, self.drafter.hidden_layers)
        forward_s = clock.lap("forward_s")
        choices = self._verify(work, out)
        overhead_s += clock.lap("verify_s")
        observed = self._commit(work, choices, out)
        self.drafter.observe(observed, out.hidden)
        changed = self._finish(work)
        self.policy.learn_step_cost(batch.num_rows, forward_s, overhead_s + clock.lap("commit_s"))
        return changed

    @property
    def _kvs(self) -> Sequence[LayerKV]:
        return self.kv_cache.layers[: len(self.model.kv_specs)]

    # -- schedule, draft, build ---------------------------------------------------------------------------------

    def _schedule(self) -> Plan:
        """Ask the scheduler, and let everyone forget what was preempted."""
        self.policy.begin_step(len(self.scheduler.running) or len(self.scheduler.waiting))
        plan = self.scheduler.schedule(self.policy.node_budget)
        for request in plan.preempted:
            self.drafter.end(request.request_id)
            self.model.release(request.request_id)
        return plan

    def _draft(self, plan: Plan) -> list[_Work]:
        """A tree for every request that reaches its root, grown where there is room for drafts."""
        drafts = {item.request.request_id: Draft(item.request, item.max_nodes) for item in plan.deciding}
        growing = [draft for draft in drafts.values() if draft.max_nodes > 1]
        if growing:
            start = perf_counter()
            self.drafter.propose(growing)
            self._learn_draft_cost(growing, perf_counter() - start)
        return [self._work(item, drafts.get(item.request.request_id)) for item in plan.scheduled]

    def _learn_draft_cost(self, drafts: Sequence[Draft], seconds: float) -> None:
        """Tell the policy what drafting took, or what it took to read first what the drafter had missed."""
        num_caught_up = sum(draft.num_caught_up for draft in drafts)
        if num_caught_up <= _USUAL_LAG * len(drafts):
            self.policy.learn_draft_cost(seconds, max(len(draft.tree) for draft in drafts) - 1)
        elif num_caught_up >= _LONG_LAG:
            self.policy.learn_catch_up(seconds, num_caught_up)

    def _work(self, item: ScheduledRequest, draft: Draft | None) -> _Work:
        record = self.records[item.request.request_id]
        record.scheduled()
        return _Work(item, record, draft.tree if draft else None)

    def _build(self, work: Sequence[_Work]) -> ForwardBatch:
        """Lay out all rows and note where each request's begin."""
        num_rows = num_logits = 0
        sequences = []
        for entry in work:
            entry.first_row, entry.first_logit = num_rows, num_logits
            entry.span_logits = _wants_span_logits(entry.item)
            sequences.append(_sequence(entry))
            num_nodes = len(entry.tree) if entry.tree else 0
            num_rows += entry.item.num_span + num_nodes
            num_logits += num_nodes + (entry.item.num_span if entry.span_logits else 0)
        return ForwardBatch.build(sequences, self.kv_cache.block_size)

    # -- verify, commit -----------------------------------------------------------------------------------------

    def _verify(self, work: Sequence[_Work], out: ForwardOutput) -> list[Choice | LogitsError | None]:
        """One choice or error for every request that reached its root, None for the others."""
        candidates = [Candidate(e.item.request, e.tree, e.root_logit) for e in work if e.tree is not None]
        decided = iter(self.verifier.verify(out.logits, candidates))
        return [next(decided) if entry.tree is not None else None for entry in work]

    def _commit(
        self, work: Sequence[_Work], choices: Sequence[Choice | LogitsError | None], out: ForwardOutput
    ) -> list[Observed]:
        """Make what was decided known: tokens, KV rows, figures."""
        observed, moves, paths = [], [], []
        for entry, choice in zip(work, choices, strict=True):
            root = entry.item.request.root_position
            seen = self._take(entry, choice, out.logits)
            observed.append(seen)
            paths.append(CommittedPath(seen.request.request_id, seen.nodes))
            moves.append(_move(seen, root))
        self.kv_cache.commit(moves)
        self.model.commit(paths)
        return observed

    def _take(self, entry: _Work, choice: Choice | LogitsError | None, logits: Tensor) -> Observed:
        """Give one request its tokens and say what became known of it."""
        request = entry.item.request
        _take_prompt_logprobs(entry, logits)
        request.num_computed += entry.item.num_span
        nodes: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        if isinstance(choice, LogitsError):
            request.finish_reason, request.error = "error", choice
        elif choice is not None:
            nodes, tokens = self._emit(entry, choice, logits)
            request.num_computed += len(nodes)
        return Observed(request, entry.first_row, entry.item.num_span, nodes, tokens)

    def _emit(self, entry: _Work, choice: Choice, logits: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Append the accepted tokens and the one after them, as far as the request goes on -> (nodes, tokens)."""
        assert entry.tree is not None
        tree, record = entry.tree, entry.record
        tokens = [*(tree.tokens[node] for node in choice.nodes[1:]), choice.token]
        num_taken = record.text.take(tokens)
        nodes = choice.nodes[: num_taken + 1]
        sources = [*(tree.sources[node] for node in nodes[1:]), ""][:num_taken]
        record.drafted(tree.sources[1:], [tree.sources[node] for node in nodes[1:]])
        record.emitted(sources, _token_logprobs(entry, nodes, tokens[:num_taken], logits))
        stopped_at_leaf = not tree.children(choice.nodes[-1])
        num_accepted = len(choice.nodes) - 1
        self.policy.learn(entry.item.request, len(tree) - 1, num_accepted + (not stopped_at_leaf), num_accepted)
        return nodes, tuple(tokens[:num_taken])

    def _finish(self, work: Sequence[_Work]) -> list[RequestGroup]:
        """Free what ended; the groups that changed."""
        changed = {}
        for entry in work:
            if entry.tree is not None:
                group_id = entry.item.request.parent_id
                changed[group_id] = self.groups[group_id]
        self._end([e.item.request for e in work if e.item.request.finish_reason is not None])
        return list(changed.values())

    def _end(self, requests: Sequence[Request]) -> None:
        """Take ended requests out everywhere; a group goes with its last sample."""
        self.scheduler.finish(requests)
        for request in requests:
            self.drafter.end(request.request_id)
            self.model.release(request.request_id)
            self.policy.end(request)
            del self.records[request.request_id]
            if request.parent_id in self.groups and self.groups[request.parent_id].finished:
                del self.groups[request.parent_id]


def _wants_span_logits(item: ScheduledRequest) -> bool:
    """The span holds prompt tokens whose successors' log-probabilities were asked for."""
    request = item.request
    return request.params.prompt_logprobs is not None and request.num_computed < len(request.prompt_token_ids) - 1


def _sequence(entry: _Work) -> SequenceRows:
    request, tree = entry.item.request, entry.tree
    start, end = request.num_computed, request.num_computed + entry.item.num_span
    return SequenceRows(
        request_id=request.request_id,
        block_table=request.block_ids,
        start=start,
        span=request.token_ids[start:end],
        tree_start=end,
        tree_tokens=tree.tokens if tree else (),
        tree_rows=range(len(tree)) if tree else (),
        tree_masks=tree.masks if tree else (),
        tree_depths=tree.depths if tree else (),
        span_logits=entry.span_logits,
    )


def _move(seen: Observed, root: int) -> Move:
    """Accepted nodes to the rows right behind the root."""
    return Move(seen.request.block_ids, [root + node for node in seen.nodes], range(root, root + len(seen.nodes)))


def _token_logprobs(
    entry: _Work, nodes: Sequence[int], tokens: Sequence[int], logits: Tensor
) -> list[PositionLogprobs]:
    """Log-probabilities of the emitted tokens, if asked for: token i was chosen after node i of the path."""
    num_top = entry.item.request.params.logprobs
    if num_top is None:
        return []
    rows = [logits[entry.root_logit + node] for node in nodes[: len(tokens)]]
    return [position_logprobs(row, token, num_top) for row, token in zip(rows, tokens, strict=True)]


def _take_prompt_logprobs(entry: _Work, logits: Tensor) -> None:
    request, num_top = entry.item.request, entry.item.request.params.prompt_logprobs
    if not entry.span_logits or num_top is None:
        return
    start = request.num_computed
    for offset in range(entry.item.num_span):
        position = start + offset + 1  # of the token this row predicts
        if position < len(request.prompt_token_ids) and position not in entry.record.prompt_logprobs:
            row = logits[entry.first_logit + offset]
            token = request.prompt_token_ids[position]
            entry.record.prompt_logprobs[position] = position_logprobs(row, token, num_top)
