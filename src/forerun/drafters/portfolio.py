"""Several drafters at once, which add to the same tree.

Knows: its members, who may add to a tree, and what asking them takes. Does not know: who should draft, and how much;
the drafts' plan tells for each request and member. Members are asked in their order, so that the plan for a later one
sees what the earlier ones found.

Under the rejection rule a node's children must come from one recorded distribution, so there a request takes the
first tree that has any drafts; which member that is depends on the text alone, never on what was drawn.

A member may leave its drafts on a device (`speculation.pending`) where nobody else would look at them: they are the
first of their requests, and no later member can be asked for these requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Asked, DraftCall, Drafter, DrafterContext, DrafterSpec, Observed, logits_reader
from forerun.drafters.registry import build_drafter, spec_of
from forerun.kernels.ops import LayerKV
from forerun.speculation.draft import Draft, pending_of


def build_portfolio(context: DrafterContext) -> Portfolio:
    """The members of `context.options`, or the one drafter it names, as planned; raises whatever they raise."""
    options = context.options
    contexts = [replace(context, spec=spec_of(each.name), options=each) for each in options.members or (options,)]
    members = [build_drafter(each) for each in contexts]
    return Portfolio(members, options.name, options.max_draft_tokens + 1, context.grower.coupled)


SPEC = DrafterSpec(
    name="portfolio",
    build=build_portfolio,
    help="several of these",
    options=("members",),
    max_draft_tokens=16,
)


class Portfolio:
    """Holds several drafters. With one member it is that drafter, which drafts as planned."""

    def __init__(
        self, members: Sequence[Drafter], name: str, max_nodes: int, coupled: bool,
        clock: Callable[[], float] = perf_counter,
    ) -> None:  # fmt: skip
        """`coupled`: trees of several members may share a root."""
        assert members
        self.name = name
        self.members = tuple(members)
        self.max_nodes = max_nodes
        self.hidden_layers = tuple(sorted({layer for member in members for layer in member.hidden_layers}))
        self.kv_specs = tuple(spec for member in members for spec in member.kv_specs)
        self.weight_bytes = sum(member.weight_bytes for member in members)
        self._readers = [reader for member in members if (reader := logits_reader(member)) is not None]
        self.wants_logits = bool(self._readers)
        self._calls: list[DraftCall] = []
        self._coupled, self._clock = coupled, clock

    def attach(self, target: Sequence[LayerKV], own: Sequence[LayerKV]) -> None:
        """Hand every member its share of the pool."""
        start = 0
        for member in self.members:
            end = start + len(member.kv_specs)
            member.attach(target, own[start:end])
            start = end

    def begin(self, request: Request) -> None:
        """Tell every member."""
        for member in self.members:
            member.begin(request)

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Tell every member."""
        for member in self.members:
            member.observe(observed, hidden)

    def observe_logits(self, token_ids: Tensor, logits: Tensor) -> None:
        """Show them to the members that want to see them."""
        for reader in self._readers:
            reader.observe_logits(token_ids, logits)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Ask the members one after the other, as far as the drafts' plan allows."""
        might_be_pending = all(draft.may_be_pending for draft in drafts)
        for index, member in enumerate(self.members):
            self._ask(member, drafts, self.members[index + 1 :], might_be_pending)

    def _ask(self, member: Drafter, drafts: Sequence[Draft], behind: Sequence[Drafter], might_be_pending: bool) -> None:
        """`behind`: the members that are asked after this one."""
        open_ones = [draft for draft in drafts if self._is_open(member, draft)]
        if not open_ones:
            return
        start, plan = self._clock(), drafts[0].plan
        sizes = plan.sizes(member.name, open_ones)
        wanted = [(draft, min(size, member.max_nodes - 1)) for draft, size in zip(open_ones, sizes, strict=True)]
        asked = [draft for draft, size in wanted if size > 0]
        if not asked:
            return
        may_be_pending = might_be_pending and self._are_first_and_last(asked, drafts, behind)
        least = plan.least_chance(member.name)
        for draft, size in wanted:
            if size > 0:
                draft.ask(size, least, may_be_pending)
        member.propose(asked)
        pending = pending_of(asked)
        if pending is None:
            self._take(member, start, asked)
        else:
            pending.when_read(partial(self._take, member, start, asked, self._clock() - start))

    def _take(self, member: Drafter, start: float, asked: Sequence[Draft], enqueueing_s: float | None = None) -> None:
        """The member's proposals are known: believe them as planned, and note the call."""
        gave = []
        for draft in asked:
            proposal, request = draft.proposal_of(member.name), draft.request
            draft.believe(proposal, draft.plan.log_chances(proposal))
            num_known, depth = len(request.token_ids), max(proposal.depths)
            gave.append(Asked(request, num_known, draft.num_caught_up, len(proposal.nodes) - 1, depth))
        seconds = self._clock() - start if enqueueing_s is None else enqueueing_s
        self._calls.append(DraftCall(member.name, seconds, enqueueing_s is not None, gave))

    def take_calls(self) -> Sequence[DraftCall]:
        """What members were asked since this was called last."""
        calls, self._calls = self._calls, []
        return calls

    def _are_first_and_last(self, asked: Sequence[Draft], drafts: Sequence[Draft], behind: Sequence[Drafter]) -> bool:
        """Whether nobody will look at these drafts before they are verified; a step waits for one member's at most."""
        is_last = not any(self._is_open(other, draft) for other in behind for draft in asked)
        return is_last and all(len(draft.tree) == 1 for draft in asked) and pending_of(drafts) is None

    def _is_open(self, member: Drafter, draft: Draft) -> bool:
        """The request wants this member, and its tree may still take drafts."""
        only, failed = draft.request.drafter, member.name in draft.request.failed_drafters
        if draft.pending is not None or draft.room == 0 or failed:
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
            member.resume(request, num_ready[start:end], self._own_states(member, boundary))
            start = end

    def _own_states(self, member: Drafter, boundary: Tensor | None) -> Tensor | None:
        """Those of the boundary's states, all of one width, that the member asked for."""
        if boundary is None or not member.hidden_layers:
            return None
        width = boundary.shape[-1] // len(self.hidden_layers)
        places = [self.hidden_layers.index(layer) for layer in member.hidden_layers]
        return torch.cat([boundary[..., place * width : (place + 1) * width] for place in places], dim=-1)

    def end(self, request_id: str) -> None:
        """Tell every member."""
        for member in self.members:
            member.end(request_id)
