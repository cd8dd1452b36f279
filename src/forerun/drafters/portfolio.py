"""The drafters of an engine, one or several, which add to the same tree; any of them may fail.

Knows: its members, who may add to a tree, what asking them takes, which requests a member failed for and what a usable
tree is. Does not know: which member should draft how much (the drafts' plan decides by request and member). Members are
asked in their order, so that the plan for a later one sees what the earlier ones found.

Under the rejection rule a node's children must come from one recorded distribution, so there a request takes the
first tree that has any drafts; which member that is depends on the text alone, never on what was drawn.

A member may leave its drafts on a device (`speculation.draft`) if nobody else looks at them: they are the
first of their requests, and no later member can be asked for these requests.

Whatever a member raises or proposes, its requests go on without it: the text never depends on drafts, so a member that
is left out costs its requests speed and nothing else. What a failing member has drawn stays in the tree where the
distribution it was drawn from is recorded: dropping drawn nodes depending on their tokens would change the output
distribution of the rejection rule.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import (
    Asked,
    DraftCall,
    Drafter,
    DrafterContext,
    DrafterHealth,
    DrafterSpec,
    Observed,
    Stateless,
    logits_reader,
    states_reader,
)
from forerun.drafters.registry import check_names, spec_of
from forerun.errors import ConfigError, DrafterError
from forerun.kernels.cores import step_clock
from forerun.kernels.ops import LayerKV
from forerun.speculation.draft import Draft, pending_of
from forerun.speculation.tree import ROOT

MAX_ERRORS: Final = 3  # after so many failed calls a member rests
FIRST_REST_S: Final = 60.0  # the first time; twice as long each time it fails again
LONGEST_REST_S: Final = 3600.0
GOOD_S: Final = 600.0  # after so long without an error, earlier ones no longer count
NEEDED: Final = ("name", "max_nodes", "hidden_layers", "kv_specs", "weight_bytes", "propose", "attach", "begin",
                 "observe", "num_ready", "resume", "end")  # fmt: skip

log = logging.getLogger("forerun.drafters")


def build_portfolio(context: DrafterContext) -> Portfolio:
    """The members of `context.options`, or the one drafter it names; raises whatever they raise."""
    options = context.options
    each_options = [replace(each, adaptive=options.adaptive) for each in options.members or (options,)]
    contexts = [replace(context, spec=spec_of(each.name), options=each) for each in each_options]
    members = [Member(each.spec.build(each), context.model.vocab_size) for each in contexts]
    clock = step_clock(context.kernels.device)
    return Portfolio(members, options.name, options.max_draft_tokens + 1, context.grower.coupled, clock)


SPEC = DrafterSpec(
    name="portfolio",
    build=build_portfolio,
    help="several of these",
    options=("members",),
    max_draft_tokens=16,
)


class Member:
    """A drafter whose errors are contained.

    A call that raises, or a tree that cannot be verified, is logged (the first with its traceback) and puts the
    drafter's name into `failed_drafters` of the requests concerned, for which it is not asked again. After MAX_ERRORS
    such calls it rests: requests of that time count as failed, too, since it saw only part of them. Then it is tried
    with new requests, and one error sends it back for twice as long. Raises ConfigError if `drafter` lacks part of the
    protocol.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        _check_protocol(drafter)
        self.drafter = drafter
        self.name = drafter.name
        self.observes = getattr(drafter.observe, "__func__", None) is not Stateless.observe
        self._reader = states_reader(drafter) if drafter.hidden_layers else None
        self.num_errors = 0  # in all
        self._num_counted = 0  # of them, that count towards the next rest
        self._rests_until = self._erred_at = -math.inf
        self._rest_s = FIRST_REST_S
        self._vocab_size = vocab_size
        self._num_kinds = 0  # of KV that lags on its own, as `num_ready` said last

    @property
    def health(self) -> DrafterHealth:
        """Its errors, and how long it is still paused."""
        return DrafterHealth(self.num_errors, max(0.0, self._rests_until - time.monotonic()))

    @property
    def is_off(self) -> bool:
        """Whether it is paused after too many failures."""
        return self.num_errors > 0 and time.monotonic() < self._rests_until

    def drafts_for(self, request: Request) -> bool:
        """Whether it is not paused and has not failed for this request."""
        return not self.is_off and self.name not in request.failed_drafters

    def reads(self, request: Request) -> bool:
        """Whether it wants the states of what the request's next pass computes."""
        if not self.drafter.hidden_layers or not self.drafts_for(request):
            return False
        return self._reader is None or self.call("reads", [request], request)[1] is True

    def can_draft(self, request: Request) -> bool:
        """Whether asking it is of any use: what reads states has none before a request's first pass."""
        if not self.drafts_for(request):
            return False
        return self._reader is None or (request.num_computed > 0 and self.reads(request))

    def leave_if_off(self, requests: Iterable[Request]) -> None:
        """Count a pause as a failure for these requests, of which it sees only a part."""
        if self.is_off:
            for request in requests:
                self._leave(request)

    def call(self, verb: str, requests: Sequence[Request], *given: Any) -> tuple[bool, Any]:
        """Call the drafter -> whether that succeeded, and the result; a failure counts for these requests."""
        try:
            return True, getattr(self.drafter, verb)(*given)
        except Exception as error:  # whatever a drafter raises
            self._fail(verb, requests, error)
            return False, None

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Let it draft; take back what cannot be verified."""
        worked, _ = self.call("propose", [draft.request for draft in drafts], drafts)
        found = [(draft, find_nonsense(draft, self._vocab_size)) for draft in drafts]
        nonsense = [(draft, what) for draft, what in found if what is not None]
        if nonsense and worked:
            self._fail("propose", [draft.request for draft, _ in nonsense], DrafterError(nonsense[0][1]))
        for draft, what in found:
            if what is not None or not (worked or _was_drawn(draft)):
                draft.take_back()

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """The drafter's own answer; zeros for a request it failed for."""
        worked, said = self.call("num_ready", [request], request)
        if worked and not isinstance(said, tuple):
            self._fail("num_ready", [request], DrafterError(f"it gave {said!r:.40}, not a tuple of numbers"))
            worked = False
        if worked:
            self._num_kinds = len(said)
        return said if worked and self.drafts_for(request) else (0,) * self._num_kinds

    def _leave(self, request: Request) -> None:
        if self.name not in request.failed_drafters:
            request.failed_drafters = (*request.failed_drafters, self.name)

    def _fail(self, verb: str, requests: Sequence[Request], error: Exception) -> None:
        self.num_errors += 1
        for request in requests:
            self._leave(request)
        if self.is_off:
            return  # what its `end` raises now was said before
        self._count_error()
        left = (
            f"it rests for {self.health.rest_s:.0f} s"
            if self.is_off
            else f"not asked again for {len(requests)} requests"
        )
        said = f"drafter {self.name} failed in {verb}: {type(error).__name__}: {error}; {left}; the text is the same"
        log.error(said, exc_info=error if self.num_errors == 1 else None)

    def _count_error(self) -> None:
        """Rest if there were too many; those before a good while without any are forgotten."""
        now = time.monotonic()
        if now - max(self._erred_at, self._rests_until) > GOOD_S:
            self._num_counted, self._rest_s = 0, FIRST_REST_S
        self._num_counted, self._erred_at = self._num_counted + 1, now
        if self._num_counted >= MAX_ERRORS:
            self._rests_until = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)


