"""The step: schedule, draft, forward, verify, commit.

Knows: the order of these phases. Does not know: how any of them is done, nor text, chat or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from forerun.cache.boundaries import BoundaryStates
from forerun.cache.kv_cache import KVCache
from forerun.core import Plan, PositionLogprobs, Request, Resumed, ScheduledRequest
from forerun.drafters.base import EngineDrafter, Observed, logits_reader
from forerun.engine.logprobs import token_logprobs
from forerun.engine.masks import MaskWaits, ask_ahead
from forerun.engine.outputs import RequestGroup, SampleRecord, share_time, too_late
from forerun.engine.scheduler import Scheduler
from forerun.engine.steady import SteadySteps
from forerun.engine.timings import Timings
from forerun.engine.work import Work, join_rows, move_of, roots_of, rows_of
from forerun.errors import LogitsError, QueueFullError
from forerun.kernels.device import synchronize
from forerun.kernels.ops import LayerKV
from forerun.models.base import CommittedPath, Model, PassOutput, exchanges
from forerun.models.batch import ForwardBatch
from forerun.policy.base import Outcome, Policy, StepPlan, StepResult
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft, pending_of
from forerun.speculation.verifier import Candidate
from forerun.speculation.verify import Choice


class Verifier(Protocol):
    """Turns logits into choices under one acceptance rule."""

    def verify(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """One choice or error per candidate."""

    def reads_pending(self, requests: Sequence[Request]) -> bool:
        """Whether drafts of these requests may be pending until they are verified."""


@dataclass(slots=True)
class Engine:
    """Runs requests to their end, many at once. Not thread-safe: one thread steps it."""

    model: Model
    runner: Runner  # executes the model's passes, with the hidden states the drafter needs
    bare: Runner | None  # without them, for steps of which nobody wants any; None: `runner` executes all
    drafter: EngineDrafter
    verifier: Verifier
    policy: Policy
    scheduler: Scheduler
    kv_cache: KVCache
    groups: dict[str, RequestGroup] = field(default_factory=dict)
    records: dict[str, SampleRecord] = field(default_factory=dict)
    timings: Timings = field(default_factory=Timings)
    masks: MaskWaits = field(default_factory=MaskWaits)
    torch_threads: Callable[[], AbstractContextManager[None]] = nullcontext  # around a step
    keep: Callable[[], None] | None = None  # called when requests have ended: saves what the policy learned
    meanwhile: Callable[[], None] | None = None  # once a step, while a GPU computes; may not touch requests
    boundaries: BoundaryStates = field(init=False)
    steady: SteadySteps | None = field(default_factory=SteadySteps)  # None: every step is made phase by phase

    def __post_init__(self) -> None:
        self.boundaries = BoundaryStates(self.kv_cache.block_size)

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return self.scheduler.has_work

    def add(self, group: RequestGroup) -> None:
        """Queue the samples of one user request. Raises QueueFullError if too many wait already."""
        self._check_queue(len(group.samples))
        self.groups[group.request_id] = group
        for sample in group.samples:
            self.records[sample.request.request_id] = sample
            self.drafter.begin(sample.request)
            self.scheduler.add(sample.request)

    def _check_queue(self, num_requests: int) -> None:
        if not self.scheduler.can_admit(num_requests):
            raise QueueFullError(
                f"{num_requests} more requests would wait behind {len(self.scheduler.waiting)}, but max_num_waiting is "
                f"{self.scheduler.limits.max_num_waiting}: try again later, or raise it"
            )

    def abort(self, group_id: str) -> None:
        """End a request now; its blocks are free when this returns. Unknown ids are ignored."""
        group = self.groups.get(group_id)
        if group is not None:
            alive = [s.request for s in group.samples if s.request.finish_reason is None]
            for request in alive:
                request.finish_reason = "abort"
            self._end(alive)

    def step(self) -> list[RequestGroup]:
        """Advance the scheduled requests by one pass of the target -> the groups that changed.

        If it is interrupted or fails, what the running requests have beside their tokens is computed again.
        """
        with self.torch_threads():
            try:
                return self._step()
            except BaseException:
                self._restart()
                raise

    def _restart(self) -> None:
        """Tokens, rows and states may have been changed in part: keep the tokens, forget the others."""
        self._end([r for r in self.scheduler.running if r.finish_reason is not None])
        self._forget(self.scheduler.preempt_all())

    def _forget(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.drafter.end(request.request_id)
            self.model.release(request.request_id)

    def _step(self) -> list[RequestGroup]:
        self.timings.start()
        wanted = self.policy.plan(self.scheduler.running or self.scheduler.waiting)
        drafts = None if self.steady is None else self.steady.plan(self, wanted)
        if self.steady is not None and drafts is not None:
            return self._steady_step(self.steady, drafts, wanted)
        plan = self._schedule(wanted)
        self.timings.lap("schedule_s")
        if not plan.scheduled:
            return self._pause()
        return self._go_on(self._draft(plan, wanted))

    def _steady_step(self, steady: SteadySteps, drafts: Sequence[Draft], wanted: StepPlan) -> list[RequestGroup]:
        """All requests decode: at once if that can be, else phase by phase."""
        if drafts is not steady.alone:
            self._grow([draft for draft in drafts if draft.max_nodes > 1], wanted)
            self.timings.lap("draft_s")
        changed = steady.step(self, drafts)
        if changed is not None:
            return changed
        rooted = [draft if draft.max_nodes > 1 else Draft(draft.request, 1, False, wanted) for draft in drafts]
        return self._go_on([self._work(ScheduledRequest(d.request, 0, d.max_nodes), d) for d in rooted])

    def _go_on(self, work: Sequence[Work]) -> list[RequestGroup]:
        """The step from its drafts on."""
        clock = self.timings
        clock.lap("draft_s")
        batch = self._build(work)
        clock.lap("build_s")
        out, choices = self._decide(work, batch)
        observed = self._commit(work, choices, out)
        self._show_logits(work, batch, out)
        self.drafter.observe(observed, out.hidden)
        self._publish(observed, out)
        clock.lap("commit_s")
        outcomes = [
            Outcome(entry.item.request, entry.draft, seen.tokens)
            for entry, seen in zip(work, observed, strict=True)
            if entry.draft is not None
        ]
        num_span = sum([entry.item.num_span for entry in work])
        self.learn(outcomes, batch.num_rows - num_span, num_span)
        changed = self.finish([outcome.request for outcome in outcomes], [entry.item.request for entry in work])
        clock.end()
        return changed

    def _pause(self) -> list[RequestGroup]:
        """A step in which all requests wait for grammar masks."""
        if self.meanwhile is not None:
            self.meanwhile()
        self.masks.wait(self.scheduler.running)
        return self.finish((), ())

    def learn(self, outcomes: Sequence[Outcome], num_rows: int, num_span: int) -> None:
        """Tell the policy and the requests' records what the step did and how long it took."""
        result = StepResult(outcomes, self.drafter.take_calls(), num_rows, num_span, self.timings.take())
        self.policy.learn(result)
        share_time(result, self.records, self.policy.plain_s(len(outcomes)))

    def runner_for(self, requests: Sequence[Request]) -> Runner:
        """Who executes the next pass over rows of these requests."""
        return self.runner if self.bare is None or self.drafter.wants_states(requests) else self.bare

    @property
    def _kvs(self) -> Sequence[LayerKV]:
        return self.kv_cache.layers[: len(self.model.kv_specs)]

    # -- schedule, draft, build ---------------------------------------------------------------------------------

    def _schedule(self, wanted: StepPlan) -> Plan:
        """Ask the scheduler; forget the state of preempted requests, and resume others from the prefix cache."""
        self.masks.begin_step(self.scheduler.running)
        max_nodes = self.masks.with_forced(wanted.max_nodes, self.drafter, self.model.vocab_size)
        plan = self.scheduler.schedule(max_nodes, bool(self.drafter.hidden_layers), self.masks.may_choose)
        self._forget(plan.preempted)
        for resumed in plan.resumed:
            self._resume(resumed)
        return plan

    def _resume(self, resumed: Resumed) -> None:
        """Copy the rows of the prefix that the request cannot share; tell the drafter what is available."""
        request = resumed.request
        if resumed.copy_from is not None:
            self.kv_cache.copy_rows(resumed.copy_from, request.block_ids[resumed.copy_to], resumed.num_copied)
        boundary = self.boundaries.before(request.block_ids, request.num_computed)
        self.drafter.resume(request, resumed.num_ready, boundary)

    def _draft(self, plan: Plan, wanted: StepPlan) -> list[Work]:
        """A tree for every request that reaches its root, grown where there is room for drafts."""
        requests = [item.request for item in plan.scheduled if item.reaches_root]
        may_be_pending = (
            self.verifier.reads_pending(requests)
            and bool(self._kvs)
            and not wanted.looks_at_drafts
            and not exchanges(self.model)  # other ranks are told the drafts
        )
        work = [
            self._work(item, Draft(item.request, item.max_nodes, may_be_pending, wanted) if item.reaches_root else None)
            for item in plan.scheduled
        ]
        growing = [draft for entry in work if (draft := entry.draft) is not None and draft.max_nodes > 1]
        if growing:
            self._grow(growing, wanted)
        return work

    def _grow(self, drafts: Sequence[Draft], wanted: StepPlan) -> None:
        """Let the drafter add to the drafts what is wanted."""
        self.masks.draft_forced(drafts, self.drafter, self.model.vocab_size)
        self.drafter.propose(drafts)
        wanted.prune(drafts)
        ask_ahead([draft for draft in drafts if draft.pending is None])

    def _work(self, item: ScheduledRequest, draft: Draft | None) -> Work:
        record = self.records[item.request.request_id]
        record.scheduled()
        return Work(item, record, draft)

    def _build(self, work: Sequence[Work]) -> ForwardBatch:
        """Lay out all rows and record where each request's rows begin."""
        num_rows = num_logits = 0
        sequences = []
        for entry in work:
            entry.first_row, entry.first_logit = num_rows, num_logits
            entry.span_logits = entry.record.wants_prompt
            sequences.append(rows_of(entry))
            num_nodes = entry.draft.num_nodes if entry.draft is not None else 0
            num_rows += entry.item.num_span + num_nodes
            num_logits += num_nodes + (entry.item.num_span if entry.span_logits else 0)
        batch = ForwardBatch.build(sequences, self.kv_cache.block_size, adapters=[e.item.request.adapter for e in work])
        waiting = [(draft, row) for draft, row in roots_of(work) if draft.pending is not None]
        pending = pending_of([draft for draft, _ in waiting])
        if pending is None:
            return batch
        return replace(batch, pending=pending.rows(waiting))

    # -- verify, commit -----------------------------------------------------------------------------------------

    def _decide(
        self, work: Sequence[Work], batch: ForwardBatch
    ) -> tuple[PassOutput, list[Choice | LogitsError | None]]:
        """Run the pass and choose tokens from it.

        On a GPU the host waits only once, for the choices, so that choosing is timed as part of the pass.
        """
        out = self.runner_for([entry.item.request for entry in work]).run(batch)
        if self.meanwhile is not None:
            self.meanwhile()
        if self.kv_cache.device.type == "cpu":
            self.timings.lap("forward_s")
            choices = self._verify(work, out)
            self.timings.lap("verify_s")
            return out, choices
        choices = self._verify(work, out)
        if all(entry.draft is None for entry in work):  # nothing was read from the pass, which computed prompts only
            synchronize(self.kv_cache.device)
        self.timings.lap("forward_s")
        return out, choices

    def _verify(self, work: Sequence[Work], out: PassOutput) -> list[Choice | LogitsError | None]:
        """One choice or error for every request that reached its root, None for the others."""
        candidates = [Candidate(entry.draft, entry.root_logit) for entry in work if entry.draft is not None]
        decided = iter(self.verifier.verify(out.logits, candidates))
        return [next(decided) if entry.draft is not None else None for entry in work]

    def _commit(
        self, work: Sequence[Work], choices: Sequence[Choice | LogitsError | None], out: PassOutput
    ) -> list[Observed]:
        """Apply the choices: tokens, KV rows, figures."""
        observed, moves, paths = [], [], []
        for entry, choice in zip(work, choices, strict=True):
            root = entry.item.request.root_position
            seen = self._take(entry, choice, out.logits)
            observed.append(seen)
            paths.append(CommittedPath(seen.request.request_id, seen.nodes))
            if seen.nodes and seen.nodes[-1] >= len(seen.nodes):
                moves.append(move_of(seen, root))
        if moves:
            self.kv_cache.commit(moves)
        self.model.commit(paths)
        return observed

    def _take(self, entry: Work, choice: Choice | LogitsError | None, logits: Tensor) -> Observed:
        """Give one request its tokens -> what the drafter observes."""
        request = entry.item.request
        if entry.span_logits:
            entry.record.read_prompt(logits[entry.first_logit : entry.first_logit + entry.item.num_span])
        request.num_computed += entry.item.num_span
        nodes, tokens = tuple[int, ...](), tuple[int, ...]()
        if isinstance(choice, LogitsError):
            request.finish_reason, request.error = "error", choice
        elif choice is not None:
            nodes, tokens = self._emit(entry, choice, logits)
            request.num_computed += len(nodes)
        first_node = entry.first_row + entry.item.num_span
        draft, rows = entry.draft, range(entry.first_row, first_node)
        if draft is None or not nodes:
            return Observed(request, rows, nodes, tokens)
        return Observed(request, join_rows(rows, [first_node + draft.row_of(node) for node in nodes]), nodes, tokens)

    def _emit(self, entry: Work, choice: Choice, logits: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Append the accepted tokens and the one after them, up to the request's end -> (nodes, tokens)."""
        assert entry.draft is not None
        draft, tree, record = entry.draft, entry.draft.tree, entry.record
        tokens = [*[tree.tokens[node] for node in choice.nodes[1:]], choice.token]
        num_taken = record.text.take(tokens)
        nodes = choice.nodes[: num_taken + 1]
        sources = [*[tree.sources[node] for node in nodes[1:]], ""][:num_taken]
        record.drafted(draft, nodes[1:])
        num_top, logprobs = entry.item.request.params.logprobs, list[PositionLogprobs]()
        if num_top is not None:  # token i was chosen after node i of the path
            rows = [entry.root_logit + draft.row_of(node) for node in nodes[:num_taken]]
            logprobs = token_logprobs(logits, rows, tokens[:num_taken], num_top)
        record.emitted(sources, logprobs)
        record.traced(draft, nodes[1:], tokens[:num_taken])
        return nodes, tuple(tokens[:num_taken])

    def _show_logits(self, work: Sequence[Work], batch: ForwardBatch, out: PassOutput) -> None:
        """Let a drafter that learns from the target's logits see them; nothing is computed where none does."""
        reader = logits_reader(self.drafter)
        if reader is None or not out.logits.shape[0]:
            return
        token_ids = batch.token_ids if batch.pending is None else batch.token_ids.clone()
        # The host's batch does not hold what was drawn on a device; it has been read since.
        for draft, root_row in roots_of(work) if batch.pending is not None else ():
            tokens = torch.tensor(draft.rows().tokens)
            token_ids[root_row : root_row + len(tokens)] = tokens
        reader.observe_logits(token_ids[batch.logit_rows], out.logits, [(e.item.request, e.first_logit) for e in work])

    def _publish(self, observed: Sequence[Observed], out: PassOutput) -> None:
        """Offer full blocks of committed rows to other requests, with the states that drafters need there."""
        if self.scheduler.prefix_cache is None:
            return
        for seen in observed:
            self.keep_boundaries(seen, out.hidden)
            if seen.request.error is None:
                self.scheduler.publish(seen.request, self.drafter.num_ready(seen.request))

    def keep_boundaries(self, seen: Observed, hidden: dict[int, Tensor]) -> None:
        """Keep the states that drafters need where a request's blocks end; without them, forget older ones."""
        if not self.drafter.hidden_layers:
            return
        first = seen.request.num_computed - len(seen.rows)
        self.boundaries.keep(seen.request.block_ids, first, seen.rows, self.drafter.hidden_layers, hidden)

    def finish(self, deciding: Sequence[Request], scheduled: Sequence[Request]) -> list[RequestGroup]:
        """Free requests that ended in this step or whose deadline has passed -> the groups that changed."""
        ended = [request for request in scheduled if request.finish_reason is not None]
        overdue = [request for request in self.scheduler.overdue() if request.finish_reason is None]
        for request in overdue:
            request.finish_reason, request.error = "abort", too_late(request)
        lost = [*overdue, *self.masks.take_failed()]
        changed = {r.parent_id: self.groups[r.parent_id] for r in (*deciding, *lost)}
        self._end([*ended, *lost])
        return list(changed.values())

    def _end(self, requests: Sequence[Request]) -> None:
        """Remove ended requests everywhere; a group is removed with its last sample."""
        if not requests:
            return
        if self.steady is not None:
            self.steady.forget()
        self.scheduler.finish(requests)
        self._forget(requests)
        for request in requests:
            self.records.pop(request.request_id).ended(self.policy.explain)
            self.masks.end(request)
            if request.parent_id in self.groups and self.groups[request.parent_id].finished:
                del self.groups[request.parent_id]
        if self.keep is not None:
            self.keep()
