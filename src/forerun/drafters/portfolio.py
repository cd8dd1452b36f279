"""Several drafters at once, which add to the same tree.

Knows: its members, who may add to a tree. Does not know: who should draft, and how much; a
guide (the engine's policy) tells for each request and member. Members are asked in their order, so that the guide of
a later one sees what the earlier ones found.

Under the rejection rule a node's children must come from one recorded distribution, so there a request takes the
first tree that has any drafts; which member that is depends on the text alone, never on what was drawn.

A member may leave its drafts on a device (`speculation.pending`) where nobody else would look at them: they are the
first of their requests, and no later member can be asked for these requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Observed, logits_reader
from forerun.drafters.registry import build_drafter, spec_of
from forerun.kernels.ops import LayerKV
from forerun.speculation.draft import Draft, Proposal, pending_of


def build_portfolio(context: DrafterContext) -> Portfolio:
    """The members of `context.options`, or the one drafter it names, under a guide; raises whatever they raise."""
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


class Guide(Protocol):
    """Decides which member drafts for whom, and learns what that cost."""

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """Nodes, the root included, the member may draft for each request; 1: it is not asked."""

    def least_chance(self, member: str) -> float:
        """See `Draft.least`."""

    def log_survival(self, proposal: Proposal, draft: Draft) -> Sequence[float]:
        """Log chance of each node of a member's proposal, from its own estimates and how those fared."""

    def learn_member_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """The member took this long to propose for these drafts."""

    def learn_pending_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """To enqueue the member's work took this long, for these drafts, which were read with the target's choices.

        What a device took to draw them is in the time of the pass.
        """


class Everyone:
    """The guide without a policy: every member drafts as much as there is room for, and is believed."""

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """All the room."""
        return [draft.room + 1 for draft in drafts]

    def least_chance(self, member: str) -> float:
        """Every level is drawn."""
        return 0.0

    def log_survival(self, proposal: Proposal, draft: Draft) -> Sequence[float]:
        """The member's own estimates."""
        return proposal.log_chances

    def learn_member_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """Nothing to learn."""

    def learn_pending_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """Nothing to learn."""


class Portfolio:
    """Holds several drafters. With one member it is that drafter under a guide."""

    def __init__(self, members: Sequence[Drafter], name: str, max_nodes: int, coupled: bool) -> None:
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
        self.guide: Guide = Everyone()
        self._coupled = coupled

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
        """Ask the members one after the other, as far as the guide allows."""
        might_be_pending = all(draft.may_be_pending for draft in drafts)
        for index, member in enumerate(self.members):
            self._ask(member, drafts, self.members[index + 1 :], might_be_pending)

    def _ask(self, member: Drafter, drafts: Sequence[Draft], behind: Sequence[Drafter], might_be_pending: bool) -> None:
        """`behind`: the members that are asked after this one."""
        open_ones = [draft for draft in drafts if self._is_open(member, draft)]
        if not open_ones:
            return
        start = perf_counter()
        quotas = self.guide.quotas(member.name, open_ones)
        wanted = [(draft, min(n, member.max_nodes) - 1) for draft, n in zip(open_ones, quotas, strict=True) if n > 1]
        if not wanted:
            return
        asked = [draft for draft, _ in wanted]
        may_be_pending = might_be_pending and self._are_first_and_last(asked, drafts, behind)
        least = self.guide.least_chance(member.name)
        for draft, num in wanted:
            draft.ask(num, least, may_be_pending)
        member.propose(asked)
        pending = pending_of(asked)
        if pending is None:
            self._believe(member, asked)
            self.guide.learn_member_cost(member.name, perf_counter() - start, asked)
        else:
            pending.when_read(partial(self._take_pending, member, perf_counter() - start, asked))

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

    def _believe(self, member: Drafter, asked: Sequence[Draft]) -> None:
        """Put the guide's chances in the place of the member's own."""
        for draft in asked:
            proposal = draft.proposal_of(member.name)
            draft.believe(proposal, self.guide.log_survival(proposal, draft))

    def _take_pending(self, member: Drafter, seconds: float, asked: Sequence[Draft]) -> None:
        """The member's trees are known at last; to enqueue them took so long."""
        self._believe(member, asked)
        self.guide.learn_pending_cost(member.name, seconds, asked)

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