class Portfolio:
    """Asks its members as planned. Implements `drafters.base.EngineDrafter`."""

    def __init__(
        self, members: Sequence[Member], name: str, max_nodes: int, coupled: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        """`max_nodes`: of a tree, if the members can use so many. `coupled`: their trees may share a root."""
        assert members
        check_names([member.name for member in members])
        self.name = name
        self.members = tuple(members)
        drafters = [member.drafter for member in members]
        self.max_nodes = min(max_nodes, 1 + sum(drafter.max_nodes - 1 for drafter in drafters))
        self.hidden_layers = tuple(sorted({layer for drafter in drafters for layer in drafter.hidden_layers}))
        self.kv_specs = tuple(spec for drafter in drafters for spec in drafter.kv_specs)
        self.weight_bytes = sum(drafter.weight_bytes for drafter in drafters)
        self._readers = [member for member in members if hasattr(member.drafter, "wants_logits")]
        self._of_states = [member for member in members if member.drafter.hidden_layers]
        self._calls: list[DraftCall] = []
        self._coupled, self._clock = coupled, clock

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Hand every member its share of the pool; nothing runs yet, so an error here is the user's to see."""
        start = 0
        for member in self.members:
            end = start + len(member.drafter.kv_specs)
            member.drafter.attach(target, own[start:end])
            start = end

    def begin(self, request: Request) -> None:
        """Tell every member, even a paused one, so that every `end` has had its `begin`."""
        for member in self.members:
            member.leave_if_off([request])
            member.call("begin", [request], request)

    @property
    def wants_logits(self) -> bool:
        """Whether a member wants to see those of the next pass."""
        return any(logits_reader(member.drafter) is not None for member in self._readers)

    def wants_states(self, requests: Sequence[Request]) -> bool:
        """See `EngineDrafter`."""
        return any(member.reads(request) for member in self._of_states for request in requests)

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Tell every member of the requests it still drafts for."""
        for member in self.members:
            if member.num_errors == 0:
                if member.observes:
                    member.call("observe", [each.request for each in observed], observed, hidden)
                continue
            member.leave_if_off([each.request for each in observed])
            seen = [each for each in observed if member.drafts_for(each.request)]
            if seen:
                member.call("observe", [each.request for each in seen], seen, hidden)

    def observe_logits(self, token_ids: Tensor, logits: Tensor, firsts: Sequence[tuple[Request, int]]) -> None:
        """Show them to the members that want to see them."""
        for member in self._readers:
            if not member.is_off and logits_reader(member.drafter) is not None:
                member.call("observe_logits", [], token_ids, logits, firsts)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Ask the members one after the other, as far as the drafts' plan allows."""
        might_be_pending = drafts[0].may_be_pending and all(draft.may_be_pending for draft in drafts)
        for index, member in enumerate(self.members):
            if member.is_off:
                member.leave_if_off([draft.request for draft in drafts])
            self._ask(member, drafts, self.members[index + 1 :], might_be_pending)

    def _ask(self, member: Member, drafts: Sequence[Draft], behind: Sequence[Member], might_be_pending: bool) -> None:
        """`behind`: the members that are asked after this one."""
        open_ones = [draft for draft in drafts if self._is_open(member, draft)]
        if not open_ones:
            return
        plan = drafts[0].plan
        sizes = plan.sizes(member.name, open_ones)
        wanted = [
            (draft, min(size, member.drafter.max_nodes - 1)) for draft, size in zip(open_ones, sizes, strict=True)
        ]
        asked = [draft for draft, size in wanted if size > 0]
        if not asked:
            return
        start = self._clock()
        may_be_pending = might_be_pending and self._are_first_and_last(asked, drafts, behind)
        least = plan.least_chance(member.name)
        for draft, size in wanted:
            if size > 0:
                draft.ask(member.name, size, least, may_be_pending)
        member.propose(asked)
        pending = pending_of(asked)
        if pending is None:
            self._take(member, start, asked)
        else:
            pending.when_read(partial(self._take, member, start, asked, self._clock() - start))

    def _take(self, member: Member, start: float, asked: Sequence[Draft], enqueueing_s: float | None = None) -> None:
        """The member's proposals are known: believe them as planned, and note the call."""
        gave = []
        for draft in asked:
            proposal, request = draft.proposal_of(member.name), draft.request
            if len(proposal.nodes) > 1:
                draft.believe(proposal, draft.plan.log_chances(draft.request, proposal))
            request.last_asked[member.name] = len(request.token_ids), request.num_preemptions
            gave.append(Asked(request, draft.num_caught_up, len(proposal.nodes) - 1, max(proposal.depths)))
        seconds = self._clock() - start if enqueueing_s is None else enqueueing_s
        self._calls.append(DraftCall(member.name, seconds, enqueueing_s is not None, gave))

    @property
    def health(self) -> dict[str, DrafterHealth]:
        """See `EngineDrafter`."""
        return {member.name: member.health for member in self.members}

    def take_calls(self) -> Sequence[DraftCall]:
        """See `EngineDrafter`."""
        calls, self._calls = self._calls, []
        return calls

    def _are_first_and_last(self, asked: Sequence[Draft], drafts: Sequence[Draft], behind: Sequence[Member]) -> bool:
        """Whether nobody will look at these drafts before they are verified; a step waits for one member's at most."""
        is_last = not any(self._is_open(other, draft) for other in behind for draft in asked)
        return is_last and all(len(draft.tree) == 1 for draft in asked) and pending_of(drafts) is None

    def _is_open(self, member: Member, draft: Draft) -> bool:
        """Whether the request allows this member, which has not failed for it, and its tree has room for drafts."""
        only = draft.request.drafter
        if draft.pending is not None or draft.room == 0 or not member.can_draft(draft.request):
            return False
        is_taken = not self._coupled and draft.request.params.temperature > 0.0 and len(draft.tree) > 1
        return only in (None, member.name) and not is_taken

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """The members' numbers, one after the other."""
        return tuple(position for member in self.members for position in member.num_ready(request))

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        """Tell every member what was said of its own KV, and the states it asked for."""
        start = 0
        for member in self.members:
            end = start + len(member.num_ready(request))
            member.leave_if_off([request])
            if member.drafts_for(request):
                member.call("resume", [request], request, num_ready[start:end], self._own_states(member, boundary))
            start = end

    def _own_states(self, member: Member, boundary: Tensor | None) -> Tensor | None:
        """The part of the boundary's states, all of one width, that the member asked for."""
        layers = member.drafter.hidden_layers
        if boundary is None or not layers:
            return None
        width = boundary.shape[-1] // len(self.hidden_layers)
        places = [self.hidden_layers.index(layer) for layer in layers]
        return torch.cat([boundary[..., place * width : (place + 1) * width] for place in places], dim=-1)

    def end(self, request_id: str) -> None:
        """Tell every member, one that failed, too: it may hold memory for the request."""
        for member in self.members:
            member.call("end", [], request_id)


def find_nonsense(draft: Draft, vocab_size: int) -> str | None:
    """What makes a proposed tree unusable, None if nothing does."""
    if draft.pending is not None:
        return None  # what a device drew
    tree = draft.tree
    if len(tree) > draft.max_nodes:
        return f"the tree has {len(tree)} nodes, but {draft.max_nodes} were allowed"
    if tree.tokens[ROOT] != draft.request.token_ids[-1]:
        return f"the root holds token {tree.tokens[ROOT]}, but the last known token is {draft.request.token_ids[-1]}"
    strange = [token for token in tree.tokens if not isinstance(token, int) or not 0 <= token < vocab_size]
    if strange:
        return f"the tree holds token {strange[0]!r}; the vocabulary is 0 to {vocab_size - 1}, as int"
    if len(draft.survival) != len(tree):
        return f"{len(draft.survival)} chances for {len(tree)} nodes: add nodes by draft.add"
    return None


def _was_drawn(draft: Draft) -> bool:
    """Some node's children were drawn from a distribution that counts in verification."""
    if draft.pending is not None:
        return False
    return any(draft.tree.proposal(node) is not None for node in range(len(draft.tree)))


def _check_protocol(drafter: Drafter) -> None:
    missing = [name for name in NEEDED if not hasattr(drafter, name)]
    if missing:
        raise ConfigError(
            f"{type(drafter).__name__} is no drafter: it lacks {', '.join(missing)}; inherit "
            "forerun.drafters.base.Stateless and set name, max_nodes and propose"
        )
